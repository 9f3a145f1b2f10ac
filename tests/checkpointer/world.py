"""A node for the checkpointer's tests: the real fake driver, real engine processes, a bus in memory."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs.build import build_stubs
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.messages import (
    AskJobs,
    Job,
    JobProgress,
    JobReply,
    JobStatus,
    SeatProgress,
    SeatTarget,
    SwitchJob,
)
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.backends.host import Host, open_host
from services.checkpointer.engine_http import AnswerCheck, open_engines
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.settings import HELPER, fake_helper_command
from services.checkpointer.worker import CheckpointWorker
from tests.until import until

NODE = "n1"
SPEED = 50.0
PATIENT_SECONDS = 20.0
"""Wall: least deadline of a driver call and of its effects. A test of a call that hangs, or of memory that stays
held, gives its own; in any other a busy machine would look like it."""
GIB = 2**30

ENGINE = """
import os, sys
from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient, start_cuda_thread
path, seat, processes, uuids, size = sys.argv[1:]
for number in range(int(processes) - 1):
    if os.fork() == 0:
        break
client = SyncDriverClient(path)
assert client.request("attach", seat=seat)["code"] == 0
start_cuda_thread()
for uuid in uuids.split(","):
    assert client.request("alloc", gpu=uuid, bytes=int(size))["code"] == 0
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.read()
"""


STUB_ENGINE = """
import ctypes, json, mmap, os, sys, threading
from kybernate.dev.fakes.engine.libcuda import Libcuda
from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient
processes, size, marks, library, attached, thread = sys.argv[1:]
role = 0
for number in range(1, int(processes) + int(attached)):
    if os.fork() == 0:
        role = number
        break
if role >= int(processes):  # cuInit, and every second one a context without memory
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    assert role % 2 or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0) == 0
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.read()
driver = Libcuda()
if thread:
    named = threading.Event()
    def run():
        assert ctypes.CDLL(None).prctl(15, thread.encode(), 0, 0, 0) == 0
        named.set()
        threading.Event().wait()
    threading.Thread(target=run, daemon=True).start()
    named.wait()
for device in range(driver.devices if os.environ["SPREAD"] else 1):
    driver.alloc(device, int(size))
if os.environ.get("MANAGED"):
    assert driver._lib.cuMemAllocManaged(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 20), 1) == 0
if json.loads(marks):
    assert SyncDriverClient(os.environ["KYB_FAKE_DRIVER"]).request("mark", **json.loads(marks))["code"] == 0
if library:
    mapped = mmap.mmap(os.open(library, os.O_RDONLY), 0, prot=mmap.PROT_READ)
sys.stdout.write("ready\\n")
sys.stdout.flush()
for line in sys.stdin:
    driver.synchronize(0)
    sys.stdout.write("synchronized\\n")
    sys.stdout.flush()
"""
"""An engine that links the stub. A line on its stdin makes it synchronize."""

Kind = Literal["fake", "ctypes"]
"""The driver of the node's helpers and engines: the fake one's socket, or libcuda through ctypes."""


def own_address() -> str:
    """A loopback address of this process: on 127.0.0.1 an engine of another test may take a port that was free."""
    pid = os.getpid()
    return f"127.{128 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


@dataclass
class Engine:
    """One engine: a container of one or more processes."""

    process: asyncio.subprocess.Process
    target: SeatTarget

    @property
    def pid(self) -> int:
        return self.process.pid

    async def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.process.wait()
        self.process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.wait_closed()
        await self.process.stdout.read()


@dataclass
class Node:
    """The machine below the checkpointer; outlives it."""

    folder: Path
    driver: asyncio.subprocess.Process
    client: FakeDriverClient
    gpus: tuple[str, ...]
    kind: Kind = "fake"
    stubs: Path | None = None
    cuda_version: str = "13000"
    """CUDA version of the stub: 13000 is driver 580, 12080 is 570."""
    server: MemoryServer = field(default_factory=MemoryServer)
    engines: list[Engine] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "driver.sock"

    @property
    def keys(self) -> Path:
        """Folder of the engines' keys."""
        folder = self.folder / "keys"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def helper_command(self) -> tuple[str, ...]:
        """How a checkpointer of this node starts helpers."""
        if self.kind == "fake":
            return fake_helper_command(self.socket)
        return ("/usr/bin/env", *self.settings, *HELPER)

    @property
    def settings(self) -> list[str]:
        """What leads a process to this machine through the stub libraries."""
        places = [f"LD_LIBRARY_PATH={self.stubs}", f"KYB_FAKE_DRIVER={self.socket}"]
        return [*places, f"KYB_STUB_CUDA_VERSION={self.cuda_version}"]

    async def engine(
        self,
        seat: str,
        *,
        gpus: tuple[int, ...] = (0,),
        gib: int = 40,
        processes: int = 1,
        backend: str = "",
        marks: dict[str, Any] | None = None,
        library: str = "",
        attached: int = 0,
        thread: str = "",
        environment: dict[str, str] | None = None,
        visible: tuple[int, ...] = (),
        by: tuple[str, ...] = (),
    ) -> Engine:
        """Start an engine and wait until it holds its memory.

        ``marks``: what its processes tell the fake driver about themselves; ``library``: a file that they map;
        ``attached``: number of further processes without memory; ``thread``: name of a thread; ``visible``: GPUs in its
        container, its own if none is named; ``by``: the command that runs it, as its first process.
        """
        uuids = tuple(self.gpus[index] for index in gpus)
        share = str(gib * GIB // len(gpus) // processes)
        if self.kind == "fake":
            command = (ENGINE, str(self.socket), seat, str(processes), ",".join(uuids), share)
        else:
            command = (STUB_ENGINE, str(processes), share, json.dumps(marks or {}), library, str(attached), thread)
        device = {
            "NVIDIA_VISIBLE_DEVICES": ",".join(self.gpus[index] for index in (visible or gpus)),
            "CUDA_VISIBLE_DEVICES": ",".join(uuids),
            "KYB_GPU_SEAT": seat,
            "SPREAD": "1",
            **dict(setting.split("=", 1) for setting in self.settings),
            **(environment or {}),
        }
        process = await asyncio.create_subprocess_exec(
            *by,
            sys.executable,
            "-c",
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**plain_environment(), **device},
        )
        target = SeatTarget(
            seat=seat,
            pod_uid=f"uid-{seat}",
            container_id=f"process://{process.pid}",
            gpus=uuids,
            vram_bytes=gib * GIB,
            backend=backend or ("fake" if self.kind == "fake" else "cuda"),
        )
        engine = Engine(process, target)
        self.engines.append(engine)
        for _ in range(processes + attached):
            assert await process.stdout.readline() == b"ready\n"
        return engine

    async def used(self) -> dict[str, int]:
        """Bytes in use by GPU."""
        return {gpu["uuid"]: gpu["used_bytes"] for gpu in (await self.client.call("devices"))["gpus"]}

    async def state(self, engine: Engine) -> str:
        """What the driver says; not to be asked of a frozen process."""
        return str((await self.client.call("get_state", pid=engine.pid))["state"])

    async def violations(self) -> dict[str, Any]:
        return (await self.client.call("stats"))["violations"]

    async def inject(self, fault: str, **arguments: Any) -> None:
        await self.client.call("inject", fault=fault, **arguments)

    def frozen(self, engine: Engine) -> bool:
        return Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


N = TypeVar("N", bound=Node)


def plain_environment() -> dict[str, str]:
    """This process' environment without settings of Kybernate."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}


@asynccontextmanager
async def node(
    kind: Kind = "fake",
    *,
    gpus: int = 2,
    speed: float = SPEED,
    options: tuple[str, ...] = (),
    made: type[N] = Node,  # type: ignore[assignment]
) -> AsyncIterator[N]:
    """A node without a checkpointer. ``options``: further ones of the fake driver."""
    folder = Path(tempfile.mkdtemp(prefix="kyb-"))
    machine = options if "--preset" in options else ("--gpus", str(gpus), "--memory", "80GiB", *options)
    places = ("--socket", str(folder / "driver.sock"), "--speed", str(speed))
    command = ("-m", "kybernate.dev.fakes.gpu", *machine, *places)
    stubs = None if kind == "fake" else await asyncio.to_thread(build_stubs)
    driver = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.DEVNULL)
    try:
        client = await FakeDriverClient.connect(folder / "driver.sock", wait_seconds=20)
        async with client:
            devices = (await client.call("devices"))["gpus"]
            here = made(folder, driver, client, tuple(gpu["uuid"] for gpu in devices), kind, stubs)
            try:
                yield here
            finally:
                for engine in here.engines:
                    await engine.end()
    finally:
        driver.terminate()
        await driver.wait()
        shutil.rmtree(folder)


class Checkpointer:
    """A worker in this process, and the manager's end of the bus."""

    def __init__(
        self, node: Node, worker: CheckpointWorker, bus: MemoryBus, journal: Journal, pool: HelperPool, host: Host
    ) -> None:
        self.node, self.worker, self.bus, self.journal, self.pool, self.host = node, worker, bus, journal, pool, host
        self.reports: list[JobStatus] = []
        self.epoch = journal.highest_epoch

    async def ask(self, job: Job) -> JobReply:
        return await self.bus.request(job, JobReply, timeout=60)

    def switch(
        self, *, park: tuple[SeatTarget, ...] = (), activate: SeatTarget | None = None, group: str = "G0"
    ) -> SwitchJob:
        self.epoch += 1
        op = f"op-{self.epoch}"
        return SwitchJob(cause="test", node=NODE, epoch=self.epoch, op=op, group=group, park=park, activate=activate)

    async def begin(self, **arguments: Any) -> str:
        """Send a switch that must be taken; returns its op."""
        job = self.switch(**arguments)
        reply = await self.ask(job)
        assert reply.accepted, reply
        return job.op

    async def done(self, op: str) -> JobStatus:
        """The status of an op when it is done."""
        return await until(
            lambda: next((one for one in reversed(self.reports) if one.op == op and one.done), None),
            what=f"{op} done; received {[(r.op, r.done) for r in self.reports]}",
            timeout=120,
        )

    async def do(self, **arguments: Any) -> JobStatus:
        """A switch from beginning to end."""
        return await self.done(await self.begin(**arguments))

    async def look(self, *engines: Engine) -> tuple[SeatProgress, ...]:
        targets = tuple(engine.target for engine in engines)
        reply = await self.ask(AskJobs(cause="test", node=NODE, epoch=0, targets=targets))
        return reply.seats

    async def outcome(self, engine: Engine) -> str:
        (seat,) = await self.look(engine)
        return seat.outcome

    async def listen(self, bus: MemoryBus, listening: asyncio.Event) -> None:
        async with bus.subscribe(JobProgress.pattern(node=NODE)) as messages:
            listening.set()
            async for message in messages:
                self.reports.append(message.status)


@asynccontextmanager
async def checkpointer(
    node: Node, *, allowed: frozenset[str] | None = None, margin_bytes: int = 0, **timeouts: float
) -> AsyncIterator[Checkpointer]:
    """A checkpointer of the node; leaving the context ends it like SIGTERM. ``allowed``: exactly these hazards."""
    journal = Journal(node.folder / "state")
    journal.load()
    patience = {"floor_wall_seconds": PATIENT_SECONDS, "settle_floor_wall_seconds": PATIENT_SECONDS}
    waits = Timeouts(**{"speed": SPEED, **patience, **timeouts})
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(journal.close)
        pool = await stack.enter_async_context(HelperPool(node.helper_command, node.folder / "state" / "helpers"))
        own = await stack.enter_async_context(MemoryBus.connect(node.server))
        managers = await stack.enter_async_context(MemoryBus.connect(node.server))
        host = open_host(node.socket, waits.settle(), fake_kubelet=True, seats_dir=node.folder / "seats")
        host.allowed = host.allowed if allowed is None else allowed
        http = await stack.enter_async_context(open_engines(node.keys))
        backends = open_backends(pool, waits, host, margin_bytes, fake=node.kind == "fake", http=http)
        check = AnswerCheck(http, speed=SPEED)
        worker = CheckpointWorker(NODE, own, journal, pool, backends, check)
        here = Checkpointer(node, worker, managers, journal, pool, host)
        listening = asyncio.Event()
        tasks = [asyncio.create_task(here.listen(managers, listening))]
        await listening.wait()
        serving = asyncio.create_task(worker.serve())
        tasks.append(serving)
        pattern = SwitchJob.pattern(node=NODE)
        await until(
            lambda: serving.done() or any(handler[1] == pattern for handler in node.server.handlers), what="serving"
        )
        try:
            yield here
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]


def environment(node: Node) -> dict[str, str]:
    """The environment of a separate checkpointer process."""
    driver = {"KYB_DRIVER": "cuda", "LD_LIBRARY_PATH": str(node.stubs)}
    return {
        **plain_environment(),
        **({} if node.kind == "fake" else driver),
        "KYB_NODE": NODE,
        "KYB_FAKE_DRIVER": str(node.socket),
        "KYB_FAKE_KUBELET": "true",
        "KYB_RUN_DIR": str(node.folder / "run"),
        "KYB_STATE_DIR": str(node.folder / "state"),
        "KYB_SPEED": str(SPEED),
    }
