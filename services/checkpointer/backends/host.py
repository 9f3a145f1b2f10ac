"""The machine besides its driver: containers, freezers, reservations, and what /proc shows of GPU processes."""

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from kybernate import files
from kybernate.cgroups import PROC, Cgroup, read_text
from kybernate.logs import get_logger
from kybernate.node.host_memory import open_host_memory
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.backends.reservations import GpuReservations, Headroom
from services.checkpointer.containers import Containers
from services.checkpointer.core.refusals import Allowance, ProcessFacts, comma_list
from services.checkpointer.freezer import Freezer
from services.checkpointer.processes import ProcessIdentity, alive, thread_names

ALLOW_VARIABLE = "KYB_PARK_ALLOW"
"""In an engine's environment: those of the node's allowances that its pod wants, comma-separated."""

UVM_DEVICE = "/dev/nvidia-uvm"
CUDA_THREAD = re.compile("cuda[0-9a-f]{11}")
"""As driver 580 names it."""


class NoDeviceError(Exception):
    """A container lacks the device node of a GPU."""


@dataclass(frozen=True)
class Inspection:
    """Reads /proc before a park or a move; what cannot be read counts as absent. Tests pass another ``proc``."""

    proc: Path = PROC

    def process(self, who: ProcessIdentity) -> ProcessFacts:
        """Facts about one process."""
        return ProcessFacts(
            pid=who.pid,
            uvm_mappings=sum(line.endswith(UVM_DEVICE) for line in self._read(who.pid, "maps").splitlines()),
            threads=thread_names(who.pid, self.proc),
            environment=self.environment(who),
        )

    def environment(self, who: ProcessIdentity) -> dict[str, str]:
        """The environment with which the process started."""
        pairs = [entry.partition("=") for entry in self._read(who.pid, "environ").split("\0") if "=" in entry]
        return {name: value for name, _, value in pairs}

    def allowed(self, who: ProcessIdentity, ceiling: frozenset[str]) -> frozenset[str]:
        """Allowances that hold for a process: the node's, or of these the ones that its pod names. Never more, since an
        engine can write its environment."""
        own = self.environment(who).get(ALLOW_VARIABLE)
        return ceiling if own is None else ceiling & comma_list(own)

    def name(self, pid: int) -> str:
        """Name of a process; empty if it is gone."""
        return self._read(pid, "comm")

    def command(self, who: ProcessIdentity) -> str:
        """Its command line, with blanks between the words."""
        return self._read(who.pid, "cmdline").replace("\0", " ").strip()

    def uses_cuda(self, who: ProcessIdentity) -> bool:
        """True if it has the thread that the driver creates in CUDA processes; works on stopped processes too."""
        return any(map(CUDA_THREAD.fullmatch, thread_names(who.pid, self.proc)))

    def check_device(self, who: ProcessIdentity, gpu: str) -> None:
        """Raise NoDeviceError unless the GPU's device node is in the /dev of the process."""
        minor = self._minor(gpu)
        if minor is None:
            raise NoDeviceError(f"{self.proc}/driver/nvidia/gpus does not know {gpu}; is the driver loaded?")
        node = self.proc / str(who.pid) / "root" / "dev" / f"nvidia{minor}"
        try:
            there = stat.S_ISCHR(os.stat(node).st_mode)
        except FileNotFoundError:
            there = False
        except OSError as error:
            raise NoDeviceError(
                f"{node} cannot be looked at: {error.strerror}; the checkpointer needs SYS_PTRACE"
            ) from error
        if not there:
            remedy = "take rebalance: false out of its profile, if it is there, and recreate the pod"
            raise NoDeviceError(f"/dev/nvidia{minor} of {gpu} is not in the container; {remedy}")

    def kernel_module(self) -> str:
        """Version text of the kernel driver; empty if there is none."""
        return read_text(self.proc / "driver" / "nvidia" / "version")

    def _minor(self, gpu: str) -> int | None:
        """N of /dev/nvidiaN, from the kernel driver's /proc files; None if unknown."""
        for file in (self.proc / "driver" / "nvidia" / "gpus").glob("*/information"):
            lines = dict(line.partition(":")[::2] for line in file.read_text().splitlines())
            if lines.get("GPU UUID", "").strip().lower() == gpu.lower():
                minor = lines.get("Device Minor", "").strip()
                return int(minor) if minor.isdigit() else None
        return None

    def _read(self, pid: int, name: str) -> str:
        return read_text(self.proc / str(pid) / name)


@dataclass
class Host:
    """The machine that all halves share: containers, freezer, reservations."""

    containers: Containers
    freezer: Freezer
    headroom: Headroom
    reservations: GpuReservations = field(default_factory=GpuReservations)
    inspection: Inspection = field(default_factory=Inspection)
    allowed: frozenset[str] = frozenset()
    """Allowances of the node (``Allowance``)."""
    machine: str = "x86_64"
    """As ``uname -m`` names it; a fake machine is none that the driver does not support."""
    seats_dir: Path | None = None
    """Host folder of the seat folders; None: no seat is ended from here."""
    device_nodes: bool = True
    """False on a fake machine, whose GPUs have no device nodes."""

    def cgroup(self, seat: SeatProcesses) -> Cgroup | None:
        """The control group of the seat's container; None if it has none or is gone. Raises StepFailedError."""
        if seat.target.container_id.startswith("process://"):
            return None
        container = self.containers.find(seat.target)
        return None if container is None else container.cgroup

    def living(self, seat: SeatProcesses, *, strays: bool = False) -> list[ProcessIdentity]:
        """All living processes of the seat: those of its container, and members that left it.

        ``strays``: search all of /proc; see ``Containers.processes``. Raises StepFailedError.
        """
        found = self.containers.processes(seat.target, seat.root, strays=strays)
        return found + [m.who for m in seat.members if m.who not in found and alive(m.who)]

    def announce_end(self, seat: SeatProcesses) -> None:
        """Tell kyb-run that the node ends what it runs now, so that the container goes on. It compares the text with
        that at its start. Where it cannot be written, the container ends too, and kubelet starts it again."""
        if self.seats_dir is None:
            return
        try:
            text = f"{seat.epoch} {time.time_ns()}\n"
            files.replace(self.seats_dir / seat.target.seat / "ends", text, durable=False, mode=0o644)
        except OSError as error:
            meaning = "its container ends too, and starts again"
            get_logger().warning("seat.end_not_announced", seat=seat.target.seat, reason=str(error), meaning=meaning)

    def withdraw_end(self, seat: SeatProcesses) -> None:
        """Its end was announced and has failed: the next one of its engine is that of its container."""
        if self.seats_dir is not None:
            with contextlib.suppress(OSError):
                (self.seats_dir / seat.target.seat / "ends").unlink(missing_ok=True)


def open_host(
    fake_driver: Path | None,
    freeze_seconds: float,
    allowed: frozenset[str] = frozenset(),
    *,
    fake_kubelet: bool = False,
    seats_dir: Path | None = None,
) -> Host:
    """This machine, or with ``fake_driver`` (the daemon's socket) the fake one. Raises ExtraMissingError.

    On the fake machine copies take no host memory, so no memory limit applies; GPUs have no device nodes; and seats of
    several GPUs and processes are allowed, because the fake driver fails only where a test injects a fault.
    """
    containers = Containers(fake_kubelet=fake_kubelet)
    freezer = Freezer(containers.cgroups, freeze_seconds)
    if fake_driver is None:
        headroom = Headroom(open_host_memory(None), containers.cgroups)
        return Host(containers, freezer, headroom, allowed=allowed, machine=os.uname().machine, seats_dir=seats_dir)
    together = {Allowance.SEVERAL_GPUS, Allowance.SEVERAL_PROCESSES}
    headroom = Headroom(open_host_memory(fake_driver), None)
    return Host(containers, freezer, headroom, allowed=allowed | together, seats_dir=seats_dir, device_nodes=False)
