"""Pictures of simulations: who held the GPUs when, and how long requests waited. Needs ``kybernate[lab]``."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kybernate.lab import INSTALL
from kybernate.lab.simulate.model import Outcome, Scenario

ENDINGS = (".png", ".svg", ".pdf")
_LONGEST = 3600.0
"""Seconds of a timeline: more is one grey bar. Of a longer scenario the part with most arrivals is drawn."""
_TIMELINES = 4
"""Policies with a timeline; all of them have a curve."""


class PlotError(Exception):
    """No picture; the text says why and what to do."""


def plot(scenario: Scenario, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the outcomes of one scenario: a timeline of the groups for each of the first policies, and below the share
    of requests over how long they waited. The ending of ``path`` says how. Raises PlotError.
    """
    if path.suffix.lower() not in ENDINGS:
        raise PlotError(f"{path.name}: a picture ends in {', '.join(ENDINGS)}")
    library = matplotlib_pyplot()
    begin, end = busiest(scenario)
    shown = list(outcomes[:_TIMELINES])
    rows = len(shown)
    heights = [0.5 + 0.35 * len(scenario.groups)] * rows + [3.0]
    figure = library.figure(figsize=(11, sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(rows + 1, 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    colours = library.get_cmap("tab20")
    for axis, outcome in zip(axes, shown, strict=False):
        _timeline(axis, scenario, outcome, (begin, end), colours)
    axes[rows - 1].set_xlabel("model seconds")
    _waits(axes[rows], scenario, outcomes)
    _legend(figure, scenario, colours)
    figure.suptitle(f"{scenario.name}: {len(scenario.at)} requests, {len(scenario.seats)} seats", fontsize=11)
    try:
        # Without a date, so that the same run gives the same file.
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise PlotError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        library.close(figure)


def busiest(scenario: Scenario) -> tuple[float, float]:
    """The part that is drawn: all, or of a long scenario the hour with most arrivals (in steps of its tenth)."""
    if scenario.duration <= _LONGEST or not scenario.at:
        return 0.0, max(scenario.duration, 1.0)
    step = _LONGEST / 10
    counts = [0] * (int(max(scenario.duration, scenario.at[-1]) / step) + 11)
    for at in scenario.at:
        counts[int(at / step)] += 1
    best = max(range(len(counts) - 10), key=lambda first: (sum(counts[first : first + 10]), -first))
    return best * step, best * step + _LONGEST


def matplotlib_pyplot() -> Any:
    """For files: it needs no screen. Raises PlotError."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError(f"pictures need matplotlib: {INSTALL}") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kybernate"
    import matplotlib.pyplot as pyplot

    library: ModuleType = pyplot
    return library


def _timeline(axis: Any, scenario: Scenario, outcome: Outcome, window: tuple[float, float], colours: Any) -> None:
    """One bar per visit in its seat's colour; grey while a seat is activated or parked, pale while it drains."""
    begin, end = window
    lines = {group.name: place for place, group in enumerate(scenario.groups)}
    last = max(outcome.ended, end)
    for visit in outcome.visits:
        closed, gone = min(visit.closed, last), min(visit.gone, last)
        drained = max(closed, gone - scenario.seats[visit.seat].park_seconds)
        colour = colours(visit.seat % 20)
        parts = (
            (visit.begun, visit.active, {"facecolor": "0.8"}),
            (visit.active, closed, {"facecolor": colour}),
            (closed, drained, {"facecolor": colour, "alpha": 0.4}),
            (drained, gone, {"facecolor": "0.8"}),
        )
        slots = scenario.groups[lines[visit.group]].slots
        # Seats of one group side by side: each has its own height, so that bars of two slots do not hide each other.
        height = 0.8 / slots
        bottom = lines[visit.group] - 0.4 + (visit.seat % slots) * height
        for start, stop, look in parts:
            if stop > start and stop > begin and start < end:
                axis.broken_barh([(start, stop - start)], (bottom, height), linewidth=0, **look)
    axis.set_xlim(begin, end)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_yticks(list(lines.values()), list(lines))
    axis.set_title(outcome.policy, loc="left", fontsize=9)


def _waits(axis: Any, scenario: Scenario, outcomes: Sequence[Outcome]) -> None:
    """Share of requests that waited at most so long; logarithmic from 0.1 s, so that tails are seen."""
    for outcome in outcomes:
        delay = sorted(outcome.wait)
        shares = [100.0 * (place + 1) / len(delay) for place in range(len(delay))]
        axis.step([max(0.1, value) for value in delay], shares, where="post", label=outcome.policy, linewidth=1.2)
    for slo in sorted({seat.slo_seconds for seat in scenario.seats}):
        axis.axvline(slo, color="0.6", linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_xlabel("wait, model seconds (0.1: at once; dotted: SLO)")
    axis.set_ylabel("% of requests")
    axis.set_ylim(0, 100)
    axis.grid(visible=True, linewidth=0.3)
    if outcomes:
        axis.legend(fontsize=8, loc="lower right")


def _legend(figure: Any, scenario: Scenario, colours: Any) -> None:
    """The colours of the seats, for as many as are distinguishable."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colours(index), label=seat.name) for index, seat in enumerate(scenario.seats[:20])]
    patches.append(Patch(facecolor="0.8", label="switching"))
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)), fontsize=7)
