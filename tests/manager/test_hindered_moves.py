"""Moves that operators hinder: drains, pins and other moves on the way; groups that share GPUs; a gate that is away."""

import pytest

from kybernate.messages import DrainNode, MigrateSeat, PinSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import BusChanged, FaultyGpusSeen
from services.gpu_manager.core.obstacles import MOVING, Ask, heads_to
from tests.manager.pulling import Pulls
from tests.manager.test_restarts import (
    arrives,
    busy_home,
    called_again,
    comes_to_the_gate,
    comes_up,
    dropped,
    leaves,
    tickets,
)
from tests.manager.world import World, make_group

PAIRS = (make_group("G01", [0, 1], 3, rebalance=True), make_group("G23", [2, 3], 3, rebalance=True))


@pytest.fixture
def world() -> World:
    """Two pairs that are one pool."""
    made = World(groups=PAIRS, policy=Pulls(), warmup=False)
    made.boot()
    return made


def begins_to_move(world: World, seat: str, *, ordered: bool) -> None:
    """By a restart: an operator wants it on G23, or the policy."""
    if ordered:
        assert world.order(MigrateSeat, seat=seat, to="G23").accepted
        world.tick()
    world.traffic(seat, waiting=2)
    assert heads_to(world.node, world.managed(seat)) == "G23"


@pytest.mark.parametrize("fails", [False, True])
def test_a_move_that_the_policy_has_begun_is_ordered_until_it_has_ended(world: World, *, fails: bool) -> None:
    a, _ = busy_home(world, "cuda")
    world.traffic(a, waiting=2)
    world.tick()
    assert (world.state(a), world.managed(a).group.name, world.node.moves) == (S.MIGRATING, "G23", {})

    asked = world.ordering(MigrateSeat, seat=a, to="G23")

    assert (asked.outcome, [*world.node.moves]) == ("", [a])
    if fails:
        world.progress(world.job(), activate="parked", failed=True)
        assert (world.managed(a).group.name, world.ordered(a).outcome) == ("G01", "failed")
        assert "could not be activated there: made parked" in world.ordered(a).text
    else:
        world.finish()
        assert (world.state(a), world.managed(a).group.name, world.node.moves) == (S.ACTIVE, "G23", {})


@pytest.mark.parametrize("ordered", [False, True])
def test_a_seat_that_is_ordered_home_while_it_drops_its_copy_gives_its_place_back(
    world: World, *, ordered: bool
) -> None:
    a, _ = busy_home(world)
    begins_to_move(world, a, ordered=ordered)
    assert world.order(MigrateSeat, seat=a, to="G01").accepted
    seat = world.managed(a)
    assert (seat.group.name, heads_to(world.node, seat), world.node.moves) == ("G01", "", {})
    assert MOVING.holds(Ask(world.node, seat.home, world.now, seat)) is None, "its home may start it"


@pytest.mark.parametrize("scope", ["G23", ""])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_drain_of_the_group_to_which_a_seat_moves_sends_it_home_at_once(
    world: World, *, ordered: bool, ended: bool, scope: str
) -> None:
    a, b = busy_home(world)
    begins_to_move(world, a, ordered=ordered)
    if ended:
        dropped(world, a)

    assert world.order(DrainNode, group=scope).accepted

    if ordered:
        assert world.ordered(a).outcome == "failed"
        assert "is drained for maintenance by alice" in world.ordered(a).text
    if not ended:
        dropped(world, a)
    comes_to_the_gate(world, a)
    leaves(world, b)
    home = [""] if scope == "" else ["", ""]
    assert (tickets(world, a), world.managed(a).group.name) == (home, "G01")
    assert world.managed(a).acts_as is (S.WAITING if scope == "" else S.STARTING)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_seat_that_starts_on_a_group_that_is_drained_is_parked_there_once_it_serves(
    world: World, *, ordered: bool
) -> None:
    a, _ = busy_home(world)
    begins_to_move(world, a, ordered=ordered)
    called_again(world, a)
    world.order(DrainNode, group="G23")
    assert world.ordered("G23").outcome == "", "it waits for the seat"
    arrives(world, a)
    world.finish()
    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G23")
    assert world.ordered("G23").outcome == "done"


@pytest.mark.parametrize("step", ["drops", "ended", "starts"])
def test_a_drain_of_its_home_does_not_keep_a_seat_from_leaving(world: World, step: str) -> None:
    a, b = busy_home(world)
    begins_to_move(world, a, ordered=False)
    if step != "drops":
        dropped(world, a)
    if step == "starts":
        comes_to_the_gate(world, a)
    world.order(DrainNode, group="G01")
    if step == "drops":
        dropped(world, a)
    if step != "starts":
        comes_to_the_gate(world, a)
    arrives(world, a)
    world.traffic(b)
    world.finish()
    assert (world.state(a), world.managed(a).group.name, world.state(b)) == (S.ACTIVE, "G23", S.PARKED)
    assert world.ordered("G01").outcome == "done"


def test_a_move_to_a_group_whose_holder_is_pinned_meanwhile_ends_and_the_seat_serves_at_home(world: World) -> None:
    a, b = busy_home(world)
    c = world.seat(1, 0)
    comes_up(world, c, "c", "unload")
    world.traffic(c, in_flight=1)
    assert world.order(MigrateSeat, seat=a, to="G23").accepted
    assert world.command(PinSeat, c).accepted
    assert world.ordered(a).outcome == "failed"
    assert "G23 is kept by pinned c;" in world.ordered(a).text
    assert world.order(MigrateSeat, seat=a, to="G23").code == "pinned"
    world.traffic(a, waiting=2)
    world.traffic(b)
    world.tick(5)
    world.finish()
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G01")


@pytest.mark.parametrize("busy", ["a", "b"])
def test_a_move_of_a_seat_that_is_pinned_meanwhile_ends_and_the_seat_serves_at_home(world: World, busy: str) -> None:
    """The pinned seat was parked, or waited for ever for the other group."""
    a, b = busy_home(world, "fake")
    seat = {"a": b, "b": a}[busy]  # it serves and is idle, or is parked
    c = world.seat(1, 0)
    comes_up(world, c, "c", "unload")
    for one in (b, c):
        world.traffic(one, in_flight=one != seat)
    assert world.order(MigrateSeat, seat=seat, to="G23").accepted
    assert world.command(PinSeat, seat).accepted
    for one in (b, c):
        world.traffic(one)
    for _ in range(3):
        world.finish()
        world.later(5)
    assert (world.state(seat), world.managed(seat).group.name) == (S.ACTIVE, "G01")
    order = world.ordered(seat)
    assert (order.outcome, order.text) == ("failed", f"{world.managed(seat).name} is pinned")


def test_a_seat_that_is_pinned_when_its_copy_is_dropped_already_comes_to_the_other_group(world: World) -> None:
    a, _ = busy_home(world)
    begins_to_move(world, a, ordered=True)
    assert world.command(PinSeat, a).accepted
    called_again(world, a)
    arrives(world, a)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G23")
    assert not world.node.moves


def test_a_move_whose_target_is_closed_before_its_seat_could_leave_ends(world: World) -> None:
    _, b = busy_home(world, "fake")
    world.receive(BusChanged(False))
    assert world.order(MigrateSeat, seat=b, to="G23").accepted
    assert world.state(b) is S.ACTIVE
    world.receive(FaultyGpusSeen({"GPU-3": "XID 79"}))
    assert (world.state(b), world.ordered(b).outcome) == (S.ACTIVE, "failed")
    assert "GPU 3 is faulty: XID 79" in world.ordered(b).text
    assert "not moved to group G23: " in world.managed(b).reason


def test_two_seats_that_operators_move_to_one_group_come_one_after_the_other(world: World) -> None:
    a, b = busy_home(world)
    world.traffic(b)
    for seat in (a, b):
        assert world.order(MigrateSeat, seat=seat, to="G23").accepted
    world.finish()
    world.tick()
    assert [heads_to(world.node, world.managed(seat)) for seat in (a, b)] == ["G23", ""], "the place is for one"
    for seat in (a, b):
        called_again(world, seat)
        assert (world.state(seat), world.managed(seat).group.name) == (S.STARTING, "G23")
        arrives(world, seat)
        world.tick(5)
        world.finish()
        world.tick()
    assert not world.node.moves
    assert [world.managed(seat).group.name for seat in (a, b)] == ["G23", "G23"]
    assert [world.state(seat) for seat in (a, b)] == [S.PARKED, S.ACTIVE]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_move_goes_on_once_the_gate_is_there_again(world: World, *, ordered: bool) -> None:
    """Without the plugin no call comes. The place is not kept for so long."""
    a, _ = busy_home(world)
    begins_to_move(world, a, ordered=ordered)
    dropped(world, a)
    world.later(60)
    assert heads_to(world.node, world.managed(a)) == ""
    comes_to_the_gate(world, a)
    arrives(world, a)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G23")
    assert not world.node.moves
