"""A seat that does not come back leaves the group to others for longer each time, also one that goes before them."""

import pytest

from kybernate.messages import JobReply
from kybernate.seat import SeatState as S
from services.gpu_manager.core import reports
from services.gpu_manager.core.inputs import JobAnswered
from services.gpu_manager.core.obstacles import blocked
from services.gpu_manager.publish import record
from tests.manager.world import World, booted, make_group


@pytest.fixture
def a(world: World) -> str:
    """Pinned and parked; b is active and busy."""
    a, b = world.fill("a", "b")
    world.tick(20)
    world.traffic(b, in_flight=1)
    world.annotate(a, pin="true")
    return a


def live(world: World, broken: str, seconds: int, *, refused: bool = False, others_ask: bool = True) -> tuple[int, int]:
    """(seconds in which another seat served, tries of the broken one)."""
    served = tries = 0
    for _ in range(seconds):
        world.later(1)
        for seat in world.groups[0].seat_ids[:2]:
            if seat != broken and others_ask:
                active = world.state(seat) is S.ACTIVE
                world.traffic(seat, waiting=int(not active), in_flight=int(active))
        world.drains_end()
        for under_way in list(world.node.switches.values()):
            job = world.job_of(under_way.op)
            fails = job.activate is not None and job.activate.seat == broken
            tries += fails
            if fails and refused:
                world.receive(JobAnswered(job, JobReply(accepted=False, code="unsupported", reason="no")))
            else:
                world.receive(JobAnswered(job, JobReply(accepted=True)))
                world.progress(job, activate="parked" if fails else "active")
        served += any(world.state(seat) is S.ACTIVE for seat in world.groups[0].seat_ids[:2] if seat != broken)
    return served, tries


@pytest.mark.parametrize("refused", [False, True])
def test_a_pinned_seat_that_never_comes_back_does_not_shut_the_others_out(
    world: World, a: str, b: str, refused: bool
) -> None:
    served, tries = live(world, a, 500, refused=refused)
    assert 5 <= tries <= 12
    assert served > 420
    assert world.state(b) is S.ACTIVE


def test_alone_it_is_tried_for_as_long_as_the_group_pauses(world: World, a: str, b: str) -> None:
    """Its back-off is for others. No other seat has demand here, and the GPU would stand idle."""
    live(world, a, 200)
    assert world.managed(a).backoff.activation.count > 5
    world.traffic(b)
    _, tries = live(world, a, 200, others_ask=False)
    assert 200 / 32 <= tries <= 20


def test_it_says_so(world: World, a: str) -> None:
    live(world, a, 60)
    row = world.managed(a)
    assert row.backoff.activation.count >= 3
    text = record(world.node, row, world.now).blocked
    assert f"did not come back {row.backoff.activation.count} times in a row; others go first for" in text
    assert "made parked" in text, "the checkpointer's reason"
    seen = world.why()[a]
    assert (seen["blocked"], seen["pinned"]) == (text, True)


def test_an_operator_who_asks_for_it_has_it_tried_now(world: World, a: str, b: str) -> None:
    live(world, a, 60)
    row = world.managed(a)
    world.later(row.backoff.activation.until - world.wall - 10)
    assert world.state(b) is S.ACTIVE
    world.wish(a)
    assert world.node.switches["G0"].incoming == a


def test_who_serves_again_begins_anew(world: World, a: str) -> None:
    live(world, a, 60)
    row = world.managed(a)
    world.wall = max(world.wall, row.backoff.activation.until)
    world.beat()
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE
    assert (row.backoff.activation.count, blocked(world.node, row, world.now)) == (0, "")


def test_a_group_that_has_failed_all_day_is_still_tried(world: World) -> None:
    """The pause doubles; after a thousand times the number was too large to compute with."""
    for _ in range(1100):
        reports._back_off_group(world.node, "G0", "it failed", world.now)
    assert world.node.groups["G0"].backoff.until == world.wall + 30.0


def test_where_one_holder_cannot_be_parked_another_one_leaves() -> None:
    """The driver refuses some processes for good; the best victim would be tried again and again."""
    world = booted(make_group("G", [0], 3, slots=2))
    seats = world.fill(*"abc", vram="40GiB")
    (waits,) = [seat for seat in seats if world.state(seat) is S.PARKED]
    world.tick(20)
    world.traffic(waits, waiting=1)
    stuck = world.node.switches["G"].victim or ""
    (other,) = {*seats} - {stuck, waits}
    for _ in range(30):
        for under_way in list(world.node.switches.values()):
            world.quiet(under_way.victim)
            fails = under_way.victim == stuck
            world.progress(world.job(), "active" if fails else "parked", "pending" if fails else "active")
        world.later(1)

    assert [world.state(seat) for seat in (stuck, other, waits)] == [S.ACTIVE, S.PARKED, S.ACTIVE]
