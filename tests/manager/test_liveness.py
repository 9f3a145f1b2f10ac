"""Nobody waits for ever, and nothing spins meanwhile."""

from kybernate.messages import ParkSeat
from kybernate.seat import SeatState as S
from services.gpu_manager import looking
from tests.manager.world import World


def test_a_start_without_demand_comes_after_start_within_over_many_calls() -> None:
    world = World(warmup=False)
    world.boot()
    seat = world.seat(0, 0)
    world.pod(seat, "a")

    for _ in range(26):  # kubelet calls again and again, each call lasts 25 s
        world.call(seat)
        world.tick(24.0)
        if world.state(seat) is S.STARTING:
            break

    assert world.state(seat) is S.STARTING
    assert 600.0 < world.wall - 1005.0 < 630.0


def test_a_container_at_the_gate_goes_before_requests_that_came_later(world: World) -> None:
    a, b = world.fill("a", "b")
    world.tick(10)
    world.traffic(b, in_flight=1)
    late = world.seat(0, 2)
    world.pod(late, "c")
    world.call(late)
    world.tick(15.0)
    world.traffic(a, waiting=1)
    world.call(late)
    world.tick(12.0)

    operation = world.board.operations["G0"]
    assert operation.winner == late


def test_a_look_that_is_due_during_a_switch_or_a_pause_does_not_spin(world: World) -> None:
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)
    world.traffic(a, waiting=1)
    assert world.board.wake_at["G0"] > world.wall

    world.command(ParkSeat, b)
    assert world.state(b) is S.DRAINING
    world.tick(40.0)
    assert looking.next_wake(world.board, world.now) > 0.1
