"""No seat waits for ever, and nothing spins meanwhile."""

import pytest

from kybernate.messages import ParkSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core import view
from tests.manager.world import World, booted


def test_a_start_without_demand_comes_after_start_within_over_many_calls() -> None:
    world = booted(warmup=False)
    seat = world.seat(0, 0)
    world.pod(seat, "a")

    for _ in range(26):  # kubelet calls again and again, each call lasts 25 s
        world.call(seat)
        world.tick(24.0)
        if world.state(seat) is S.STARTING:
            break

    assert world.state(seat) is S.STARTING
    assert 600.0 < world.wall - 1005.0 < 630.0


@pytest.mark.parametrize(("tier", "warmup"), [("standard", True), ("batch", False)])
def test_a_start_beside_models_that_take_turns_comes_after_start_within(tier: str, warmup: bool) -> None:
    """A rollout waits for it: it has no request that would grow older, and the others' requests are more."""
    world = booted()
    busy = world.fill("a", "b")
    world.configure(start_within_seconds=120.0, warmup=warmup)
    late = world.seat(0, 2)
    world.pod(late, "c", tier=tier)

    waited = 0.0
    while world.state(late) is S.WAITING and waited < 600.0:
        if waited % 24.0 == 0.0:
            world.call(late)
        for seat in busy:
            serves = world.state(seat) is S.ACTIVE
            world.traffic(seat, waiting=0 if serves else 8, in_flight=8 if serves else 0, oldest=10.0)
        if waited == 60.0:
            assert "120 s after its first call it goes before requests" in world.stage(late).text
        world.finish()
        world.tick(1.0)
        waited += 1.0

    assert 120.0 * (not warmup) < waited <= 125.0


def test_a_seat_that_is_parked_by_restart_has_waited_as_long_as_its_request(world: World) -> None:
    """It came to the gate when it was parked, perhaps hours ago."""
    a, b = world.fill("a", "b")
    world.annotate(a, backend="restart")
    world.exit(a)
    for _ in range(20):
        world.call(a)
        world.tick(20.0)
    world.traffic(a, waiting=1, oldest=3.0)

    seen = view.seat_view(world.node, world.managed(a), world.now)
    assert (world.state(a), seen.state) == (S.PARKED, S.WAITING)
    assert (seen.start_wait_seconds, seen.pinned) == (3.0, False)
    assert world.state(b) is S.DRAINING


def test_a_look_that_is_due_during_a_switch_or_a_pause_does_not_spin(world: World) -> None:
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    world.traffic(a, waiting=1)
    assert world.node.groups["G0"].wake > world.wall

    world.command(ParkSeat, b)
    assert world.state(b) is S.DRAINING
    world.tick(40.0)
    assert view.next_wake(world.node, world.now) > 0.1
