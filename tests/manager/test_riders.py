"""Three riders that the product does not have, whole: what they forbid and delay, the list explains."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest

from kybernate.roster import SeatRecord
from kybernate.seat import SeatState as S
from kybernate.topology import Group
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import ROWS, Ask, row
from services.gpu_manager.core.riders import RIDERS
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import GroupSwitch, NodeState, Rider, Sample, SwitchPhase, by_hook
from services.gpu_manager.ledger import FLAT, Durable, Ledger
from services.gpu_manager.publish import record
from tests.granted import BEGINS
from tests.manager.test_recovery import restart
from tests.manager.test_seat_rows import rows_kept
from tests.manager.world import World, booted, make_group


class Night(Rider):
    """Nothing is activated while it is dark; what serves serves on."""

    dark = False

    def __init__(self) -> None:
        @row(275, "night", "group", "operator", "the morning", turn=True)
        def night(ask: Ask) -> Stage | None:
            """It is dark."""
            return Stage("night", "nothing is activated at night") if self.dark else None


class Lanes(Rider):
    """Sent jobs first, then first drained: more jobs than there are lanes wait."""

    def __init__(self, most: int) -> None:
        self.most = most

    def waits(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        jobs = [one for one in node.switches.values() if one.phase is SwitchPhase.JOB]
        jobs.sort(key=lambda one: (one.job.sent is None, one.times.drained, one.op))
        text = f"{self.most} transfers run on this node already"
        return Stage("lane", text) if switch in jobs[self.most :] else None


@dataclass
class Used:
    """What ``Hours`` remembers of a seat."""

    seconds: float = 0.0
    since: float | None = None


class Hours(Rider):
    """Each model has a number of hours a day: a rider with a memory, in one file and one line."""

    name, record, most = "hours", Used, 3600.0

    def __init__(self) -> None:
        @row(276, "hours", "seat", "operator", "the next day")
        def hours(ask: Ask) -> Stage | None:
            """It has used up its hours."""
            if ask.of is None or self.used(ask.of, ask.now) < self.most:
                return None
            return Stage("hours", f"{ask.of.name} has used up its hours")

    def used(self, seat: ManagedSeat, now: Now) -> float:
        mine = self.of(seat)
        return float(mine.seconds) + (0.0 if mine.since is None else float(now.unix) - mine.since)

    def after(self, node: NodeState, seat: ManagedSeat, switch: GroupSwitch | None, now: Now) -> None:
        mine, seconds = self.of(seat), self.used(seat, now)
        mine.seconds, mine.since = seconds, float(now.unix) if seat.state is S.ACTIVE else None

    def row(self, node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
        return {"seconds": self.used(seat, now)}

    def metrics(self, node: NodeState, now: Now) -> Iterator[Sample]:
        for seat in node.seats.values():
            yield Sample("kybernate_seat_hours", "Used", self.used(seat, now), {"seat": seat.id})

    def why(self, node: NodeState, of: Group | ManagedSeat | None, now: Now) -> Any:
        return {"used": self.used(of, now)} if isinstance(of, ManagedSeat) else None


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hours]:
    """With its row in the list, and among the riders."""
    with rows_kept():
        rider = Hours()
        monkeypatch.setattr("services.gpu_manager.core.board.RIDERS", (*RIDERS, rider))
        yield rider


@pytest.fixture
def night() -> Iterator[Night]:
    """With its row in the list: what was decided in the evening is carried out."""
    with rows_kept():
        before, rider = list(ROWS), Night()
        BEGINS.update(added := [one for one in ROWS if one not in before])
        yield rider
        BEGINS.difference_update(added)


def test_a_rider_forbids_activations_and_says_why(night: Night, world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, night))
    night.dark = True
    world.tick(30)
    world.traffic(a, waiting=1, oldest=5.0)

    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)
    assert world.stage(a).text == "nothing is activated at night"
    assert world.node.groups["G0"].why == "nothing is activated at night"

    night.dark = False
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE


def test_a_drain_that_has_begun_ends_as_it_was_decided(night: Night, world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.riders = by_hook((*RIDERS, night))
    world.tick(30)
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING
    night.dark = True
    world.finish()
    assert world.state(a) is S.ACTIVE


def test_a_rider_delays_jobs_and_says_why() -> None:
    world = booted(make_group("G0", [0], 2), make_group("G1", [1], 2))
    a, b = world.fill("a", "b")
    c, d = world.fill("c", "d", group=1)
    world.node.riders = by_hook((*RIDERS, Lanes(1)))
    world.tick(30)
    world.traffic(a, waiting=1)
    world.switch(b, c)
    world.quiet(d)

    first, second = world.node.switches["G0"], world.node.switches["G1"]
    assert (first.job.sent is None, second.job.sent is None) == (False, True)
    assert world.stage(c).stage == "lane"

    world.progress(world.job_of(first.op))
    world.tick(0.1)
    assert second.job.sent is not None
    world.finish()
    assert (world.state(a), world.state(c)) == (S.ACTIVE, S.ACTIVE)


def test_a_rider_remembers_shows_and_measures_without_a_line_elsewhere(hours: Hours) -> None:
    """It forbids by what it remembers, also after a restart; a manager that does not know it keeps that."""
    world = booted(make_group("G0", [0], 2))
    a, b = world.fill("a", "b")
    world.tick(4000)
    world.traffic(a, waiting=1, oldest=5.0)
    world.finish()
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)

    kept = recovery.ledger(world.node, "boot").model_dump_json()
    restart(world, ledger=Ledger.model_validate_json(kept))

    world.traffic(a)
    world.traffic(b, waiting=1, oldest=5.0)
    world.later(30)
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)
    assert world.stage(b).text == "b has used up its hours"
    seen = record(world.node, world.managed(b), world.now)
    assert seen.riders["hours"]["seconds"] == hours.used(world.managed(b), world.now) >= hours.most
    assert "hours" not in [*SeatRecord.model_fields]
    assert world.why()[b]["used"] >= hours.most

    world.board.node.riders = by_hook(RIDERS)  # a manager without it
    again = recovery.ledger(world.node, "boot")
    restart(world, ledger=again)
    kept = recovery.ledger(world.node, "boot").model_dump()["seats"]
    assert [one["riders"] for one in kept] == [one["riders"] for one in again.model_dump()["seats"]]


def test_what_a_rider_remembers_is_no_field_of_the_seat() -> None:
    """And what the release before had there is read into its record."""
    seat = {one.name for kind in (Durable, ManagedSeat) for one in fields(kind)}
    records = {(rider.name, one.name) for rider in RIDERS if rider.record is not object for one in fields(rider.record)}

    assert {*FLAT.values()} <= records
    assert not FLAT.keys() & seat
