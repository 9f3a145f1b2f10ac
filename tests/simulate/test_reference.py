"""The reference table, on tiny plans."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.lab.simulate.measures import METRICS
from kybernate.lab.studies.reference import CLAIRVOYANT, PUBLISHED, ReferencePlan, play, table
from kybernate.lab.studies.reference_table import main

KEYS = {"scenario", "policy", *METRICS, *(f"{metric}_ci" for metric in METRICS)}


def test_rows_have_the_promised_keys_and_intervals_hold_the_figures():
    plan = ReferencePlan(windows=3, labels=("S1", "S4"), policies=("exhaustive", "fifo-switch"))
    report = table(play(plan))
    assert [(row["scenario"], row["policy"]) for row in report["rows"]] == [
        ("S1 poisson", "exhaustive"), ("S1 poisson", "fifo-switch"),
        ("S4 servegen", "exhaustive"), ("S4 servegen", "fifo-switch"),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row.keys() == KEYS
        assert all(row[f"{name}_ci"][0] <= row[name] <= row[f"{name}_ci"][1] for name in ("wait_mean_s", "wait_max_s"))
    assert [one["source"] for one in report["scenarios"]] == [
        "generated: poisson, 0.12 requests/s", "generated like ten intermittent ServeGen clients",
    ]  # fmt: skip
    fifo = next(row for row in report["paired"] if row["scenario"] == "S1 poisson")
    assert fifo["wait_mean_s_change_ci"][0] > 0, "closing for every other request costs much in every window"
    assert report["published"][0]["published_wait_mean_s"] == PUBLISHED["S1"]["exhaustive"].mean == 12.2


def test_more_processes_give_the_same():
    plan = ReferencePlan(windows=2, labels=("S1",), policies=("exhaustive",))
    assert play(replace(plan, jobs=2)) == play(plan)


def test_the_clairvoyant_is_never_beaten_on_what_it_minimises():
    pytest.importorskip("numba")
    plan = ReferencePlan(
        windows=3, clairvoyant=1, bound_seconds=1.0, labels=("S1",), policies=("exhaustive", "kyb-balanced")
    )
    report = table(play(plan))
    rows = {row["policy"]: row for row in report["rows"]}
    assert set(CLAIRVOYANT) <= rows.keys()
    assert all(row["wait_mean_above"] >= 0 and row["windows"] == 1 for row in report["clairvoyant"])


def test_as_people_call_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    s4 = tmp_path / "s4.csv"
    rows = [f"{at},{'ab'[at // 40 % 2]},800,200" for at in range(0, 7200, 40)]
    s4.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows]) + "\n")
    out = tmp_path / "reference.json"
    main(["--windows", "2", "--trace", str(s4), "--json", str(out)])
    report = json.loads(out.read_text())
    assert {row["scenario"] for row in report["rows"]} == {"S1 poisson", "S2 bursty", "S4 servegen"}
    assert all(row.keys() == KEYS for row in report["rows"])
    printed = capsys.readouterr().out
    assert "hour 0 of s4.csv" in printed
    assert "S3 gentd26: left out" in printed


def test_two_traces_for_one_scenario_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = []
    for name in ("a.csv", "b.csv"):
        paths.append(tmp_path / name)
        paths[-1].write_text("arrival_s,model,prompt_tokens,output_tokens\n0,a,10,10\n")
    with pytest.raises(SystemExit) as end:
        main(["--trace", str(paths[0]), "--trace", str(paths[1])])
    assert end.value.code == 2
    assert "for the same scenario" in capsys.readouterr().err
