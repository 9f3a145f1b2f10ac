"""``kyb tune`` and the choice behind it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.cli import main
from kybernate.cli.tune import profile
from kybernate.config import load
from kybernate.simulate.costs import HARDWARE
from kybernate.simulate.scenarios import hour_of
from kybernate.simulate.statistics import Figures
from kybernate.simulate.tune import MODES, Candidate, Tuned, candidates, days, score, tune, verdict

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


def test_the_best_of_the_days_before_is_compared_on_the_last_one():
    scenario = hour_of("poisson", 0.12, 0, HARDWARE["fast"], duration=900.0)
    parts = days(scenario, 300.0, 3)
    found = tune(parts, ("kyb-balanced",))
    best = sum(score(found.chosen, part) for part in parts[:-1]) / 2
    assert found.ranking[0] == (found.chosen, pytest.approx(best))
    assert found.tuned_default >= best
    assert found.gain == pytest.approx(found.before.objective - found.after.objective)
    assert found.gain_ci[0] <= found.gain_ci[1]
    assert tune(parts, ("kyb-balanced",), jobs=2) == found
    with pytest.raises(ValueError, match="longer trace"):
        tune(parts[:1])


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
        figures = Figures(10.0, 50.0, 80.0, 0.9, 100.0)
        found = Tuned(DEFAULT, chosen, (), 20.0, figures, figures, 1.0, (0.5, 1.5), True, "why", 5)
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
    assert result["days"] == 2
    assert ("not recommended" not in said) == result["recommended"] == out.exists()


def test_a_mistake_is_told(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert kyb(trace) == 2
    assert "--day-hours" in capsys.readouterr().err
    assert kyb(trace, "--policy", "quantum") == 2
    assert "nothing to tune" in capsys.readouterr().err
