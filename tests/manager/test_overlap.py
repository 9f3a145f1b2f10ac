"""Groups that share GPUs take turns: whoever needs several finds them free together, and nobody starves."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kybernate.messages import PinSeat, SeatEvent
from kybernate.seat import SeatState as S
from services.gpu_manager import looking
from tests.manager.test_properties import AnyOrder
from tests.manager.world import World, make_group


@pytest.fixture
def node() -> Iterator[World]:
    """Two GPUs sold singly (G0, G1) and as a pair (G01)."""
    world = World(groups=(make_group("G0", [0], 2), make_group("G1", [1], 2), make_group("G01", [0, 1], 2)))
    world.boot()
    yield world
    looking.validate(world.board)


def both_singles_active(node: World) -> tuple[str, str]:
    (a,), (b,) = node.fill("a", group=0), node.fill("b", group=1)
    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    return a, b


def with_a_parked_pair(node: World) -> tuple[str, str, str]:
    """A pair that was started once and then made room for two singles."""
    (pair,) = node.fill("p", group=2)
    a, b = node.seat(0, 0), node.seat(1, 0)
    for seat, model in ((a, "a"), (b, "b")):
        node.pod(seat, model)
        node.call(seat)
        node.finish()
        node.start(seat)
        node.healthy(seat)
        node.traffic(seat, in_flight=1)
    assert node.state(pair) is S.PARKED
    return a, b, pair


def test_a_pair_waits_while_singles_hold_its_gpus_and_the_gate_says_who(node: World) -> None:
    a, b = both_singles_active(node)
    for seat in (a, b):
        node.traffic(seat, in_flight=1)
    node.pod(node.seat(2, 0), "p")
    node.call(node.seat(2, 0))

    assert node.state(node.seat(2, 0)) is S.WAITING
    text = looking.gate_texts(node.board, node.now)[node.seat(2, 0)]
    assert a in text
    assert b in text


def test_idle_singles_yield_to_a_pair_together(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    for seat in (a, b):
        node.traffic(seat)
    node.tick(5)

    node.traffic(pair, waiting=1, cause="req-9")

    assert (node.state(a), node.state(b)) == (S.DRAINING, S.DRAINING)
    assert node.state(pair) is S.PARKED, "nothing is restored before both GPUs are free"
    node.finish()
    node.finish()
    assert (node.state(a), node.state(b), node.state(pair)) == (S.PARKED, S.PARKED, S.ACTIVE)
    causes = {e.cause for e in node.said if isinstance(e, SeatEvent) and e.state is S.PARKING}
    assert "req-9" in causes


def test_a_pair_goes_to_sleep_for_a_single_and_the_other_single_may_come_too(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    for seat in (a, b):
        node.traffic(seat)
    node.tick(5)
    node.traffic(pair, waiting=1)
    node.finish()
    node.finish()
    node.traffic(pair)
    node.tick(5)

    node.traffic(a, waiting=1)
    assert node.state(pair) is S.DRAINING
    node.traffic(b, waiting=1)
    node.finish()
    node.finish()

    assert (node.state(a), node.state(b), node.state(pair)) == (S.ACTIVE, S.ACTIVE, S.PARKED)


def test_while_gpus_are_cleared_for_a_pair_no_single_takes_one(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    other = node.seat(0, 1)
    node.pod(other, "a2")
    node.traffic(a)
    node.tick(35)  # b's visit is over, too
    node.traffic(pair, waiting=1)
    assert (node.state(a), node.state(b)) == (S.DRAINING, S.DRAINING)
    node.quiet(a)
    node.progress(node.job())
    assert node.state(a) is S.PARKED

    node.call(other)
    node.traffic(a, waiting=1)

    assert (node.state(other), node.state(a)) == (S.WAITING, S.PARKED)
    assert pair in node.board.why["G0"]
    node.traffic(b)
    node.finish()
    node.finish()
    assert node.state(pair) is S.ACTIVE


def test_clearing_turns_back_when_nobody_waits_for_the_pair_any_more(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    for seat in (a, b):
        node.traffic(seat)
    node.tick(5)
    node.traffic(pair, waiting=1)
    assert node.state(a) is S.DRAINING

    node.traffic(pair)

    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    assert node.board.claims == {}


def test_a_pinned_single_is_not_cleared_away_and_the_reason_names_it(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    for seat in (a, b):
        node.traffic(seat)
    node.command(PinSeat, b)
    node.tick(5)

    node.traffic(pair, waiting=1)

    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    assert b in node.board.why["G01"]
    assert "pinned" in node.board.why["G01"]


def test_a_busy_family_serves_everybody_in_turn(node: World) -> None:
    """Everyone always has requests waiting or in flight: within a few visits each has been active."""
    a, b, pair = with_a_parked_pair(node)
    served = set()
    for _ in range(400):
        for seat in (a, b, pair):
            active = node.state(seat) is S.ACTIVE
            node.traffic(seat, waiting=0 if active else 1, in_flight=int(active))
            served |= {seat} if active else set()
        node.tick(1.0)
        node.beat()
        for operation in list(node.board.operations.values()):
            if operation.phase == "draining" and operation.victim:
                node.traffic(operation.victim)
                node.quiet(operation.victim)
            if operation.phase == "job":
                node.progress(node.job_of(operation.op))
    turns = [e.seat for e in node.said if isinstance(e, SeatEvent) and e.state is S.ACTIVE]
    assert served == {a, b, pair}
    assert min(turns.count(seat) for seat in (a, b, pair)) >= 3


class AnyOrderOnSharedGpus(AnyOrder):
    """The same machine, its second group taking the first one's GPU as well."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(groups=(make_group("G0", [0], 3), make_group("G01", [0, 1], 3)))
        self.world.boot()


TestAnyOrderOnSharedGpus = AnyOrderOnSharedGpus.TestCase
TestAnyOrderOnSharedGpus.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
