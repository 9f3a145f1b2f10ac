"""One run of the bench: its options, its GPU, and the processes that every case needs."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from bench.gpu import harness, machine
from bench.gpu.child import Child, child
from bench.gpu.harness import Checkpointer, checkpointer
from kybernate.messages import SeatTarget
from services.checkpointer.helper_pool import HelperDiedError, HelperHungError
from services.checkpointer.processes import identify, tree
from services.checkpointer.settings import HELPER


class CaseError(Exception):
    """A case could not be measured; the text names the step and the reason."""


@dataclass(frozen=True)
class Room:
    """The environment of the cases: GPU, checkpointer, helper processes."""

    folder: Path
    checkpointer: Checkpointer
    gpu: str
    """UUID of the GPU that is used."""
    everyone: tuple[str, ...]
    """UUIDs of all GPUs that the kernel driver shows; a map must name each."""
    total_bytes: int
    described: dict[str, Any]
    """The helper's description of driver and binding."""
    load: str = "auto"
    hang_seconds: float = 8.0
    """Deadline after which a call counts as hung in cases that expect a hang."""
    busy_seconds: float = 8.0
    kill_seconds: float = 0.25
    """How long a driver call runs before its helper is killed."""
    huge_pages: bool = False
    """Experiments may change the machine's huge-page setting; they put it back."""
    fill_step_gib: float = 0.25
    speed: float = 1.0
    ends: float = inf
    """Monotonic seconds at which the run ends: no further cycle begins that would not fit."""
    cycle: Callable[[dict[str, Any]], None] = lambda _: None
    """Called after each cycle with the row of its case so far."""
    make_busy: Callable[[int], Awaitable[None]] | None = None
    """Submits work on the stub; None: the target does it."""
    _numbers: list[int] = field(default_factory=lambda: [0])

    def seconds(self, gib: float) -> float:
        """Deadline in seconds of a step that moves ``gib``, or starts a process that does."""
        return 90.0 + 6.0 * gib

    @asynccontextmanager
    async def target(
        self, gib: float, *, processes: int = 1, engine: bool = False, env: Mapping[str, str] | None = None
    ) -> AsyncIterator["Target"]:
        """A ready process, or tree of them, that holds ``gib`` in each. ``engine``: below a process without memory."""
        options = ("--gib", gib, "--load", self.load)
        way = ("bench.gpu.kinds", "engine") if engine else ("bench.gpu.target", "--processes", processes)
        visible = {"CUDA_VISIBLE_DEVICES": self.gpu, **(env or {})}
        async with child(str(way[0]), *way[1:], *options, env=visible) as started:
            ready = await started.answer(self.seconds(gib * processes))
            root = identify(started.pid)
            pids = [one.pid for one in tree(root)] if root is not None else []
            name = f"bench.{self._next()}"
            seat = harness.seat_of(started.pid, [self.gpu], ready["bytes"], name=name)
            yield Target(started, ready, tuple(pids), seat, self.seconds(gib * processes))

    @asynccontextmanager
    async def bare(self, prefix: Sequence[str] = ()) -> AsyncIterator[Child]:
        """A process that makes driver calls and nothing else. ``prefix``: a program that becomes it."""
        async with child("bench.gpu.bare", end_seconds=1.0, prefix=prefix) as started:
            reply = await started.answer(120)
            if reply["code"] != 0:
                raise CaseError(f"cuInit answered {reply['name']} ({reply['code']})")
            yield started

    @asynccontextmanager
    async def filled(self, gib: float | None = None) -> AsyncIterator[float]:
        """Another process holds all free memory (or ``gib``) meanwhile; yields the GiB."""
        free = (self.total_bytes - await self.used()) / machine.GIB
        wanted = free if gib is None else gib
        options = ("--role", "fill", "--gib", wanted, "--step", self.fill_step_gib, "--load", self.load)
        async with child("bench.gpu.target", *options, env={"CUDA_VISIBLE_DEVICES": self.gpu}) as started:
            yield float((await started.answer(self.seconds(free)))["gib"])

    @asynccontextmanager
    async def impatient(self) -> AsyncIterator[Checkpointer]:
        """A second checkpointer that gives submitted work one second."""
        with tempfile.TemporaryDirectory(prefix="kyb-impatient-", dir=self.folder) as folder:
            command = HELPER
            async with checkpointer(Path(folder), command, lock_seconds=self.speed, speed=self.speed) as other:
                yield other

    async def used(self) -> int:
        """Bytes in use on the GPU, from the helper's NVML. Raises CaseError."""
        try:
            reply = await self.checkpointer.pool.call("ask", "memory", deadline=60)
        except (HelperDiedError, HelperHungError) as error:
            raise CaseError(f"NVML does not answer: {error}") from error
        if reply["code"] != 0:
            raise CaseError(f"NVML does not answer: {reply.get('text', reply.get('name'))}")
        return int(reply["memory"][self.gpu][0])

    async def settled(self, below: int, seconds: float = 20.0) -> bool:
        """True once the memory in use falls to ``below``; False after the deadline."""
        import asyncio

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await self.used() > below:  # noqa: ASYNC110 - NVML has no event for it
                    await asyncio.sleep(0.05)
                return True
        return False

    def _next(self) -> int:
        self._numbers[0] += 1
        return self._numbers[0]


@dataclass(frozen=True)
class Target:
    """A target that is ready."""

    child: Child
    ready: dict[str, Any]
    """Its first reply: bytes, checksum, work, graph."""
    pids: tuple[int, ...]
    seat: SeatTarget
    seconds: float
    """Deadline of its calls and answers."""

    async def intact(self) -> dict[str, bool]:
        """Compare with the first reply: checksums, results, and the output of the CUDA graph."""
        again = await self.child.ask("verify", self.seconds)
        same = {key: again[key] == self.ready[key] for key in ("checksum", "work", "graph")}
        return same if self.has_graph else {key: value for key, value in same.items() if key != "graph"}

    @property
    def has_graph(self) -> bool:
        """True if it has a CUDA graph (PyTorch only)."""
        graph = self.ready["graph"]
        return graph is not None and graph != [None] * len(self.pids)


async def do(
    bare: Child, op: str, pid: int, seconds: float, *, expect: int | None = 0, **arguments: Any
) -> dict[str, Any]:
    """One driver call. Raises CaseError for another code than expected (None: any), or after the deadline."""
    try:
        answer = await bare.ask(op, seconds, pid=pid, **arguments)
    except TimeoutError:
        raise CaseError(f"{op} of pid {pid} did not end within {seconds:g} s") from None
    if expect is not None and answer["code"] != expect:
        raise CaseError(f"{op} of pid {pid} answered {answer['name']} ({answer['code']})")
    return answer
