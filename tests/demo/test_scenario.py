"""What a scenario promises, and when it has not kept it."""

from typing import Any

import pytest

from kybernate.dev.demo import scenario
from kybernate.dev.demo.report import build
from kybernate.dev.demo.session import Demo
from kybernate.dev.demo.watch import ObservedSwitch
from tests.demo.test_command import run
from tests.demo.test_report import sample, tally


def played(wait: float, *, moves: int, **changes: Any) -> dict[str, Any]:
    switches = [ObservedSwitch("G1", "s", "m", {}, moved=True)] * moves
    return build(tally(sample(wait=wait)), switches, 0, 24.0, 10.0) | changes


def test_both_runs_get_the_same_arrivals_and_only_one_group_is_asked() -> None:
    first, again = scenario.arrivals(Demo(seed=3)), scenario.arrivals(Demo(seed=3))
    assert first == again != scenario.arrivals(Demo(seed=4))
    assert {arrival.model for arrival in first} == set(scenario.HOT)
    assert len(scenario.arrivals(Demo(duration=60))) < len(first) == scenario.REQUESTS


@pytest.mark.parametrize(
    ("without", "rebalanced", "why"),
    [
        (played(10.0, moves=0), played(5.0, moves=3), []),
        (played(10.0, moves=0), played(8.0, moves=3), ["the mean wait fell by 20% and not by 25%"]),
        (played(10.0, moves=0), played(5.0, moves=0), ["no seat moved"]),
        (played(10.0, moves=2), played(5.0, moves=3), ["seats moved although rebalancing was off"]),
        (played(10.0, moves=0, violations=1), played(5.0, moves=3), ["without rebalancing: 1 violations"]),
        (played(0.0, moves=0), played(0.0, moves=3), ["the mean wait fell by 0% and not by 25%"]),
    ],
)
def test_it_passes_when_the_wait_fell_and_nothing_went_wrong_in_either_run(
    without: dict[str, Any], rebalanced: dict[str, Any], why: list[str]
) -> None:
    result = scenario.compared(without, rebalanced)
    assert scenario.failures(result) == why
    assert (result["moves"], result["without_rebalance"]) == (rebalanced["moves"], without)


def test_without_rebalancing_nothing_may_move() -> None:
    assert scenario.failures(played(1.0, moves=0) | {"rebalance": False}) == []
    assert scenario.failures(played(1.0, moves=1) | {"rebalance": False}) == ["1 moves although rebalancing is off"]


def test_packing_is_compared_with_one_slot() -> None:
    first, packed = played(10.0, moves=0), played(4.0, moves=0)
    result = scenario.compared(first, packed, scenario.DemoScenario.PACKED)
    assert (result["scenario"], result["packing"], result["without_packing"]) == ("packed", True, first)
    assert scenario.failures(result) == []
    crowded = scenario.compared(first, played(9.0, moves=0), scenario.DemoScenario.PACKED)
    assert scenario.failures(crowded) == ["the mean wait fell by 10% and not by 25%"]
    broken = scenario.compared(played(10.0, moves=0, violations=1), packed, scenario.DemoScenario.PACKED)
    assert scenario.failures(broken) == ["with one slot: 1 violations"]
    assert {one.model for one in scenario.arrivals(Demo(), scenario.DemoScenario.PACKED)} == set(scenario.SIZES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-rebalance",), "--no-rebalance is for --scenario hot-group"),
        (("--scenario", "packed", "--no-rebalance"), "--no-rebalance is for --scenario hot-group"),
        (("--scenario", "hot-group", "--chaos"), "brings its own stack and workload"),
    ],
)
def test_what_does_not_go_together_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
