"""``kyb tune`` and the choice behind it."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kybernate.cli import main
from kybernate.config import load
from kybernate.lab.cli.tune import profile
from kybernate.lab.simulate.measures import Figures, WindowSample
from kybernate.lab.simulate.node import HARDWARE
from kybernate.lab.simulate.scenarios import hour_of
from kybernate.lab.tune import (
    MODES,
    Candidate,
    Gain,
    Tuned,
    candidates,
    last_days,
    over_days,
    play,
    ranked,
    tune,
    verdict,
)

CONFIG = "profiles:\n  - {name: one, resource: kyb.ai/one, groupSize: 1, seatsPerGroup: 2}\n"


def test_the_grid_is_small_without_doubles_and_begins_with_the_default():
    grid = candidates()
    assert len(grid) == 43
    assert grid[0] == Candidate("kyb-balanced")
    assert len({one.build() for one in grid}) == 43
    assert {one.policy for one in grid} == set(MODES)


def test_days_are_the_last_ones_and_leave_nothing_at_the_end_out():
    scenario = hour_of("poisson", 0.2, 0, HARDWARE["fast"], duration=700.0)
    cut, count = last_days(scenario, 200.0, 2)
    assert (cut.duration, count) == (400.0, 2)
    assert len(cut.at) == sum(at >= 300.0 for at in scenario.at)
    assert cut.at[-1] == pytest.approx(scenario.at[-1] - 300.0)
    nearly, count = last_days(replace(scenario, duration=max(scenario.at)), 350.0, 5)
    assert (count, len(nearly.at)) == (2, len(scenario.at))
    assert last_days(scenario, 800.0, 2)[1] == 0


def test_the_grid_is_compared_with_the_default_on_all_days():
    scenario = hour_of("poisson", 0.12, 0, HARDWARE["fast"], duration=900.0)
    found = tune(scenario, 3, ("kyb-balanced",))
    assert len(found.ranking) == len(candidates(("kyb-balanced",))) - 1
    first = found.ranking[0]
    assert found.before.objective - first.objective == pytest.approx(first.gain)
    assert all(one.surely < one.gain for one in found.ranking)
    default, best = (play(one, scenario, 3, 0) for one in (found.default, first.candidate))
    assert len(default.by_day) == 3
    assert sum(after < before for before, after in zip(default.by_day, best.by_day, strict=True)) == first.days
    assert tune(scenario, 3, ("kyb-balanced",), jobs=2) == found
    with pytest.raises(ValueError, match="longer trace"):
        tune(scenario, 1)
    lonely = replace(scenario, at=scenario.at[:1], seat=scenario.seat[:1], service=scenario.service[:1])
    with pytest.raises(ValueError, match="two days with requests"):
        tune(lonely, 3)


def drawn(chance: Random, gain: float, candidates: int = 8, days: int = 5) -> bool:
    """Whether tuning would recommend anything. Days of 8 pieces for made-up candidates: a shared mean for each piece,
    noise of each candidate's own, and a last one that is better by ``gain``.
    """
    made: list[list[list[WindowSample]]] = [[[] for _ in range(days)] for _ in range(candidates)]
    for day in range(days):
        for _ in range(8):
            load = chance.lognormvariate(2.5, 0.6)
            for one in range(candidates):
                mean = load * chance.lognormvariate(-0.02, 0.2) * (1.0 - gain * (one == candidates - 1))
                waits = tuple(chance.expovariate(1 / mean) for _ in range(20))
                made[one][day].append(WindowSample(waits, sum(wait <= 20 for wait in waits), 9, 0.5))
    played = [over_days(own, 0, repeats=200) for own in made]
    grid = [Candidate(f"made-up {one}") for one in range(candidates)]
    return verdict(ranked(grid, played), played[0].figures.objective, days)[0]


def test_noise_is_not_recommended_and_a_real_gain_is():
    chance = Random("tune")
    assert sum(drawn(chance, 0.0) for _ in range(20)) <= 2, "the best of eight is better by luck nearly every time"
    assert sum(drawn(chance, 0.35) for _ in range(6)) >= 5


DEFAULT, OTHER = Candidate("kyb-balanced"), Candidate("kyb-slo", (("close_ratio", 0.8), ("min_visit_seconds", 10.0)))


@pytest.mark.parametrize(
    ("gain", "surely", "better", "recommended", "text"),
    [
        (-0.1, -1.0, 2, False, "keep it"),
        (2.0, -0.2, 3, False, "within the luck of the best of 2"),
        (0.2, 0.1, 4, False, "less than 1%"),
        (2.0, 0.4, 2, False, "comes from 2 of 4 days"),
        (2.0, 0.4, 3, True, "no accident"),
    ],
)
def test_only_a_gain_beyond_luck_is_recommended(gain: float, surely: float, better: int, recommended: bool, text: str):
    answer, why = verdict([Gain(OTHER, 50.0 - gain, gain, surely, better)], 50.0, 4)
    assert answer is recommended
    assert text in why
    assert verdict([], 50.0, 4)[0] is False


def test_every_candidate_makes_a_section_that_the_configuration_accepts(tmp_path: Path):
    file = tmp_path / "config.yaml"
    for chosen in candidates():
        figures = Figures(10.0, 50.0, 80.0, 0.3, 0.9, 100.0)
        found = Tuned(DEFAULT, chosen, (), figures, figures, True, "why", 5)
        file.write_text(CONFIG + profile(found, "trace"))
        assert load(file).policy.build() == chosen.build()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rows = [f"{at},{'aaaab'[at % 5]},800,{40 + at % 90}" for at in range(0, 900, 7)]
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def kyb(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["tune", *map(str, words)])
    return int(end.value.code or 0)


def test_as_people_call_it(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "profile.yaml"
    words = (trace, "--day-hours", 0.08, "--policy", "kyb-balanced")
    assert kyb(*words) == 0
    printed = capsys.readouterr().out
    assert kyb(*words, "--out", out, "-o", "json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["days"] == 3
    assert ("not recommended" not in printed) == result["recommended"] == out.exists()


def test_a_mistake_exits_with_2_and_a_remedy(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace) == 2
    assert "--day-hours" in capsys.readouterr().err
    assert kyb(trace, "--policy", "quantum") == 2
    assert "nothing to tune" in capsys.readouterr().err
