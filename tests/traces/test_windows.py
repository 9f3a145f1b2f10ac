import json
import random
import statistics
from pathlib import Path

import pytest

from kybernate.lab.traces import TraceError, load
from kybernate.lab.traces.windows import OUTPUT_QUANTILES, Window, draw, length, of_prometheus, unit_gap

HEADER = "model,client,window_start_s,rate_rps,cv,pattern,shape,scale\n"


def test_gaps_have_mean_one_and_the_burstiness_of_their_shape() -> None:
    random_ = random.Random(5)
    for pattern, shape, cv in (
        ("Gamma", 0.25, 2.0),
        ("Gamma", 1.0, 1.0),
        ("Weibull", 1.0, 1.0),
        ("Weibull", 0.5, 5**0.5),
    ):
        gaps = [unit_gap(pattern, shape, random_) for _ in range(60_000)]
        assert statistics.mean(gaps) == pytest.approx(1.0, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(cv, rel=0.12)


def test_rates_of_a_prometheus_are_drawn_by_model(tmp_path: Path) -> None:
    values = {"a": [[1000, "2"], [1600, "0"], [2200, "1"]], "b": [[1600, "1.5"]]}
    rows = [{"metric": {"model": model}, "values": points} for model, points in values.items()]
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}))
    trace = load(path)
    assert trace.format == "prometheus"
    arrivals = list(trace)
    counts = [
        sum(one.model == model and start <= one.at_seconds < start + 600 for one in arrivals)
        for model, start in (("a", 0), ("a", 600), ("a", 1200), ("b", 600), ("b", 1200))
    ]
    assert counts == pytest.approx([1200, 0, 600, 900, 0], rel=0.15)
    assert list(load(path, 600, 600, seed=3)) == list(load(path, 600, 600, seed=3))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([{"metric": {}, "values": []}], "no matrix of rates by model"),
        ([{"metric": {"model": "a"}, "values": [[0, "1"], [60, "1"]]}], "60 s apart instead of 600"),
        ([{"metric": {"model": "a"}, "values": [[0, "1"], [3600, "1"]]}], "3600 s apart instead of 600"),
    ],
)
def test_another_answer_of_a_prometheus_is_refused(result: list[object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"status": "success", "data": {"result": result}}))
    with pytest.raises(TraceError, match=message):
        list(load(path))


def test_series_of_one_model_add_up_and_times_may_have_fractions() -> None:
    rows = [
        {"metric": {"model": "a", "node": node}, "values": [[1435781430.781, rate], [1435782030.781, rate]]}
        for node, rate in (("n1", "1"), ("n2", "0.5"), ("n3", "NaN"))
    ]
    windows = of_prometheus({"data": {"result": rows}})["a"]
    assert [(one.start_seconds, one.rate) for one in windows] == [(0, 1.5), (600, 1.5)]


def test_a_window_gets_its_rate_and_an_empty_one_nothing() -> None:
    windows = [Window(0, 2.0, "Gamma", 1.0), Window(600, 0.5, "Gamma", 1.0), Window(6000, 1.0, "Gamma", 1.0)]
    arrivals = list(draw(windows, "m", random.Random(1)))
    counts = [sum(start <= a.at_seconds < start + 600 for a in arrivals) for start in (0, 600, 6000)]
    assert counts == pytest.approx([1200, 300, 600], rel=0.15)
    assert sum(counts) == len(arrivals)
    assert [a.at_seconds for a in arrivals] == sorted(a.at_seconds for a in arrivals)


def test_lengths_follow_the_quantiles() -> None:
    random_ = random.Random(3)
    drawn = sorted(length(OUTPUT_QUANTILES, random_) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(OUTPUT_QUANTILES[10], rel=0.05)
    assert OUTPUT_QUANTILES[0] <= drawn[0] <= drawn[-1] <= OUTPUT_QUANTILES[-1]


def test_a_file_of_windows_gives_the_same_arrivals_for_the_same_seed(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    rows = "m-mid,7,0,0.5,1,Gamma,1,1\nm-mid,7,600,0.5,1,Weibull,0.8,1\nm-mid,8,1200,1,1,Gamma,1,1\n"
    path.write_text(HEADER + rows)
    assert load(path).format == "servegen-windows"
    assert list(load(path, seed=1)) == list(load(path, seed=1)) != list(load(path, seed=2))
    assert set(load(path, 0, 1200).weights()) == {"m-mid-c7"}
    assert set(load(path, 1200, 600).weights()) == {"m-mid-c8"}
    assert all(0 <= a.at_seconds < 600 for a in load(path, 1200, 600))


@pytest.mark.parametrize("row", ["m,1,0,x,1,Gamma,1,1", "m,1,0,1,1,Pareto,1,1", "m,1,0,-1,1,Gamma,1,1"])
def test_a_bad_window_is_reported_with_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "windows.csv"
    path.write_text(HEADER + row + "\n")
    with pytest.raises(TraceError, match=r"windows\.csv:2: "):
        list(load(path))
