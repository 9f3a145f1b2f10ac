"""A start that no request waits for, or that should have been healthy long ago, gives way to a seat with requests."""

from dataclasses import replace
from itertools import pairwise

import pytest

from kybernate.engines import BACKENDS, RESTART
from kybernate.messages import ActivateSeat, JobReply, PinSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import JobAnswered
from services.gpu_manager.core.obstacles import stage
from tests.facts import check
from tests.manager.world import World


def starting(world: World, *, asked: bool = True, backend: str = "restart") -> tuple[str, str]:
    """``slow`` starts, for a request or by warm-up; ``quick`` waits at the gate, without requests."""
    slow, quick = world.seat(0, 0), world.seat(0, 1)
    world.pod(slow, "slow", backend=backend)
    world.pod(quick, "quick", backend="restart")
    if asked:
        world.traffic(slow, waiting=1)
    world.call(slow)
    world.start(slow)
    world.call(quick)
    assert (world.state(slow), world.state(quick)) == (S.STARTING, S.WAITING)
    return slow, quick


def asks(world: World, seat: str, seconds: float = 0.5) -> bool:
    """A request waits for it for so long: whether it gets the group."""
    world.traffic(seat, waiting=1)
    world.call(seat)
    world.tick(seconds)
    world.finish()
    return world.state(seat) is S.STARTING


def until_it_starts(world: World, seat: str, most: int = 100) -> int:
    """Its warm-up: it takes the place of a seat that has become idle, after so many seconds."""
    for seconds in range(most):
        if world.state(seat) is S.STARTING:
            return seconds
        world.call(seat)
        world.tick(1.0)
        world.finish()
    raise AssertionError(f"{seat} is {world.state(seat)}")


def gives_way(world: World, slow: str, quick: str) -> None:
    """Its start is in the way of a request for the other one, which is then served."""
    world.tick(6.0)
    assert asks(world, quick)
    world.exit(slow)
    world.start(quick)
    world.healthy(quick)
    world.traffic(quick)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_whose_request_was_cancelled_gives_way_within_six_seconds(world: World, backend: str) -> None:
    """Before, it kept the group until its engine was healthy: minutes, of an LLM."""
    slow, quick = starting(world, backend=backend)
    world.tick(2.0)
    world.traffic(slow)
    assert not asks(world, quick)
    world.tick(4.0)
    assert asks(world, quick)
    assert (world.state(slow), world.managed(slow).lease) == (S.PARKED, False)
    (target,) = world.job().park
    assert (target.seat, target.backend) == (slow, RESTART)
    assert world.managed(slow).durable.failed.count == 0, "that is no failure"


def test_a_start_that_gives_way_and_is_parked_after_its_pod_was_deleted_does_not_load(world: World) -> None:
    slow, quick = starting(world, asked=False, backend="vllm")
    world.tick(6.0)
    world.traffic(quick, waiting=1)
    world.call(quick)
    world.tick(0.5)
    assert world.state(slow) is S.PARKING
    world.delete(slow)
    world.finish()
    facts = world.managed(slow).facts
    assert (facts.state, facts.holds, check(facts)) == (S.RELEASING, False, "")


def test_a_start_that_has_given_way_rehearses_the_next_time(world: World) -> None:
    """Before, its engine served without: what had parked it was taken for host memory that is short."""
    slow, quick = starting(world, backend="vllm")
    world.traffic(slow)
    gives_way(world, slow, quick)
    until_it_starts(world, slow)
    world.start(slow)
    world.healthy(slow)
    assert world.managed(slow).rehearses


def test_a_start_gives_way_to_the_request_and_not_to_warm_up_that_has_waited_for_longer(world: World) -> None:
    slow, quick = starting(world, asked=False)
    warm = world.seat(0, 2)
    world.at_gate(warm, "warm", backend="restart")
    for _ in range(20):
        world.tick(24.0)
        world.call(warm)
        world.call(quick)
    assert world.state(slow) is S.STARTING
    assert asks(world, quick)


def test_a_start_that_an_operator_wants_keeps_its_place(world: World) -> None:
    slow, quick = starting(world, asked=False)
    world.wish(slow)
    world.tick(20.0)
    assert not asks(world, quick)
    assert world.state(slow) is S.STARTING


@pytest.mark.parametrize("usual", [0.0, 40.0])
def test_a_start_that_has_given_way_once_keeps_its_place_for_its_usual_time(world: World, usual: float) -> None:
    """Callers that are less patient than the start takes would never see its end."""
    slow, quick = starting(world)
    if usual:
        world.node.learning.durations["slow restart starting"] = [usual]
    world.tick(1.0)
    world.traffic(slow)
    gives_way(world, slow, quick)
    world.annotate(quick, backend="fake")
    world.tick(10.0)
    assert asks(world, slow)
    world.start(slow)
    world.tick(1.0)
    world.traffic(slow)
    longest = usual or 600.0
    world.tick(longest - 10.0)
    assert not asks(world, quick)
    assert world.state(slow) is S.STARTING
    world.tick(10.0)
    assert asks(world, quick) or world.state(quick) is S.ACTIVE


def test_a_start_that_has_given_way_once_gives_way_again_while_no_request_has_asked_for_it(world: World) -> None:
    """Before, an engine that never gets healthy kept its group for ten minutes per start by one cancelled request."""
    slow, quick = starting(world)
    world.tick(1.0)
    world.traffic(slow)
    gives_way(world, slow, quick)
    until_it_starts(world, slow)
    world.exit(quick)
    world.start(slow)
    world.tick(6.0)
    assert asks(world, quick)


@pytest.mark.parametrize("warmup", [True, False])
def test_an_engine_that_never_answers_ends_its_neighbour_less_and_less_often(world: World, *, warmup: bool) -> None:
    """Before, it was started every other minute, and its neighbour was cold each time."""
    slow, quick = starting(world, asked=False)
    world.node.setup = replace(world.node.setup, warmup=warmup, start_within_seconds=20.0)
    pauses = []
    for _ in range(4):
        gives_way(world, slow, quick)
        pauses.append(until_it_starts(world, slow, 1000))
        world.exit(quick)
        world.start(slow)
    assert all(later > earlier + 50 for earlier, later in pairwise(pauses)), pauses
    gives_way(world, slow, quick)
    world.tick(5.0)
    assert asks(world, slow), "a request starts it at once"


def test_a_start_that_gave_way_is_tried_at_once_when_an_operator_wants_it(world: World) -> None:
    slow, quick = starting(world, asked=False)
    gives_way(world, slow, quick)
    world.call(slow)
    world.tick(30.0)
    world.call(slow)
    assert "gave way" in stage(world.node, world.managed(slow), world.now).text
    world.command(ActivateSeat, slow)
    world.tick(1.0)
    world.finish()
    assert world.state(slow) is S.STARTING


@pytest.mark.parametrize(("probe", "seconds"), [(0.0, 600.0), (60.0, 600.0), (900.0, 900.0)])
def test_a_first_start_that_is_not_healthy_in_ten_minutes_gives_way_and_has_failed(
    world: World, probe: float, seconds: float
) -> None:
    slow, quick = starting(world)
    world.shows(slow, probe_seconds=probe)
    world.tick(seconds - 5.0)
    assert not asks(world, quick)
    world.tick(5.0)
    assert asks(world, quick)
    assert world.managed(slow).durable.failed.why.startswith("its engine was not healthy within")


def test_a_pinned_start_does_not_give_way(world: World) -> None:
    slow, quick = starting(world)
    world.traffic(slow)
    world.command(PinSeat, slow)
    world.tick(700.0)
    assert not asks(world, quick)


@pytest.mark.parametrize("refused", [False, True])
def test_a_start_that_could_not_be_ended_goes_on(world: World, refused: bool) -> None:
    slow, quick = starting(world)
    world.traffic(slow)
    world.tick(6.0)
    world.traffic(quick, waiting=1)
    world.tick(0.5)
    assert world.state(slow) is S.PARKING
    if refused:
        world.receive(JobAnswered(world.job(), JobReply(accepted=False, code="unsupported")))
    else:
        world.progress(world.job(), park="active", activate="pending")
    assert (world.state(slow), world.managed(slow).lease) == (S.STARTING, True)
    world.healthy(slow)
    assert world.state(slow) is S.ACTIVE
