"""A made-up /proc and /sys/fs/cgroup in a folder: processes, control groups of both versions, a kernel that freezes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kybernate.cgroups import Cgroups
from kybernate.messages import SeatTarget
from services.checkpointer.containers import Containers, SeatContainer

CONTAINER = "3f" * 32
POD = "0a1b2c3d-1111-2222-3333-444455556666"
SLICE = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + POD.replace("-", "_") + ".slice"
CONTROLLERS = ("memory", "freezer", "pids")


def target(container_id: str = f"containerd://{CONTAINER}", pod_uid: str = POD) -> SeatTarget:
    return SeatTarget(seat="s00", pod_uid=pod_uid, container_id=container_id, gpus=("GPU-a",))


@dataclass
class Machine:
    """Folders that look like the kernel's."""

    folder: Path
    version: int

    @property
    def proc(self) -> Path:
        return self.folder / "proc"

    @property
    def root(self) -> Path:
        return self.folder / "cgroup"

    @property
    def containers(self) -> Containers:
        return Containers(Cgroups(self.root, self.proc))

    def find(self) -> SeatContainer:
        """The container of ``target``, which has a process."""
        return self.containers.find(target())

    def boot(self) -> "Machine":
        self.proc.mkdir(parents=True)
        self.root.mkdir()
        if self.version == 2:
            (self.root / "cgroup.controllers").write_text("memory pids\n")
        self.process(1, "/init.scope", start=1, parent=0)
        return self

    def folders(self, path: str) -> list[Path]:
        """Where a control group is to be found."""
        bases = [self.root] if self.version == 2 else [self.root / name for name in CONTROLLERS]
        return [base / path.lstrip("/") for base in bases]

    def process(self, pid: int, path: str, *, start: int = 100, state: str = "S", parent: int = 1) -> None:
        """A process in a control group."""
        one = self.proc / str(pid)
        (one / "task" / str(pid)).mkdir(parents=True)
        fields = [state, str(parent), str(pid), *("0" for _ in range(16)), str(start)]
        (one / "stat").write_text(f"{pid} (an (odd) name) {' '.join(fields)}\n")
        (one / "task" / str(pid) / "children").write_text("")
        lines = [f"0::{path}"] if self.version == 2 else [f"{n}:{c}:{path}" for n, c in enumerate(CONTROLLERS, 4)]
        (one / "cgroup").write_text("\n".join(lines) + "\n")
        for folder in self.folders(path):
            folder.mkdir(parents=True, exist_ok=True)
            procs = folder / "cgroup.procs"
            procs.write_text((procs.read_text() if procs.exists() else "") + f"{pid}\n")
        self.freezer(path)

    def freezer(self, path: str) -> Path:
        """Its freezer's file, made if it is not there."""
        folder = self.folders(path)[0 if self.version == 2 else 1]
        file = folder / ("cgroup.freeze" if self.version == 2 else "freezer.state")
        if not file.exists():
            file.write_text("0\n" if self.version == 2 else "THAWED\n")
            if self.version == 2:
                (folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        return file

    def memory(
        self, path: str, *, limit: int | None, used: int, cache: int = 0, dirty: int = 0, shared: int = 0
    ) -> None:
        """Limit and use of a control group; ``cache``: page cache in it, ``dirty``: how much of that is not clean,
        ``shared``: pages of shared memory. The rest is anonymous."""
        folder = self.folders(path)[0]
        folder.mkdir(parents=True, exist_ok=True)
        anon = used - cache - shared
        if self.version == 2:
            (folder / "memory.max").write_text(f"{'max' if limit is None else limit}\n")
            (folder / "memory.current").write_text(f"{used}\n")
            stat = f"anon {anon}\nshmem {shared}\ninactive_file {cache}\nactive_file 0\n"
            stat += f"file_dirty {dirty}\nfile_writeback 0\n"
        else:
            (folder / "memory.limit_in_bytes").write_text(f"{9223372036854771712 if limit is None else limit}\n")
            (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
            stat = f"rss 1\ntotal_rss {anon}\ntotal_shmem {shared}\ntotal_inactive_file 0\n"
            stat += f"total_active_file {cache}\ntotal_dirty {dirty}\ntotal_writeback 0\n"
        (folder / "memory.stat").write_text(stat)

    @asynccontextmanager
    async def kernel(self, path: str) -> AsyncIterator[None]:
        """Does what is written to the freezer's file, a moment later."""
        file = self.freezer(path)

        async def work() -> None:
            while True:
                word = file.read_text().strip()
                if self.version == 2:
                    (file.with_name("cgroup.events")).write_text(f"populated 1\nfrozen {word}\n")
                await asyncio.sleep(0.002)

        task = asyncio.create_task(work())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def machine(folder: Path, version: int) -> Machine:
    return Machine(folder, version).boot()
