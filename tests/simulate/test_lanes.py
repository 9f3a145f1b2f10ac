"""The simulator's link: more transfers than it has lanes share it, or begin in turn."""

import pytest

from kybernate.lab.simulate.engine import run
from kybernate.lab.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.lab.simulate.world import RunOptions
from kybernate.policy import POLICIES


def three(lanes: int, *at: float, fixed: float = 0.0) -> Scenario:
    """Three free groups with a parked seat each that takes 10 s to activate; one request each."""
    seats = tuple(SimSeat(f"s{n}", f"G{n}", 10.0, 10.0, fixed) for n in range(3))
    groups = tuple(SimGroup(f"G{n}") for n in range(3))
    return Scenario("three", seats, groups, at, (0, 1, 2), (1.0,) * 3, 10.0, lanes=lanes)


@pytest.mark.parametrize(
    ("lanes", "side_by_side", "waits"),
    [
        (0, True, (10.0, 10.0, 10.0)),
        (3, True, (10.0, 10.0, 10.0)),
        (1, True, (30.0, 30.0, 30.0)),  # a third of the link each
        (2, True, (15.0, 15.0, 15.0)),
        (1, False, (10.0, 20.0, 30.0)),
        (2, False, (10.0, 10.0, 20.0)),
    ],
)
def test_transfers_at_the_same_time(lanes: int, side_by_side: bool, waits: tuple[float, ...]) -> None:
    outcome = run(three(lanes, 0.0, 0.0, 0.0), POLICIES["kyb-balanced"](), RunOptions(side_by_side=side_by_side))
    assert outcome.wait == pytest.approx(waits)
    assert outcome.switching_seconds == pytest.approx(sum(waits) if side_by_side else 30.0)


def test_a_transfer_gets_slower_when_another_begins_and_faster_when_it_ends() -> None:
    """Alone from 0 to 4 s, then half: the first has 6 s left and ends at 16 s; then the second has 4 s left, and shares
    them with the third from 18 s on."""
    outcome = run(three(1, 0.0, 4.0, 18.0), POLICIES["kyb-balanced"](), RunOptions(side_by_side=True))
    assert outcome.wait == pytest.approx((16.0, 22.0 - 4.0, 30.0 - 18.0))


@pytest.mark.parametrize(
    ("side_by_side", "waits"),
    [
        (True, (26.0, 26.0, 26.0)),  # three copies of 8 s on one lane, and 2 s that share nothing
        (False, (10.0, 20.0, 30.0)),  # a switch keeps its lane until it ends
    ],
)
def test_only_the_copy_of_a_transfer_shares_the_lanes(side_by_side: bool, waits: tuple[float, ...]) -> None:
    options = RunOptions(side_by_side=side_by_side)
    outcome = run(three(1, 0.0, 0.0, 0.0, fixed=2.0), POLICIES["kyb-balanced"](), options)
    assert outcome.wait == pytest.approx(waits)
    assert outcome.switching_seconds == pytest.approx(sum(waits) if side_by_side else 30.0)


def test_the_longest_wait_goes_next() -> None:
    outcome = run(three(1, 0.0, 1.0, 2.0), POLICIES["kyb-balanced"](), RunOptions())
    assert outcome.wait == pytest.approx((10.0, 19.0, 28.0))
