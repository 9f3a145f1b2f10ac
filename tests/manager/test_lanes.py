"""Lanes: more switches than copy at full speed begin in turn, the longest wait first, and their holders serve on."""

import pytest

from kybernate.config import Lanes
from kybernate.messages import ParkSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core.obstacles import Ask
from services.gpu_manager.core.riders import lanes
from services.gpu_manager.core.state import Lane
from tests.manager.test_recovery import restart
from tests.manager.world import World, booted, make_gpu, make_group, status

GPUS = [make_gpu(index) for index in range(4)]


def node(*written: Lanes, **annotations: str) -> tuple[World, list[tuple[str, str]]]:
    """Four groups, each with a parked seat and one that serves, long idle."""
    world = booted(*(make_group(f"G{n}", [n], 2) for n in range(4)))
    pairs = [tuple(world.fill(f"a{n}", f"b{n}", group=n, **annotations)) for n in range(4)]
    world.tick(30)
    world.configure(lanes=lanes.resolve(written, GPUS))
    return world, pairs  # type: ignore[return-value]


def ask(world: World, seat: str, oldest: float) -> None:
    world.traffic(seat, waiting=1, oldest=oldest)


def under_way(world: World) -> set[str]:
    return {*world.node.switches}


def test_the_longest_wait_goes_next_and_the_others_serve_on_until_then() -> None:
    world, pairs = node(Lanes(transfers=2))
    for (parked, _), oldest in zip(pairs, (4.0, 3.0, 1.0, 2.0), strict=True):
        ask(world, parked, oldest)
    assert under_way(world) == {"G0", "G1"}
    stage = world.stage(pairs[2][0])
    assert stage.stage == "lanes"
    assert stage.data == {"groups": ["G0", "G1"], "transfers": 2}
    assert "2 of 2 lanes copy: b0 for a0 on group G0, b1 for a1 on group G1" in stage.text
    assert [world.state(seat) for seat in pairs[2]] == [S.PARKED, S.ACTIVE]

    world.quiet(pairs[0][1])
    world.progress(world.job_of(world.node.switches["G0"].op))
    assert under_way(world) == {"G1", "G3"}, "with the message that ends the first one, the longest wait begins"
    world.quiet(pairs[1][1])
    world.progress(world.job_of(world.node.switches["G1"].op))
    assert under_way(world) == {"G2", "G3"}
    world.finish()
    assert [world.state(parked) for parked, _ in pairs] == [S.ACTIVE] * 4


def test_a_seat_that_no_request_waits_for_any_more_leaves_its_turn_to_others() -> None:
    world, pairs = node(Lanes(transfers=1))
    ask(world, pairs[0][0], 3.0)
    ask(world, pairs[1][0], 2.0)
    ask(world, pairs[2][0], 1.0)
    world.traffic(pairs[1][0])
    world.finish()
    assert world.state(pairs[1][1]) is S.ACTIVE, "the decision was not made before its turn"
    assert world.state(pairs[2][0]) is S.ACTIVE


def test_requests_in_flight_end_before_a_switch_takes_its_lane() -> None:
    world, pairs = node(Lanes(transfers=1))
    world.traffic(pairs[0][1], in_flight=1)
    ask(world, pairs[0][0], 300.0)
    assert world.state(pairs[0][1]) is S.DRAINING
    ask(world, pairs[1][0], 1.0)
    assert under_way(world) == {"G0", "G1"}


def test_a_switch_that_hangs_keeps_its_lane_for_a_bounded_time() -> None:
    world, pairs = node(Lanes(transfers=1))
    ask(world, pairs[0][0], 2.0)
    world.quiet(pairs[0][1])
    ask(world, pairs[1][0], 1.0)
    world.tick(lanes.LONGEST_SECONDS - 1)
    assert under_way(world) == {"G0"}
    world.tick(1)
    assert under_way(world) == {"G0", "G1"}


def test_a_group_waits_for_each_of_the_lanes_that_its_gpus_use() -> None:
    world = booted(make_group("G0", [0], 2), make_group("G12", [1, 2], 2), make_group("G3", [3], 2))
    (a, b), (c, _), (e, _) = (world.fill(f"a{n}", f"b{n}", group=n) for n in range(3))
    world.tick(30)
    world.configure(
        lanes=lanes.resolve([Lanes(gpus=(0, 1), transfers=1), Lanes(gpus=(2, GPUS[3].uuid), transfers=1)], GPUS)
    )
    ask(world, a, 3.0)
    ask(world, e, 2.0)
    assert under_way(world) == {"G0", "G3"}, "each has its lane"
    ask(world, c, 1.0)
    world.quiet(b)
    world.progress(world.job_of(world.node.switches["G0"].op))
    assert under_way(world) == {"G3"}, "the other lane of the pair is still taken"
    world.finish()
    world.tick()
    world.finish()
    assert world.state(c) is S.ACTIVE


def test_a_job_found_after_a_restart_of_the_manager_has_its_lane() -> None:
    world, pairs = node(Lanes(transfers=1))
    ask(world, pairs[0][0], 2.0)
    world.quiet(pairs[0][1])
    job = world.job()
    setup = world.node.setup
    restart(world, jobs=(status(job, "started", "pending", done=False),))
    world.configure(lanes=setup.lanes)
    world.router("router-0")
    world.tick(5.0)
    assert under_way(world) == {"G0"}
    ask(world, pairs[1][0], 1.0)
    assert world.stage(pairs[1][0]).stage == "lanes"
    world.progress(job)
    assert under_way(world) == {"G1"}


def test_what_copies_nothing_takes_no_lane_and_waits_for_none() -> None:
    world, pairs = node(Lanes(transfers=1))
    for name in pairs[1]:
        world.annotate(name, backend="restart")
        world.managed(name).durable.backend = "restart"
    ask(world, pairs[0][0], 2.0)
    assert lanes.LANES.holds(Ask(world.node, world.groups[1], world.now)) is None
    assert lanes.LANES.holds(Ask(world.node, world.groups[2], world.now)) is not None
    world.finish()
    assert world.command(ParkSeat, pairs[1][1]).accepted
    assert "G1" in world.node.switches
    assert lanes.LANES.holds(Ask(world.node, world.groups[2], world.now)) is None


def test_a_container_starts_in_free_room_although_all_lanes_are_taken() -> None:
    world = booted(make_group("G0", [0], 2), make_group("G1", [1], 2))
    a, _ = world.fill("a", "b")
    world.tick(30)
    world.configure(lanes=lanes.resolve([Lanes(transfers=1)], GPUS))
    ask(world, a, 1.0)
    fresh = world.seat(1, 0)
    world.at_gate(fresh, "c")
    assert world.state(fresh) is S.STARTING


def test_gpus_are_named_by_index_or_uuid_and_missing_ones_are_left_out() -> None:
    written = [Lanes(gpus=(0, "GPU-3", 9), transfers=2), Lanes(transfers=4)]
    assert lanes.resolve(written, GPUS) == (
        Lane(frozenset({"GPU-0", "GPU-3"}), 2),
        Lane(frozenset(gpu.uuid for gpu in GPUS), 4),
    )


@pytest.mark.parametrize("transfers", [1, 2, 3])
def test_no_more_switches_than_lanes_and_all_are_served(transfers: int) -> None:
    """Whatever asks, in waves: the lanes are never exceeded, and nothing waits for ever."""
    world, pairs = node(Lanes(transfers=transfers))
    for wave in range(6):
        turned = [pair[wave % 2] for pair in pairs]
        for number, seat in enumerate(turned):
            ask(world, seat, float((wave * 3 + number) % 5))
            assert len(world.node.switches) <= transfers
        for _ in range(4):
            assert len(world.node.switches) <= transfers
            world.finish()
            world.tick()
        assert [world.state(seat) for seat in turned] == [S.ACTIVE] * 4
        for seat in turned:
            world.traffic(seat)
        world.tick(30)
