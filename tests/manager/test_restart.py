"""Seats of backend restart: parked they have no engine, and only demand starts one by a call at the start gate."""

import pytest

from kybernate.messages import SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.facts import Process, Residence
from services.gpu_manager.core.inputs import StartTicket
from services.gpu_manager.publish import record
from tests.manager.test_recovery import restart
from tests.manager.world import World


@pytest.fixture
def parked(world: World) -> World:
    """Models a and b of backend restart on one group: b is active, a's container has ended and is at its gate."""
    a, b = world.fill("a", "b", backend="restart")
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)
    world.exit(a)
    world.call(a)
    assert world.state(a) is S.PARKED
    return world


def test_a_container_that_a_restart_parked_takes_no_group_by_waiting_at_its_gate(parked: World) -> None:
    a, b = parked.seat(0, 0), parked.seat(0, 1)
    begun = len(parked.sent(StartTicket, a))
    for _ in range(45):  # beyond what a start waits for in any case, 600 s
        parked.later(20.0)
        parked.call(a)
    assert (parked.state(b), len(parked.sent(StartTicket, a))) == (S.ACTIVE, begun)


def test_it_is_parked_without_a_process_and_the_policy_and_routers_see_one_that_starts(parked: World) -> None:
    a, b = parked.managed(parked.seat(0, 0)), parked.managed(parked.seat(0, 1))
    assert (a.facts.process, a.facts.residence, a.lease) == (Process.NONE, Residence.NOTHING, False)
    assert [view.seat_view(parked.node, seat, parked.now).state for seat in (a, b)] == [S.WAITING, S.ACTIVE]
    rows = [record(parked.node, seat, parked.now) for seat in (a, b)]
    assert [(row.state, row.cold) for row in rows] == [(S.PARKED, True), (S.ACTIVE, False)]


@pytest.mark.parametrize("written", [S.PARKED, S.WAITING, S.BACKOFF])
def test_it_is_parked_over_a_restart_of_the_manager_also_where_the_release_before_wrote_that_it_waits(
    parked: World, written: S
) -> None:
    a, kept = parked.seat(0, 0), recovery.ledger(parked.node, "boot")
    seats = tuple(one.model_copy(update={"state": written}) if one.seat == a else one for one in kept.seats)
    restart(parked, ledger=kept.model_copy(update={"seats": seats}), a="gone", b="active")
    facts = parked.managed(a).facts
    assert (facts.state, facts.process, facts.residence) == (S.PARKED, Process.NONE, Residence.NOTHING)


def test_an_engine_that_had_ended_while_no_manager_ran_has_crashed_if_it_served(parked: World) -> None:
    b = parked.seat(0, 1)
    restart(parked, a="gone", b="gone")
    assert parked.state(b) is S.BACKOFF


def test_a_start_that_comes_to_nothing_leaves_it_parked(parked: World) -> None:
    a, b = parked.seat(0, 0), parked.seat(0, 1)
    parked.exit(b)
    parked.traffic(a, waiting=1)
    parked.call(a)
    assert parked.state(a) is S.STARTING
    parked.calls.clear()
    parked.wait(300)
    assert (parked.state(a), parked.managed(a).facts.residence, parked.managed(a).lease) == (
        S.PARKED, Residence.NOTHING, False
    )  # fmt: skip


def test_demand_parks_the_other_and_opens_the_gate_and_the_start_is_learned_as_its_cost(parked: World) -> None:
    a, b = parked.seat(0, 0), parked.seat(0, 1)
    parked.traffic(a, waiting=1)
    parked.later(1.0, times=20)
    assert parked.state(b) is S.DRAINING
    parked.quiet(b)
    job = parked.job()
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
    world.later(1.0, times=5)
    assert world.state(b) is S.ACTIVE
    assert sum(isinstance(effect, SwitchJob) for effect in world.effects) == jobs
