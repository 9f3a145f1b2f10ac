import pytest
from rich.console import Console

from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.replay import Sample, Tally
from kybernate.dev.demo.report import build, control_seconds, passed, percentile, phases, show
from kybernate.dev.demo.watch import ObservedSwitch

STABLE = {
    "requests", "ok", "errors", "retryable", "held", "violations", "switches", "speed", "model_seconds", "wait_mean_s",
    "wait_p50_s", "wait_p95_s", "wait_p99_s", "overhead_p50_s", "overhead_p99_s",
}  # fmt: skip


def sample(verdict: Verdict = Verdict.OK, wait: float | None = 0.0, overhead: float | None = None) -> Sample:
    return Sample("m", verdict, "", wait, 1.5, overhead, 0.001)


def tally(*samples: Sample, sent: int | None = None, retryable: int = 0) -> Tally:
    return Tally(list(samples), len(samples) if sent is None else sent, retryable)


def switch(group: str = "G0", **seconds: float) -> ObservedSwitch:
    return ObservedSwitch(group, "s", "m", seconds)


def test_percentiles_lie_on_straight_lines_between_the_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(list(range(101)), 0.95) == 95


def test_the_stable_keys_are_there_with_and_without_requests() -> None:
    assert set(build(tally(), [], 0, 24.0, 0.0)) >= STABLE
    assert set(build(tally(sample(overhead=0.01)), [switch()], None, 24.0, 10.0)) >= STABLE


def test_counts_and_waits() -> None:
    samples = [sample(wait=wait) for wait in (0.0, 0.0, 2.0, 4.0)]
    report = build(
        tally(*samples, sample(Verdict.ERROR, None)), [switch("G1"), switch("G0"), switch("G1")], 0, 2.0, 60.0
    )
    assert (report["requests"], report["ok"], report["errors"], report["held"]) == (5, 4, 1, 2)
    assert (report["wait_mean_s"], report["wait_p50_s"]) == (1.5, 1.0)
    assert report["switches_by_group"] == {"G0": 1, "G1": 2}
    assert report["overhead_p50_s"] is None


def test_samples_are_in_the_order_of_arrival() -> None:
    late, early = (Sample("m", Verdict.OK, "", wait, None, None, 0.0, at_seconds=at) for at, wait in ((7, 2.0), (3, 0)))
    rows = build(tally(late, early), [], 0, 2.0, 60.0)["samples"]
    assert [(row["at_s"], row["model"], row["verdict"], row["wait_s"]) for row in rows] == [
        (3, "m", "ok", 0),
        (7, "m", "ok", 2.0),
    ]


def test_control_that_no_phase_of_a_switch_contains() -> None:
    samples = [sample(overhead=seconds) for seconds in (0.010, None, 0.014)]
    switches = [switch(control=0.006), switch(park=1.0), switch(control=0.008)]
    assert control_seconds(samples, switches) == pytest.approx(0.012 - 0.007)
    assert control_seconds(samples, []) == control_seconds([sample()], switches) == 0.0


def test_phases_are_in_model_seconds_and_unknown_ones_come_last() -> None:
    result = phases([switch(drain=0.1, park=0.2, odd=0.3), switch(drain=0.3)], speed=10.0)
    assert list(result) == ["drain", "park", "activate", "verify", "release", "odd"]
    assert result["drain"] == {"count": 2, "mean_s": 2.0, "p50_s": 2.0, "p95_s": pytest.approx(2.9)}
    assert result["verify"] == {"count": 0, "mean_s": None, "p50_s": None, "p95_s": None}


@pytest.mark.parametrize(
    ("given", "violations", "chaos", "why"),
    [
        (tally(sample()), 0, False, []),
        (tally(), 0, False, ["no request was sent"]),
        (tally(sample(), sample(Verdict.ERROR)), 0, False, ["1 errors"]),
        (tally(sample()), 2, False, ["2 violations"]),
        (tally(sample()), None, False, []),
        (tally(sample(), sample(Verdict.RETRYABLE), retryable=1), 0, False, ["1 retryable answers without chaos"]),
        (tally(sample(), retryable=3), 0, True, []),
        (tally(sample(), sample(Verdict.RETRYABLE), retryable=1), 0, True, ["1 requests without an answer"]),
        (tally(sample(), sent=2), 0, False, ["1 errors"]),
    ],
)
def test_a_demo_passes_only_when_all_is_well(given: Tally, violations: int | None, chaos: bool, why: list[str]) -> None:
    report = build(given, [], violations, 24.0, 1.0) | {"chaos": {"failures": []}}
    assert passed(report, chaos=chaos) == why


def test_what_chaos_missed_fails_the_demo() -> None:
    report = build(tally(sample()), [], 0, 24.0, 1.0) | {"chaos": {"failures": ["the stack was not in order"]}}
    assert passed(report, chaos=True) == ["the stack was not in order"]


def test_the_report_can_be_shown_whatever_is_in_it() -> None:
    chaos = {
        "seed": 7, "kills": {"router": 5}, "kills_during_switch": {"router": 4}, "nats_outages_s": [5.0],
        "recovered": False,
    }  # fmt: skip
    console = Console(record=True, width=120)
    given = tally(sample(wait=2.0, overhead=0.004))
    given.reasons["status 500: [bold]"] += 1
    show(build(given, [switch(drain=0.1)], None, 24.0, 1800.0) | {"chaos": chaos}, console)
    text = console.export_text()
    for part in ("1,800 model seconds at 24 ×".replace(",", ""), "not seen", "G0 1", "4.00", "[bold]", "seed 7", "NO"):
        assert part in text


@pytest.mark.parametrize(("costs", "said"), [([5.0, 4.0], True), ([4.0, 5.0], True), ([4.0, 4.5], False)])
def test_a_comparison_says_when_a_switch_did_not_cost_the_same_in_both_runs(costs: list[float], said: bool) -> None:
    """Part of the change is then the machine's."""
    first, second = (build(tally(sample(wait=wait)), [], 0, 24.0, 60.0) for wait in (4.0, 3.0))
    console = Console(record=True, width=200)
    show(second | {"without_pooled": first, "wait_fall": 0.25, "switch_costs_s": costs}, console)
    text = f"A switch took {costs[0]:.1f} s in the first run and {costs[1]:.1f} s in the second"
    assert (text in console.export_text()) == said
