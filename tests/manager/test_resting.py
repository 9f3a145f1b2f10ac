"""A seat that does not come back leaves the group to others for longer each time, also one that goes before them."""

import pytest

from kybernate.messages import JobReply, PinSeat
from kybernate.policy import KybBalanced
from kybernate.seat import SeatState as S
from services.gpu_manager import showing, telling
from services.gpu_manager.brain import Brain
from services.gpu_manager.inputs import JobAnswered
from services.gpu_manager.thinking import Thinking
from tests.manager.world import World, make_group


@pytest.fixture
def a(world: World) -> str:
    """Pinned and parked; b is active and busy."""
    a, b = world.fill("a", "b")
    world.tick(20)
    world.traffic(b, in_flight=1)
    world.annotate(a, pin="true")
    return a


@pytest.fixture
def b(world: World) -> str:
    return world.seat(0, 1)


def live(world: World, broken: str, seconds: int, *, refused: bool = False) -> tuple[int, int]:
    """(seconds in which another seat served, tries of the broken one)."""
    served = tries = 0
    for _ in range(seconds):
        world.tick(1)
        world.beat()
        for seat in world.groups[0].seat_ids[:2]:
            if seat != broken:
                active = world.state(seat) is S.ACTIVE
                world.traffic(seat, waiting=int(not active), in_flight=int(active))
        for operation in list(world.board.operations.values()):
            if operation.phase == "draining" and operation.victim:
                world.quiet(operation.victim)
            job = world.job_of(operation.op)
            fails = job.activate is not None and job.activate.seat == broken
            tries += fails
            if fails and refused:
                world.hear(JobAnswered(job.op, job.epoch, JobReply(accepted=False, code="unsupported", reason="no")))
            else:
                world.hear(JobAnswered(job.op, job.epoch, JobReply(accepted=True)))
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
    """Its rest is for others. Nobody else has anything to do here, and the GPU would stand idle."""
    live(world, a, 200)
    assert world.row(a).failed > 5
    world.traffic(b)
    tries = 0
    for _ in range(200):
        world.tick(1)
        world.beat()
        for operation in list(world.board.operations.values()):
            if operation.phase == "draining" and operation.victim:
                world.quiet(operation.victim)
            job = world.job_of(operation.op)
            tries += job.activate is not None
            world.hear(JobAnswered(job.op, job.epoch, JobReply(accepted=True)))
            world.progress(job, activate="parked")
    assert 200 / 32 <= tries <= 20


def test_it_says_so(world: World, a: str) -> None:
    live(world, a, 60)
    row = world.row(a)
    assert row.failed >= 3
    text = showing.record(world.board, row, world.now).blocked
    assert f"did not come back {row.failed} times in a row; others go first for" in text
    assert "made parked" in text, "the checkpointer's reason"
    thinking = Thinking(Brain("kyb-balanced", KybBalanced()))
    (seen,) = [
        seat
        for group in telling.why(world.board, thinking, world.now)["groups"]
        for seat in group["seats"]
        if seat["seat"] == a
    ]
    assert (seen["blocked"], seen["pinned"]) == (text, True)


def test_an_operator_who_asks_for_it_has_it_tried_now(world: World, a: str, b: str) -> None:
    live(world, a, 60)
    row = world.row(a)
    world.tick(row.rests_until - world.wall - 10)
    world.beat()
    assert world.state(b) is S.ACTIVE
    world.wish(a)
    assert world.board.operations["G0"].winner == a


def test_who_serves_again_begins_anew(world: World, a: str) -> None:
    live(world, a, 60)
    row = world.row(a)
    world.wall = max(world.wall, row.rests_until)
    world.beat()
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE
    assert (row.failed, showing.blocked(world.board, row, world.now)) == (0, "")


def test_a_group_that_has_failed_all_day_is_still_tried(world: World) -> None:
    """The pause doubles; after a thousand times the number was too large to compute with."""
    for _ in range(1100):
        world.board.failed("G0", world.now)
    assert world.board.pause_until["G0"] == world.wall + 30.0


def test_a_pin_of_an_operator_counts_like_the_pods_own(world: World, a: str, b: str) -> None:
    world.annotate(a, pin="false")
    world.command(PinSeat, a)
    served, _ = live(world, a, 120)
    assert served > 80


def test_where_one_holder_cannot_be_parked_another_one_leaves() -> None:
    """The driver refuses some processes for good; the best victim would be tried again and again."""
    world = World(groups=(make_group("G", [0], 3, slots=2),))
    world.boot()
    seats = world.fill(*"abc", vram="40GiB")
    (waits,) = [seat for seat in seats if world.state(seat) is S.PARKED]
    world.tick(20)
    world.traffic(waits, waiting=1)
    stuck = world.board.operations["G"].victim or ""
    (other,) = {*seats} - {stuck, waits}
    for _ in range(30):
        for operation in list(world.board.operations.values()):
            assert operation.victim is not None
            world.quiet(operation.victim)
            fails = operation.victim == stuck
            world.progress(world.job(), "active" if fails else "parked", "pending" if fails else "active")
        world.tick(1)
        world.beat()

    assert [world.state(seat) for seat in (stuck, other, waits)] == [S.ACTIVE, S.PARKED, S.ACTIVE]
