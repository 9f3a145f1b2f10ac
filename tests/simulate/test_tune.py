"""``kyb tune`` and the choice behind it."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kybernate.cli import main
from kybernate.cli.tune import profile
from kybernate.config import load
from kybernate.simulate.costs import HARDWARE
from kybernate.simulate.scenarios import hour_of
from kybernate.simulate.statistics import Figures, Interval, Sample
from kybernate.simulate.tune import (
    MODES,
    Candidate,
    Tuned,
    candidates,
    days,
    figures,
    gained,
    picked,
    score,
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
    parts = days(scenario, 200.0, 2)
    assert [part.duration for part in parts] == [200.0, 200.0]
    assert sum(len(part.at) for part in parts) == sum(at >= 300.0 for at in scenario.at)
    assert parts[1].at[-1] == pytest.approx(scenario.at[-1] - 500.0)
    nearly = days(replace(scenario, duration=max(scenario.at)), 350.0, 5)
    assert (len(nearly), sum(len(part.at) for part in nearly)) == (2, len(scenario.at))
    assert days(replace(scenario, at=(), seat=(), service=()), 200.0, 2) == []


def test_each_day_judges_the_best_of_the_days_before_it():
    scenario = hour_of("poisson", 0.12, 0, HARDWARE["fast"], duration=900.0)
    parts = days(scenario, 300.0, 3)
    found = tune(parts, ("kyb-balanced",))
    best = sum(score(found.chosen, part) for part in parts) / 3
    assert found.ranking[0] == (found.chosen, pytest.approx(best))
    assert found.default_score >= best
    grid = candidates(("kyb-balanced",))
    assert found.picked[0] == min(grid, key=lambda one: score(one, parts[0]))
    assert found.picked[1] == min(grid, key=lambda one: score(one, parts[0]) + score(one, parts[1]))
    assert found.gain == pytest.approx(found.before.objective - found.after.objective)
    assert found.gain_ci[0] <= found.gain_ci[1]
    assert tune(parts, ("kyb-balanced",), jobs=2) == found
    with pytest.raises(ValueError, match="longer trace"):
        tune(parts[:1])


def test_a_day_has_no_part_in_what_is_picked_for_it():
    assert picked([[5.0, 5.0, 0.0], [4.0, 9.0, 0.0], [6.0, 3.0, 9.0]]) == [1, 2]
    assert picked([[5.0, 5.0], [5.0, 0.0]]) == [0], "the first of equals, which is the default"


def drawn(chance: Random, gain: float, candidates: int = 8, days: int = 5) -> tuple[float, Interval, bool]:
    """Days of 8 pieces for made-up candidates: a shared mean for each piece, noise of each candidate's own, and a last
    one that is better by ``gain``. Gives what tuning makes of them, and whether it would recommend.
    """
    played: list[list[list[Sample]]] = [[[] for _ in range(days)] for _ in range(candidates)]
    for day in range(days):
        for _ in range(8):
            load = chance.lognormvariate(2.5, 0.6)
            for one in range(candidates):
                mean = load * chance.lognormvariate(-0.02, 0.2) * (1.0 - gain * (one == candidates - 1))
                waits = tuple(chance.expovariate(1 / mean) for _ in range(20))
                played[one][day].append(Sample(waits, sum(wait <= 20 for wait in waits), 9, 0.5))
    scores = [[figures([day]).objective for day in own] for own in played]
    after = [played[pick][day] for day, pick in enumerate(picked(scores), 1)]
    found, sides = gained(played[0][1:], after, repeats=200)
    chosen = min(range(candidates), key=lambda one: sum(scores[one]))
    return found, sides, verdict(DEFAULT, OTHER if chosen else DEFAULT, found, sides)[0]


def test_noise_is_not_recommended_and_a_real_gain_is():
    chance = Random("tune")
    noise = [drawn(chance, 0.0)[2] for _ in range(25)]
    assert sum(noise) <= 2, "of 25; the best of eight is better than the default by chance nearly every time"
    real = [drawn(chance, 0.4)[2] for _ in range(6)]
    assert sum(real) >= 4


DEFAULT, OTHER = Candidate("kyb-balanced"), Candidate("kyb-slo", (("close_ratio", 0.8), ("min_visit_seconds", 10.0)))


@pytest.mark.parametrize(
    ("chosen", "gain", "sides", "recommended", "text"),
    [
        (DEFAULT, 0.0, (0.0, 0.0), False, "keep it"),
        (OTHER, -1.0, (-2.0, 0.5), False, "an accident"),
        (OTHER, 1.0, (-0.2, 2.0), False, "within noise"),
        (OTHER, 1.0, (0.4, 2.0), True, "no accident"),
    ],
)
def test_only_a_gain_beyond_noise_is_recommended(
    chosen: Candidate, gain: float, sides: tuple[float, float], recommended: bool, text: str
):
    answer, why = verdict(DEFAULT, chosen, gain, sides)
    assert answer is recommended
    assert text in why


def test_every_candidate_makes_a_section_that_the_configuration_accepts(tmp_path: Path):
    file = tmp_path / "config.yaml"
    for chosen in candidates():
        told = Figures(10.0, 50.0, 80.0, 0.9, 100.0)
        found = Tuned(DEFAULT, chosen, (), 20.0, (chosen,), told, told, 1.0, (0.5, 1.5), True, "why")
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
    report, out = tmp_path / "tune.json", tmp_path / "profile.yaml"
    assert kyb(trace, "--day-hours", 0.08, "--policy", "kyb-balanced", "--json", report, "--out", out) == 0
    said = capsys.readouterr().out
    result = json.loads(report.read_text())
    assert len(result["days"]) == len(result["picked"]) + 1 == 3
    assert ("not recommended" not in said) == result["recommended"] == out.exists()


def test_a_mistake_is_told(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace) == 2
    assert "--day-hours" in capsys.readouterr().err
    assert kyb(trace, "--policy", "quantum") == 2
    assert "nothing to tune" in capsys.readouterr().err
