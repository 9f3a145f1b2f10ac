"""``kyb plan`` and the search behind it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.lab.plan import Goal, PlannedLayout, dedicated, fewest, plan, regrouped, saved
from kybernate.lab.simulate.engine import RunOptions
from tests.simulate.cases import scenario, seat

LAYOUT = PlannedLayout("seats", 1, 1, 1, False, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("least", range(1, 14))
@pytest.mark.parametrize("most", [1, 2, 5, 12])
def test_the_search_finds_the_fewest_and_tries_few(least: int, most: int):
    tried: list[int] = []

    def layout(groups: int) -> PlannedLayout:
        tried.append(groups)
        return replace(LAYOUT, groups=groups, enough=groups >= least)

    found = fewest(layout, most)
    assert found.groups == min(least, most)
    assert found.enough == (least <= most)
    assert len(tried) == len(set(tried)) <= 7


def busy(seats: int = 4):
    """Every seat is asked every 10 s, for 4 s; a switch takes 6 s."""
    requests = [(10.0 * turn + index, index, 4.0) for turn in range(12) for index in range(seats)]
    return scenario(requests, [seat(f"s{index}", park=3.0, activate=3.0, slo_seconds=8.0) for index in range(seats)])


def test_what_is_planned_is_enough_one_less_is_not_and_dedicated_needs_one_group_per_model():
    goal = Goal(share=0.9, price=2.0, gpus_per_group=2, move_seconds=1.0)
    seats, alone = plan(busy(), goal)
    assert (seats.name, seats.enough) == ("seats", True)
    assert 1 < seats.groups <= 4
    fewer = plan(busy(), replace(goal, groups_max=seats.groups - 1))[0]
    assert (fewer.enough, fewer.groups) == (False, seats.groups - 1)
    assert (alone.groups, alone.gpus, alone.slo_attainment) == (4, 8, 1.0)
    assert alone.cost == pytest.approx(8 * 100 / 3600 * 2.0)
    assert saved([seats, alone]) == pytest.approx(1 - seats.groups / 4)
    assert dedicated(busy(), goal, RunOptions()).switches_per_hour * 119 / 3600 == pytest.approx(4, rel=0.2)


def test_heavy_seats_are_spread_first():
    requests = [(float(turn), 0, 9.0) for turn in range(5)] + [
        (float(turn), index, 1.0) for turn in range(5) for index in (1, 2)
    ]
    spread = regrouped(scenario(requests, [seat("heavy"), seat("light"), seat("also")]), 2, 1, 3.0)
    assert [one.group for one in spread.seats] == ["G0", "G1", "G1"]
    assert regrouped(spread, 1, 2, 3.0).move_seconds is None


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rows = [f"{at},{'abcd'[at // 5 % 4]},800,150" for at in range(0, 600, 5)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def kyb(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["plan", *map(str, words)])
    return int(end.value.code or 0)


def test_as_people_call_it(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "plan.json"
    assert (
        kyb(trace, "--slo", "15:0.9", "--cost", "2s/2s", "--slots", "1,2", "--memory", 80, "--price", 3, "--json", out)
        == 0
    )
    captured = capsys.readouterr().out
    assert captured.startswith("E[active] = ")
    report = json.loads(out.read_text())
    assert [one["name"] for one in report["layouts"]] == ["seats", "seats", "packed", "dedicated"]
    assert all(one["enough"] for one in report["layouts"])
    assert report["goal"]["slo_seconds"] == 15


def test_too_few_groups_is_exit_code_1(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace, "--slo", "0.5:0.99", "--groups-max", 1) == 1
    captured = capsys.readouterr()
    assert "1 groups are not enough" in captured.err
    assert "too few" in captured.out


@pytest.mark.parametrize("words", [("--slo", "fast"), ("--slo", "20:95"), ("--slots", "0"), ("--policy", "a,b")])
def test_a_mistake_exits_with_2_and_a_remedy(words: tuple[str, str], trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace, *words) == 2
    assert words[1].split(",")[0] in capsys.readouterr().err
