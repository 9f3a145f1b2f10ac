"""What a replay is worth in numbers, with keys that stay the same. Pure but for ``show``."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.replay import Sample, Tally
from kybernate.dev.demo.watch import ObservedSwitch

PHASES = ("drain", "park", "activate", "verify", "release")
NEAR = 0.1
"""Of the simulated gain: a live one that differs by no more agrees with it."""
WRONG = ("errors", "retryable", "violations")
MOST_APART = 0.15
"""By which the switch costs of two runs may differ unsaid."""
_FALLS = ("wait_fall", "simulated_wait_fall", "simulated_wait_fall_range")
Report = dict[str, Any]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` (0 to 1) of the values lie, straight lines between them; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(prefix: str, values: Iterable[float | None], *, mean: bool = True) -> dict[str, float | None]:
    """``<prefix>_mean_s``, ``_p50_s``, ``_p95_s``, ``_p99_s`` of what is not None."""
    known = [value for value in values if value is not None]
    numbers = {f"{prefix}_p{percent}_s": _rounded(percentile(known, percent / 100)) for percent in (50, 95, 99)}
    average = {f"{prefix}_mean_s": _rounded(sum(known) / len(known) if known else None)}
    return (average if mean else {}) | numbers


def build(
    tally: Tally, switches: Sequence[ObservedSwitch], violations: int | None, speed: float, seconds: float
) -> Report:
    """The report of a replay that took ``seconds`` of model time. ``violations`` None: the driver did not answer."""
    good = [sample for sample in tally.samples if sample.verdict is Verdict.OK]
    return {
        "requests": tally.sent,
        "ok": len(good),
        "errors": tally.count(Verdict.ERROR) + tally.sent - len(tally.samples),
        "retryable": tally.retryable,
        "repeats": tally.repeats,
        "held": sum((sample.wait_seconds or 0.0) > 0 for sample in good),
        "violations": violations,
        "switches": len(switches),
        "moves": sum(switch.moved for switch in switches),
        "moves_by_way": dict(sorted(Counter(switch.way for switch in switches if switch.moved).items())),
        "speed": speed,
        "model_seconds": _rounded(seconds),
        **summary("wait", (sample.wait_seconds for sample in good)),
        **summary("first_byte", (sample.first_byte_seconds for sample in good)),
        **summary("overhead", (sample.overhead_seconds for sample in good)),
        **summary("release", (sample.release_seconds for sample in good)),
        **summary("client_late", (sample.late_seconds for sample in tally.samples), mean=False),
        "phases": phases(switches, speed),
        "switches_by_group": dict(sorted(Counter(switch.group for switch in switches).items())),
        "models": _by_model(tally.samples),
        "reasons": dict(tally.reasons.most_common(20)),
        "samples": [_row(sample) for sample in sorted(tally.samples, key=lambda sample: sample.at_seconds)],
    }


def control_seconds(samples: Iterable[Sample], switches: Iterable[ObservedSwitch]) -> float:
    """Wall seconds of control overhead that no phase of a switch contains: its mean without that of ``control``."""
    overhead = [one.overhead_seconds for one in samples if one.overhead_seconds is not None]
    journal = [one.seconds["control"] for one in switches if "control" in one.seconds]
    return max(0.0, fmean(overhead) - fmean(journal)) if overhead and journal else 0.0


def phases(switches: Sequence[ObservedSwitch], speed: float) -> dict[str, dict[str, float | None]]:
    """Switch time by phase in model seconds: in the order of a switch, then whatever else was reported."""
    others = sorted({name for switch in switches for name in switch.seconds} - set(PHASES))
    result: dict[str, dict[str, float | None]] = {}
    for name in (*PHASES, *others):
        values = [switch.seconds[name] * speed for switch in switches if name in switch.seconds]
        mean = sum(values) / len(values) if values else None
        result[name] = {
            "count": len(values),
            "mean_s": _rounded(mean),
            "p50_s": _rounded(percentile(values, 0.5)),
            "p95_s": _rounded(percentile(values, 0.95)),
        }
    return result


def passed(report: Report, *, chaos: bool) -> list[str]:
    """Why the demo did not pass; empty when it did."""
    why = []
    if report["requests"] == 0:
        why.append("no request was sent")
    if report["errors"]:
        why.append(f"{report['errors']} errors")
    if report["violations"]:
        why.append(f"{report['violations']} violations")
    if report["retryable"] and not chaos:
        why.append(f"{report['retryable']} retryable answers without chaos")
    unanswered = report["requests"] - report["ok"] - report["errors"] - (0 if chaos else report["retryable"])
    if unanswered > 0:
        why.append(f"{unanswered} requests without an answer")
    if report.get("spills") == 0:
        why.append("no seat went without a copy: the budget was large enough for all")
    if chaos:
        why += report["chaos"]["failures"]
    return why


def show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    if "runs" in report:
        _show_runs(report, console)
        return
    speed = report["speed"]
    console.print(f"\nkyb demo: {report['model_seconds']:.0f} model seconds at {speed:g} ×", style="bold")
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for key in ("requests", "ok", "errors", "retryable", "held", "violations", "switches", "moves"):
        table.add_row(key, _text(report[key], "not seen" if key == "violations" else "–"))
    if report.get("cold_starts"):
        table.add_row("cold starts", _text(report["cold_starts"]))
    if "spills" in report:
        table.add_row("without a copy", _text(report["spills"]))
    by_group = ", ".join(f"{group} {count}" for group, count in report["switches_by_group"].items())
    table.add_row("switches by group", by_group or "–")
    console.print(table)
    console.print("\ntimes in model seconds; overhead, release and client lateness in wall milliseconds", style="bold")
    console.print(_times(report))
    for reason, count in list(report["reasons"].items())[:5]:
        console.print(f"  {count} × {reason}", markup=False, highlight=False)
    if "chaos" in report:
        _show_chaos(report["chaos"], console)
    if "wait_fall" in report:
        _show_comparison(report, console)


def _show_comparison(report: Report, console: Console) -> None:
    """Both runs of a comparison, and what the simulator expected of them."""
    pooled = "without_pooled" in report
    first = report["without_pooled" if pooled else "without_packing"]
    names = ("bound to groups", "one pool") if pooled else ("one slot", "packed by memory")
    table = Table("", *names, "change")
    for key, name in (("wait_mean_s", "mean wait s"), ("wait_p99_s", "p99 s")):
        before, after = first[key], report[key]
        change = f"{after / before - 1:+.1%}" if before and after is not None else "–"
        table.add_row(name, _text(before), _text(after), change)
    if "simulated_wait_fall" in report:
        before, after = report["simulated_wait_mean_without_s"], report["simulated_wait_mean_s"]
        table.add_row("simulated mean wait s", _text(before), _text(after), _change(report["simulated_wait_fall"]))
        ranges = (report[f"simulated_wait_range{which}_s"] for which in ("_without", ""))
        single = [f"{_text(low)} … {_text(high)}" for low, high in ranges]
        table.add_row("of single simulations", *single, _changes(report["simulated_wait_fall_range"]))
    for key in ("switches", "moves", "errors", "retryable", "violations"):
        table.add_row(key, _text(first[key]), _text(report[key]), "")
    console.print(table)
    console.print(agreement(report), highlight=False)
    if text := unequal(report):
        console.print(text, highlight=False)


def _show_runs(report: Report, console: Console) -> None:
    """A row for each comparison, and one for all together."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns are enough for it
    for name in ("", "requests", "without s", "with s", "change", "simulated", "single ones"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in (*report["runs"], report):
        row = [one.get("run", "all"), _text(one["requests"])]
        row += [_text(one["wait_mean_without_s"]), _text(one["wait_mean_s"]), _change(one["wait_fall"])]
        if "simulated_wait_fall" in one:
            row += [_change(one["simulated_wait_fall"]), _changes(one["simulated_wait_fall_range"])]
        table.add_row(*row)
    console.print(table)
    console.print(
        "On all stacks together: " + ", ".join(f"{report[key]} {key}" for key in WRONG) + ".", highlight=False
    )
    console.print(agreement(report), highlight=False)


def agreement(report: Report) -> str:
    """Whether the live gain is the simulated one, in a sentence; empty where nothing was simulated or gained."""
    fall, expected, single = (report.get(key) for key in _FALLS)
    if fall is None or not single or not expected or expected < 0:
        return ""
    near = "within" if abs(fall / expected - 1.0) <= NEAR else "not within"
    inside = "inside" if single[0] <= fall <= single[1] else "outside"
    return (
        f"The live gain is {fall / expected:.2f} times the simulated one: {near} {NEAR:.0%} of it, "
        f"and {inside} the range of single simulations."
    )


def unequal(report: Report) -> str:
    """That switches of the two runs took different times, in a sentence; empty where they did not."""
    costs = report.get("switch_costs_s")
    if not costs or max(costs) <= (1 + MOST_APART) * min(costs):
        return ""
    return (
        f"A switch took {costs[0]:.1f} s in the first run and {costs[1]:.1f} s in the second: part of the live "
        "change is the machine's. Both were simulated with the costs of all."
    )


def _change(fall: float | None) -> str:
    return "–" if fall is None else f"{-fall:+.1%}"


def _changes(falls: Sequence[float] | None) -> str:
    return f"{_change(falls[1])} … {_change(falls[0])}" if falls else "–"


def _times(report: Report) -> Table:
    table = Table()
    for name in ("", "mean", "p50", "p95", "p99"):
        table.add_column(name, justify="right" if name else "left")
    rows = (("wait", "wait", 1.0), ("first byte", "first_byte", 1.0), ("control overhead", "overhead", 1000.0))
    more = (("release of all who waited", "release", 1000.0), ("client lateness", "client_late", 1000.0))
    for label, key, factor in (*rows, *more):
        cells = [report.get(f"{key}_{part}_s") for part in ("mean", "p50", "p95", "p99")]
        table.add_row(label, *(_text(None if cell is None else cell * factor) for cell in cells))
    for name, phase in report["phases"].items():
        if phase["count"]:
            numbers = [phase["mean_s"], phase["p50_s"], phase["p95_s"]]
            table.add_row(f"switch: {name}", *(_text(number) for number in numbers), "")
    return table


def _show_chaos(chaos: dict[str, Any], console: Console) -> None:
    console.print(f"\nchaos, seed {chaos['seed']}", style="bold")
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for service, count in chaos["kills"].items():
        table.add_row(f"{service} killed", f"{count} ({chaos['kills_during_switch'][service]} during a switch)")
    table.add_row("nats-server away", f"{len(chaos['nats_outages_s'])} ×")
    table.add_row("in order again", "yes" if chaos["recovered"] else "NO")
    console.print(table)


def _by_model(samples: Sequence[Sample]) -> dict[str, dict[str, float | int | None]]:
    result: dict[str, dict[str, float | int | None]] = {}
    for model in sorted({sample.model for sample in samples}):
        own = [sample for sample in samples if sample.model == model]
        waits = [s.wait_seconds for s in own if s.verdict is Verdict.OK and s.wait_seconds is not None]
        mean = sum(waits) / len(waits) if waits else None
        late = _rounded(percentile(waits, 0.95))
        result[model] = {"requests": len(own), "wait_mean_s": _rounded(mean), "wait_p95_s": late}
    return result


def _row(sample: Sample) -> dict[str, float | int | str | None]:
    return {
        "at_s": _rounded(sample.at_seconds),
        "model": sample.model,
        "verdict": sample.verdict.value,
        "reason": sample.reason,
        "repeats": sample.repeats,
        "wait_s": _rounded(sample.wait_seconds),
        "first_byte_s": _rounded(sample.first_byte_seconds),
    }


def _text(value: float | int | None, nothing: str = "–") -> str:
    if value is None:
        return nothing
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
