"""How ``kyb plan`` answers: a table for people, and a page with plots."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kybernate.cli.output import CliError
from kybernate.sizes import count

if TYPE_CHECKING:
    from kybernate.lab.forecast import Forecast
    from kybernate.lab.plan import Goal, PlannedLayout
    from kybernate.lab.simulate.measures import Needed
    from kybernate.lab.simulate.model import Scenario


@dataclass(frozen=True)
class PlanReport:
    """What a plan found."""

    scenario: "Scenario"
    need: "Needed"
    goal: "Goal"
    limit: str
    """The SLO, as text."""
    found: "tuple[PlannedLayout, ...]"
    played: "tuple[PlannedLayout, ...]"
    """All that were tried."""
    check: "PlannedLayout | None"
    """The answer on unseen hours."""
    forecast: "Forecast | None"
    headroom: float | None
    """So many times the traffic of the trace the answer serves within the goal."""
    busiest_day: float | None = None
    """Requests of the busiest whole day of the part that was planned with; None: it has none."""
    left_out: int = 0
    """Requests that are not forecast, since the plan has no seat for their model."""

    @property
    def room(self) -> float | None:
        """The answer serves so many requests a day within the goal."""
        return None if self.headroom is None or self.busiest_day is None else self.headroom * self.busiest_day

    def forecast_row(self) -> dict[str, Any] | None:
        """As plain data."""
        if self.forecast is None:
            return None
        row = asdict(self.forecast)
        del row["paths"]
        days = None if self.room is None else self.forecast.full_in(self.room)
        return row | {
            "busiest_day": self.busiest_day, "headroom": self.headroom, "full_in_days": days, "left_out": self.left_out,
        }  # fmt: skip


def show(report: PlanReport) -> None:
    """Print it."""
    from rich.table import Table

    from kybernate.cli.show import open_console

    console = open_console()
    for line in introduction(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns(report):
        table.add_column(column, justify="left" if column in _OF_ALL[:2] else "right", no_wrap=True)
    for one in report.found:
        table.add_row(*cells(report, one))
    console.print(table)
    for line in conclusions(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def introduction(report: PlanReport) -> list[str]:
    """Lines above the table."""
    need, goal, scenario = report.need, report.goal, report.scenario
    each = f", {goal.model_share:.0%} of each model's" if goal.model_share else ""
    lost = f", with {count(goal.spare, 'group')} failed" if goal.spare else ""
    return [
        f"E[active] = {need.expected_active:.2f} of {count(need.seats, 'seat')}; if nothing had to be switched, "
        f"{count(need.slots_95, 'slot')} would do for 95 % of the time, {need.slots_99} for 99 %, {need.most} always",
        f"{scenario.name}: {count(len(scenario.at), 'request')} in {scenario.duration / 3600:.3g} h; wanted: "
        f"{goal.share:.1%}{each} within {report.limit}{lost}",
    ]


def _share(one: "PlannedLayout") -> str:
    return ("" if one.whole else "at most ") + f"{100 * one.slo_attainment:.1f}"


_OF_ALL = ("layout", "policy", "groups", "slots", "GPUs", "in SLO %")
"""Columns of layouts that were not played to their end."""
_COLUMNS: "tuple[tuple[str, Callable[[PlannedLayout], str]], ...]" = (
    ("layout", lambda one: one.name),
    ("policy", lambda one: one.policy),
    ("groups", lambda one: str(one.groups)),
    ("slots", lambda one: "by memory" if one.name == "packed" else str(one.slots)),
    ("GPUs", lambda one: str(one.gpus)),
    ("in SLO %", lambda one: _share(one) + ("" if one.enough else " (too few)")),
    ("promised %", lambda one: "" if one.promised is None else f"{100 * one.promised:.1f}"),
    ("95 %", lambda one: f"{100 * one.slo_low:.1f}-{100 * one.slo_high:.1f}"),
    ("worst model %", lambda one: f"{100 * one.worst_attainment:.1f}"),
    ("mean s", lambda one: f"{one.wait_mean_s:.2f}"),
    ("p99 s", lambda one: f"{one.wait_p99_s:.1f}"),
    ("at once %", lambda one: f"{100 * one.at_once:.1f}"),
    ("in flight x", lambda one: f"{one.stretch:.2f}"),
    ("switches/h", lambda one: f"{one.switches_per_hour:.0f}"),
    ("moves/h", lambda one: f"{one.moves_per_hour:.0f}"),
    ("host GB", lambda one: f"{one.host_gb:.0f}"),
    ("worst tier %", lambda one: f"{100 * one.worst_tier_attainment:.1f}"),
    ("cost", lambda one: f"{one.cost:.2f}"),
    ("a month", lambda one: f"{one.cost_of_month:.0f}"),
)


def columns(report: PlanReport) -> list[str]:
    """Of the table: tiers and money only where there are some."""
    tiers = len({seat.tier for seat in report.scenario.seats}) > 1
    paid = bool(report.goal.price or report.goal.memory_price)
    asked = {"worst tier %": tiers, "cost": paid, "a month": paid}
    return [name for name, _ in _COLUMNS if asked.get(name, True)]


def cells(report: PlanReport, one: "PlannedLayout") -> list[str]:
    """A row."""
    shown = columns(report)
    return [text(one) if one.whole or name in _OF_ALL else "" for name, text in _COLUMNS if name in shown]


def conclusions(report: PlanReport) -> list[str]:
    """Lines below the table."""
    from kybernate.lab.plan import saved, smallest
    from kybernate.policy import POLICIES

    found, check = list(report.found), report.check
    lines = []
    best = smallest(found)
    if found and found[-1].name == "dedicated" and best is not None:
        others = [name for name in report.goal.policies if name != best.policy]
        text = f"recommended: {best.name} under {best.policy}, {count(best.gpus, 'GPU')}"
        text += f", {saved(found):.0%} fewer than one group per model" if saved(found) else ""
        text += f"; no fewer with {', '.join(others)}" if others else ""
        lines.append(text)
        if best.policy not in POLICIES:
            lines.append(
                f"{best.policy} is a rule of the simulator; a node runs it from a package of yours (docs/dev/policy.md)"
            )
    if best is not None:
        lines.append(_promised(best))
    if check is not None and best is not None:
        worst = f"{check.worst_model} {100 * check.worst_attainment:.1f} %"
        worst += f" of {count(check.models[check.worst_model].requests, 'request')}"
        lines.append(
            f"on the unseen hours: {100 * check.slo_attainment:.1f} % in SLO, worst model {worst}, mean "
            f"{check.wait_mean_s:.2f} s, p99 {check.wait_p99_s:.1f} s; {_kept(best, check)}"
        )
    return lines + _outlook(report)


def _promised(best: "PlannedLayout") -> str:
    """What the answer promises for other days."""
    if best.promised is None:
        return "promised: nothing; other hours are not like these. Give a trace of a whole day at least"
    promises, few = best.promises, len(best.models) - len(best.promises)
    lowest = min(promises, key=lambda name: (promises[name], name), default="")
    each = f", at least {100 * promises[lowest]:.1f} % of each model's ({lowest})" if lowest else ""
    less = f"; too few requests for a promise: {count(few, 'model')} of {len(best.models)}" if few else ""
    return (
        f"promised for another day of at most {count(best.busiest or 0, 'request')}: {100 * best.promised:.1f} % in SLO"
        f"{each}{less}"
    )


def _kept(best: "PlannedLayout", check: "PlannedLayout") -> str:
    if best.promised is None:
        return "nothing was promised"
    if (check.busiest or 0) > (best.busiest or 0):
        return f"no promise covers them: a day has {check.busiest} requests"
    broken = [
        f"{name} {100 * attained:.1f} % instead of {100 * promised:.1f} %"
        for name, (promised, attained) in best.broken(check).items()
    ]
    if check.slo_attainment < best.promised:
        broken.insert(0, f"all requests {100 * check.slo_attainment:.1f} % instead of {100 * best.promised:.1f} %")
    return f"not as promised: {', '.join(broken)}" if broken else "as promised"


def _outlook(report: PlanReport) -> list[str]:
    """The forecast, how good it was, and until when the answer is enough."""
    expected = report.forecast
    if expected is None:
        return []
    errors = ", ".join(f"{one.method} {one.mape:.0%} ({one.wape:.0%})" for one in expected.backtest)
    lines = [
        f"forecast of {count(len(expected.days), 'day')} ({expected.method}): {_traffic(expected)}",
        f"backtest, {count(expected.origins, 'forecast')} of {count(expected.backtest_days, 'day')}, MAPE (weighted by "
        f"requests): {errors}",
        _of_days(expected),
    ]
    if report.left_out:
        lines.append(f"not forecast: {count(report.left_out, 'request')} for models without a seat in this plan")
    return lines + _saturation(report, expected)


def _traffic(expected: "Forecast") -> str:
    if expected.growth is None:
        return f"{sum(middle for _, middle, _ in expected.days) / len(expected.days):.0f} requests a day"
    low, middle, high = expected.growth
    return f"{middle:.2f} times the traffic of the last week ({low:.2f} to {high:.2f})"


def _of_days(expected: "Forecast") -> str:
    from kybernate.lab.forecast import UNSEEN

    errors = ", ".join(f"{one.method} {one.days_wape:.0%}" for one in expected.backtest)
    held = [one.coverage for one in expected.backtest if one.method == expected.method and one.coverage is not None]
    here = f"{held[0]:.0%} of them, " if held else ""
    return f"of whole days: {errors}; the band that asks for 80 % held {here}{UNSEEN} of unseen days of other fleets"


def _saturation(report: PlanReport, expected: "Forecast") -> list[str]:
    """Until when the answer is enough."""
    from kybernate.lab.plan import MOST_HEADROOM

    if report.busiest_day is None:
        return ["no date when the plan is too small: it was made with less than a whole day; give --duration 86400"]
    if report.headroom is None or report.room is None:
        return []
    early, median, late = map(_when, expected.full_in(report.room))
    times = f"at least {MOST_HEADROOM}" if report.headroom >= MOST_HEADROOM else f"{report.headroom:.2f}"
    return [
        f"the smallest layout of seats is enough for {times} times this trace, {report.room:.0f} requests instead of "
        f"{report.busiest_day:.0f} on its busiest day; traffic first exceeds that {median} (80 % of futures: {early} "
        f"to {late})"
    ]


def _when(day: int | None) -> str:
    from kybernate.lab.forecast import LOOK_AHEAD_DAYS

    return f"not within {LOOK_AHEAD_DAYS} days" if day is None else f"in {count(day, 'day')}"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}"
    "td,th{white-space:nowrap;padding:.2rem .5rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"
)


def write_page(report: PlanReport, path: Path) -> None:
    """A page with nothing outside it. Raises CliError without matplotlib, or when it cannot be written."""

    def row(texts: Sequence[str], cell: str) -> str:
        return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"

    def lines(texts: Sequence[str]) -> str:
        return "".join(f"<p>{escape(text)}</p>" for text in texts)

    rows = "".join(row(cells(report, one), "td") for one in report.found)
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kyb plan</title><style>{_STYLE}</style>'
        f"<h1>How many GPUs</h1>{lines(introduction(report))}<table>{row(columns(report), 'th')}{rows}</table>"
        f"{lines(conclusions(report))}{_plots(report)}</html>\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path}: cannot be written ({error.strerror})") from None


def plot_library() -> Any:
    """Matplotlib. Raises CliError without it."""
    from kybernate.lab.simulate.plots import PlotError, matplotlib_pyplot

    try:
        return matplotlib_pyplot()
    except PlotError as error:
        raise CliError(f"--page: {error}") from None


def _plots(report: PlanReport) -> str:
    """Attainment over GPUs of all layouts that were played, and the forecast, as one SVG."""
    library = plot_library()
    wide = 1 if report.forecast is None else 2
    figure = library.figure(figsize=(6 * wide, 4), layout="constrained")
    axes = figure.subplots(1, wide, squeeze=False)[0]
    _draw_layouts(axes[0], report)
    if report.forecast is not None:
        _draw_forecast(axes[1], report, report.forecast)
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    library.close(figure)
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def curves(played: "Sequence[PlannedLayout]") -> dict[str, list[tuple[int, float]]]:
    """(GPUs, % of requests in SLO) of each layout by its name, and its slots where they differ."""
    from kybernate.lab.plan import SEATS

    slots: dict[str, set[int]] = {}
    for one in played:
        slots.setdefault(one.name, set()).add(one.slots)
    policies = {one.policy for one in played if one.name in SEATS}
    found: dict[str, list[tuple[int, float]]] = {}
    for one in played:
        label = f"{one.name}, {count(one.slots, 'slot')}" if len(slots[one.name]) > 1 else one.name
        label += f" ({one.policy})" if one.name in SEATS and len(policies) > 1 else ""
        found.setdefault(label, []).append((one.gpus, 100 * one.slo_attainment))
    return {label: sorted(points) for label, points in found.items()}


def _draw_layouts(axis: Any, report: PlanReport) -> None:
    for label, own in curves(report.played).items():
        axis.plot(*zip(*own, strict=True), marker="o", label=label)
    axis.axhline(100 * report.goal.share, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("GPUs (dotted: what is wanted)")
    axis.set_ylabel("% of requests in SLO")
    axis.legend(fontsize=8)


def _draw_forecast(axis: Any, report: PlanReport, expected: "Forecast") -> None:
    days = range(1, len(expected.days) + 1)
    low, middle, high = zip(*expected.days, strict=True)
    axis.fill_between(days, low, high, alpha=0.2, label="80 % of futures")
    axis.plot(days, middle, marker="o", label=f"forecast ({expected.method})")
    if report.room is not None:
        axis.axhline(report.room, color="C3", label="enough until here")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("days from the end of the trace")
    axis.set_ylabel("requests a day")
    axis.legend(fontsize=8)
