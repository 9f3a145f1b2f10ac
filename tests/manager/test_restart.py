"""Seats of backend restart: parked they wait at the start gate, and only demand starts them again."""

import pytest

from kybernate.messages import SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import StartTicket
from tests.manager.world import World


@pytest.fixture
def parked(world: World) -> World:
    """Models a and b of backend restart on one group: b is active, a's container ended and waits at its gate."""
    a, b = world.fill("a", "b", backend="restart")
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)
    world.exit(a)
    assert world.state(a) is S.BACKOFF, "kubelet starts it again"
    world.call(a)
    assert world.state(a) is S.WAITING
    return world


def tickets(world: World, seat: str) -> int:
    return sum(isinstance(effect, StartTicket) and effect.seat == seat for effect in world.effects)


def test_a_container_that_a_restart_parked_takes_no_group_by_waiting_at_its_gate(parked: World) -> None:
    a, b = parked.seat(0, 0), parked.seat(0, 1)
    begun = tickets(parked, a)
    for _ in range(200):
        parked.tick(5.0)
        parked.beat()
        parked.call(a)
    assert (parked.state(b), tickets(parked, a)) == (S.ACTIVE, begun)


def test_demand_parks_the_other_and_opens_the_gate_and_the_start_is_learned_as_its_cost(parked: World) -> None:
    a, b = parked.seat(0, 0), parked.seat(0, 1)
    parked.traffic(a, waiting=1)
    for _ in range(20):
        parked.tick(1.0)
        parked.beat()
    assert parked.state(b) is S.DRAINING
    parked.quiet(b)
    job = parked.job()
    assert isinstance(job, SwitchJob)
    assert (job.park[0].backend, job.activate) == ("restart", None), "nothing is restored"
    parked.finish()
    assert parked.state(a) is S.STARTING
    parked.start(a)
    parked.tick(40.0)
    parked.healthy(a)
    assert parked.state(a) is S.ACTIVE
    costs = parked.managed(a).durable.costs
    assert costs.activate_seconds > 10.0


def test_a_parked_container_that_is_still_ending_is_not_activated(world: World) -> None:
    a, b = world.fill("a", "b", backend="restart")
    assert world.state(a) is S.PARKED
    jobs = sum(isinstance(effect, SwitchJob) for effect in world.effects)
    world.traffic(a, waiting=5)
    for _ in range(5):
        world.tick(1.0)
        world.beat()
    assert world.state(b) is S.ACTIVE
    assert sum(isinstance(effect, SwitchJob) for effect in world.effects) == jobs
