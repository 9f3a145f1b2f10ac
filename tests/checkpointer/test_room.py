"""Whatever the timing: no restore is issued without a reservation of its GPUs and evidence of room read under it.

The real backend with a driver in memory whose answers come in any order, while strangers come and go on the GPUs.
"""

import asyncio
import random
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kybernate.cgroups import Cgroups
from kybernate.messages import SeatTarget
from kybernate.node.host_memory import HostMemory
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import Ending, Member, SeatProcesses
from services.checkpointer.backends.reservations import GpuReservations, Headroom
from services.checkpointer.containers import Containers
from services.checkpointer.freezer import Freezer
from services.checkpointer.helper_pool import HelperCall
from services.checkpointer.processes import ProcessIdentity, identify

GPUS = ("GPU-a", "GPU-b")
TOTAL = 100
PATIENCE = Timeouts(base_seconds=2.0, seconds_per_gib=0.0, settle_seconds=0.02, settle_floor_wall_seconds=0.02)


class Stopping(Freezer):
    """Freezes nothing: the processes belong to other programs."""

    def stopped(self, process: ProcessIdentity) -> bool:
        return False

    async def freeze(self, *_: object) -> None:
        """Record the freeze without doing it."""

    thaw = freeze  # type: ignore[assignment]


class Roomy(HostMemory):
    """Unlimited host memory."""

    async def free_bytes(self) -> int:
        return 1 << 60


@dataclass
class Model:
    """A driver in place of the helper pool; every reply waits for the schedule."""

    chance: random.Random
    reservations: GpuReservations = field(default_factory=GpuReservations)
    held: dict[int, dict[str, int]] = field(default_factory=dict)
    parked: dict[int, dict[str, int]] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    strangers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GPUS, 0))
    waiting: list[asyncio.Event] = field(default_factory=list)
    evidence: dict[str, dict[str, int]] = field(default_factory=dict)
    """Free bytes by GPU that each seat read since it got its reservation."""
    restores: int = 0
    pids: frozenset[int] = frozenset()

    async def calls(self, key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
        return [await self.answer(key, verb, arguments) for verb, _, arguments in calls]

    async def answer(self, key: str, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        turn = asyncio.Event()
        self.waiting.append(turn)
        await turn.wait()
        reply = self.do(key, verb, arguments.get("pid", 0), arguments.get("gpu_map") or {})
        return {"code": 0, "name": "SUCCESS", **reply} if isinstance(reply, dict) else {"code": reply, "name": "NO"}

    def do(self, key: str, verb: str, pid: int, moves: dict[str, str]) -> dict[str, Any] | int:
        match verb:
            case "memory" | "processes" | "usage":
                memory = {gpu: (self.used(gpu), TOTAL) for gpu in (self.read(key) if verb != "processes" else ())}
                uses = [(pid, gpu, size) for pid, by_gpu in self.held.items() for gpu, size in by_gpu.items()]
                return {"memory": memory, "processes": [{"pid": p, "gpu": gpu, "bytes": n} for p, gpu, n in uses]}
            case "describe":
                return {"driver": "580.1", "capabilities": {"checkpoint": True, "gpu_map": True}, "mig": {}}
            case "state":
                return {"state": self.states[pid]}
            case "restore":
                return self.restore(key, pid, moves)
            case "checkpoint":
                self.parked[pid] = self.held.pop(pid, {})
        self.states[pid] = {"lock": "LOCKED", "checkpoint": "CHECKPOINTED", "unlock": "RUNNING"}[verb]
        return {}

    def restore(self, seat: str, pid: int, moves: dict[str, str]) -> dict[str, Any] | int:
        """Asserts what must never be."""
        wanted = {moves.get(gpu, gpu): size for gpu, size in self.parked[pid].items()}
        assert self.reservations.holds(seat, wanted), f"{seat} restores without a reservation"
        for gpu, size in wanted.items():
            assert self.evidence[seat][gpu] >= size, f"{seat} restores {size} and saw {self.evidence[seat][gpu]} free"
        if self.chance.random() < 0.1:
            return 1
        assert all(self.used(gpu) + size <= TOTAL for gpu, size in wanted.items()), (
            "no room, and no other process arrived meanwhile"
        )
        self.restores += 1
        self.held[pid], self.parked[pid] = wanted, {}
        self.states[pid] = "LOCKED"
        return {}

    def used(self, gpu: str) -> int:
        return self.strangers[gpu] + sum(by_gpu.get(gpu, 0) for by_gpu in self.held.values())

    def read(self, seat: str) -> tuple[str, ...]:
        """Evidence counts only while the GPU is reserved."""
        known = self.evidence.setdefault(seat, {})
        for gpu in GPUS:
            known.pop(gpu, None)
            if self.reservations.holds(seat, (gpu,)):
                known[gpu] = TOTAL - self.used(gpu)
        return GPUS

    def stranger(self) -> None:
        """Takes or frees memory of a GPU; on a GPU reserved for a restore it only frees, as the manager ensures."""
        gpu = self.chance.choice(GPUS)
        reserved = any(self.reservations.holds(seat, (gpu,)) for seat in self.evidence)
        room = TOTAL - self.used(gpu)
        self.strangers[gpu] = 0 if reserved or self.chance.random() < 0.5 else self.chance.randint(0, max(0, room))

    async def run(self, tasks: list["asyncio.Task[Ending]"]) -> None:
        """Answer in any order until all halves have ended."""
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0 if self.waiting else 0.001)
            if self.chance.random() < 0.2:
                self.stranger()
            if self.waiting and self.chance.random() < 0.7:
                self.waiting.pop(self.chance.randrange(len(self.waiting))).set()


async def note(step: str, pid: int | None, detail: str = "") -> None:
    """No journal."""


@pytest.fixture(scope="module")
def borrowed() -> Iterator[list[ProcessIdentity]]:
    """Processes that exist, for their identities."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    yield [who for process in processes if (who := identify(process.pid)) is not None]
    for process in processes:
        process.kill()
        process.wait()


def units(model: Model, borrowed: list[ProcessIdentity]) -> list[tuple[SeatProcesses, bool]]:
    """Seats on the same GPUs, more than fit, and whether each is parked; a one-GPU seat may have to move."""
    found = []
    for index, who in enumerate(borrowed):
        gpus = (GPUS[0],) if index % 2 else GPUS
        sizes = {gpu: model.chance.randint(1, 60) for gpu in gpus}
        member = Member(who=who, gpu_bytes=sizes)
        free = all(model.used(gpu) + size <= TOTAL for gpu, size in sizes.items())
        parked = not free or model.chance.random() < 0.7
        model.states[who.pid] = "CHECKPOINTED" if parked else "RUNNING"
        (model.parked if parked else model.held)[who.pid] = sizes
        to = (GPUS[1],) if parked and len(gpus) == 1 and model.chance.random() < 0.5 else gpus
        target = SeatTarget(seat=f"s{index}", pod_uid="u", container_id=f"process://{who.pid}", gpus=to)
        unit = SeatProcesses(target=target, group=f"s{index}", epoch=1, root=who, members=(member,), parked_on=gpus)
        found.append((unit, parked))
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_no_restore_without_reservation_and_evidence_of_room(borrowed: list[ProcessIdentity], seed: int) -> None:
    async def story() -> None:
        model = Model(random.Random(seed))
        freezer = Stopping(Cgroups(), 1.0)
        everything = frozenset({"several-gpus", "several-processes"})
        host = Host(
            Containers(fake_kubelet=True), freezer, Headroom(Roomy(), None), model.reservations, allowed=everything
        )
        host.device_nodes = False
        calls = DriverCalls(model, PATIENCE)  # type: ignore[arg-type]
        backend = DriverBackend(calls, host, Evidence(calls, freezer))
        tasks = []
        for unit, parked in units(model, borrowed):
            half = backend.activate if parked else backend.park
            tasks.append(asyncio.create_task(half(unit, note)))
        await model.run(tasks)
        for task in tasks:
            assert (await task).outcome in ("parked", "active", "quarantined"), await task
        assert all(model.used(gpu) <= TOTAL for gpu in GPUS)
        assert not any(host.reservations.holds(f"s{index}", (gpu,)) for index in range(4) for gpu in GPUS)

    asyncio.run(story())


def parked_seat(model: Model, who: ProcessIdentity) -> tuple[SeatProcesses, DriverBackend]:
    """A parked seat of one process on both GPUs, which are free."""
    ((seat, _),) = units(model, [who])
    model.held.clear()
    model.parked[who.pid] = seat.footprint
    model.states[who.pid] = "CHECKPOINTED"
    freezer = Stopping(Cgroups(), 1.0)
    host = Host(Containers(), freezer, Headroom(Roomy(), None), model.reservations, device_nodes=False)
    calls = DriverCalls(model, PATIENCE)  # type: ignore[arg-type]
    return seat, DriverBackend(calls, host, Evidence(calls, freezer))


class Forgetful(GpuReservations):
    """Loses a reservation at once."""

    async def take(self, owner: str, gpus: Iterable[str], seconds: float) -> None:
        await super().take(owner, gpus, seconds)
        self.release(owner)


async def test_a_restore_whose_reservation_is_lost_is_refused(borrowed: list[ProcessIdentity]) -> None:
    model = Model(random.Random(0), Forgetful())
    seat, backend = parked_seat(model, borrowed[0])
    task = asyncio.create_task(backend.activate(seat, note))

    await model.run([task])

    assert "its GPUs are not reserved" in (await task).reason
    assert model.restores == 0


async def test_a_step_is_noted_before_the_driver_is_called(borrowed: list[ProcessIdentity]) -> None:
    model, order = Model(random.Random(1)), list[str]()
    seat, backend = parked_seat(model, borrowed[0])
    do = model.do

    def called(key: str, verb: str, pid: int, moves: dict[str, str]) -> dict[str, Any] | int:
        order.append(f"call {verb}")
        return do(key, verb, pid, moves)

    async def noted(step: str, pid: int | None, detail: str = "") -> None:
        order.append(f"note {step}")

    model.do = called  # type: ignore[method-assign]
    task = asyncio.create_task(backend.activate(seat, noted))
    await model.run([task])

    assert (await task).outcome == "active"
    changes = [one for one in order if one.split()[1] in ("restore", "unlock")]
    assert changes == ["note restore", "call restore", "note unlock", "call unlock"]
