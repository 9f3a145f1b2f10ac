"""What the manager's shell reads while nothing happens, counted; its clock is moved by hand."""

import json
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kybernate import files
from kybernate.clock import Clock
from kybernate.messages import NodeTrafficSignal
from kybernate.seat import SeatState as S
from services.gpu_manager import manager as shell
from services.gpu_manager import publish
from services.gpu_manager.core import view
from services.gpu_manager.core.inputs import Now, StartCall
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.core.state import NodeState
from services.gpu_manager.ledger import Durable, LedgerEntry
from services.gpu_manager.manager import Manager
from services.gpu_manager.pods import SETTLE_SECONDS
from tests.manager.test_manager import NoPods, running, sees
from tests.manager.world import World
from tests.until import until

WAKES = 20
"""Rounds of the shell's job in which a needless read would have come."""


class CountedPods(NoPods):
    """One pod in whose container kyb-run waits; counts the reads."""

    settled_seconds = 3600.0

    def __init__(self, owners: Owners) -> None:
        self.owners, self.reads = owners, 0

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        self.reads += 1
        return self.owners


class MovedClock(Clock):
    """The machine's clock, further ahead each time that a test says so."""

    ahead: float = 0.0

    def wall(self) -> float:
        return time.monotonic() + self.ahead

    def move(self, seconds: float) -> None:
        object.__setattr__(self, "ahead", self.ahead + seconds)


class Idle:
    """A manager whose only seat, parked by restart, has no request."""

    def __init__(self, folder: Path) -> None:
        self.world, self.folder, self.clock, self.wakes = World(warmup=False), folder, MovedClock(), 0
        self.looks = 0
        self.seat = self.world.seat(0, 0)
        self.world.pod(self.seat, "m", backend="restart")
        owner = replace(self.world.pods[self.seat], running=True, container_id="process://1", restarts_inside=True)
        self.pods = CountedPods(Owners((owner,), frozenset({owner.uid})))
        self.manager: Manager

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Manager]:
        (owner,) = self.pods.owners.pods
        known = Durable(container_id=owner.container_id or "", started=True)
        entry = LedgerEntry(
            seat=self.seat, state=S.WAITING, epoch=3, lease=False, pod=owner.pod, pod_uid=owner.uid, durable=known
        )
        given: dict[str, Any] = {"known": (entry,), "pods": self.pods, "clock": self.clock}
        async with running(self.world, self.folder, sees("gone"), **given) as manager:
            self.manager = manager
            refresh, calls = manager.roster.refresh, manager.gate.calls

            def woken() -> None:
                self.wakes += 1
                refresh()

            def looked(seats: Iterable[str]) -> dict[str, StartCall]:
                self.looks += 1
                return calls(seats)

            manager.roster.refresh, manager.gate.calls = woken, looked  # type: ignore[method-assign]
            yield manager

    def call(self, name: str, seat: str = "") -> None:
        folder = self.folder / "seats" / (seat or self.seat)
        folder.mkdir(parents=True, exist_ok=True)
        call = {"call": name, "since": time.time(), "until": time.time() + 3600, "inside": not seat, "closed": []}
        files.replace(folder / "call.json", json.dumps(call), durable=False)

    async def known(self, name: str) -> None:
        """The board has the call."""
        gate = self.manager.node.seats[self.seat].gate
        await until(lambda: gate.call is not None and gate.call.call == name, what=f"call {name} is known")

    async def some_wakes(self) -> None:
        before = self.wakes
        await until(lambda: self.wakes >= before + WAKES, what="some rounds of the job")

    async def some_looks(self) -> None:
        before = self.looks
        await until(lambda: self.looks >= before + WAKES, what="some looks at the gate")


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Idle:
    for name in ("POLL_SECONDS", "POLL_SOON_SECONDS", "GATE_SECONDS", "QUIET_GATE_SECONDS"):
        monkeypatch.setattr(shell, name, 0.001)
    return Idle(tmp_path)


async def test_a_kyb_run_that_waits_for_a_request_causes_no_reads_of_the_pods(idle: Idle) -> None:
    """Each read asks kubelet, whose limit is for the whole node."""
    idle.call("first")
    async with idle.running() as manager:
        await until(lambda: manager.node.seats[idle.seat].acts_as is S.WAITING, what="it waits at the gate")
        await idle.known("first")
        idle.clock.move(SETTLE_SECONDS + 1)
        await idle.some_wakes()
        reads = idle.pods.reads

        await idle.some_wakes()
        idle.call("again")
        await idle.known("again")
        await idle.some_wakes()

        assert idle.pods.reads == reads


async def test_a_call_for_a_seat_without_a_known_pod_causes_reads(idle: Idle) -> None:
    free = idle.world.seat(0, 1)
    async with idle.running() as manager:
        idle.clock.move(SETTLE_SECONDS + 1)
        await idle.some_wakes()

        idle.call("of kubelet", free)
        await until(lambda: free in manager.calling, what="the call is known")
        for _ in range(3):
            idle.clock.move(SETTLE_SECONDS + 1)
            reads = idle.pods.reads
            await until(lambda: idle.pods.reads > reads, what="a read of the pods")  # noqa: B023


async def test_an_annotation_that_cannot_be_used_is_logged_once(idle: Idle) -> None:
    (owner,) = idle.pods.owners.pods
    owner = replace(owner, annotations=owner.annotations | {"kyb.ai/tier": "god"})
    idle.pods.owners = Owners((owner,), frozenset({owner.uid}))
    with capture_logs() as logs:
        async with idle.running():

            def said() -> list[str]:
                return [line["reason"] for line in logs if line["event"] == "pod.annotation_unusable"]

            await until(said, what="it is logged")
            await idle.some_wakes()

    (reason,) = said()
    assert "kyb.ai/tier" in reason


async def test_what_a_call_waits_for_is_not_written_anew_every_second(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, make = 0, publish.gate_texts

    def texts(node: NodeState, now: Now) -> dict[str, str]:
        nonlocal written
        written += 1
        return make(node, now)

    monkeypatch.setattr(publish, "gate_texts", texts)
    idle.call("first")
    status = idle.folder / "seats" / idle.seat / "status.json"
    async with idle.running():
        await idle.known("first")
        idle.clock.move(60.0)
        await until(status.exists, what="it is written once")
        await idle.some_looks()
        before = written

        idle.clock.move(1.0)
        await idle.some_looks()

        assert written == before


async def test_the_gate_is_looked_at_often_only_while_a_request_waits_for_a_start(
    idle: Idle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle.running() as manager:
        seat = manager.node.seats[idle.seat]

        async def requests(waiting: int) -> None:
            level = {"cause": "c", "source": "r", "model": "m", "seat": seat.id, "node": "n1", "ttl_seconds": 3600.0}
            await manager.receive(NodeTrafficSignal(**level, waiting=waiting))  # type: ignore[arg-type]
            await until(lambda: view.demand(manager.node, seat).waiting == waiting, what="the level is known")

        await requests(1)
        monkeypatch.setattr(shell, "QUIET_GATE_SECONDS", 1e9)
        await idle.some_looks()

        await requests(0)
        await idle.some_wakes()
        looks = idle.looks
        await idle.some_wakes()
        assert idle.looks == looks
