"""The reference table: ready scenarios x policies x one-hour windows, with confidence intervals and the best possible.

The prototype study that came before this code (docs/dev/policy.md) has such a table of four windows each, from another
simulator; its figures stand beside ours. Its policies map to ours by rule; those called KYB there had other constants
and another rule for closing. Every policy gets the same windows, so that differences are paired.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kybernate.lab.baselines import POLICIES
from kybernate.lab.simulate.engine import RunOptions, run
from kybernate.lab.simulate.measures import (
    METRICS,
    Figures,
    Interval,
    Pool,
    WindowSample,
    draws,
    interval,
    intervals,
    planned,
    sampled,
)
from kybernate.lab.simulate.scenarios import GENTD26_EVENINGS, reference
from kybernate.lab.traces import load

CLAIRVOYANT = ("clairvoyant-reactive", "clairvoyant", "clairvoyant-reactive-slo", "clairvoyant-slo")
"""Schedulers that know the future: for the mean wait restoring on demand, for it freely; the same for the SLO."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """Waits in seconds, attainment of 20 s in percent."""

    mean: float
    p99: float
    most: float
    attainment: float


def _column(*cells: tuple[float, float, float, float]) -> dict[str, PublishedRow]:
    names = (
        "fifo-switch", "exhaustive", "idle-timeout", "quantum", "longest-queue", "cmu-setup", "kyb-balanced",
        "kyb-bounded", "kyb-slo", *CLAIRVOYANT[:2],
    )  # fmt: skip
    return {name: PublishedRow(*cell) for name, cell in zip(names, cells, strict=True)}


PUBLISHED: dict[str, dict[str, PublishedRow]] = {
    "S1": _column(
        (15.9, 51, 74, 68.2), (12.2, 47, 77, 77.8), (29.3, 102, 141, 44.6), (20.4, 71, 89, 56.2), (12.7, 72, 154, 80.0),
        (12.5, 74, 136, 81.0), (11.4, 52, 81, 81.3), (11.6, 63, 81, 81.9), (11.9, 79, 97, 85.3), (8.8, 52, 104, 86.1),
        (8.1, 53, 118, 87.3),
    ),
    "S2": _column(
        (14.1, 59, 72, 69.6), (10.3, 82, 152, 81.7), (24.6, 185, 416, 65.5), (15.6, 83, 112, 68.5),
        (10.3, 71, 193, 79.7), (10.0, 98, 250, 83.7), (9.5, 81, 161, 83.3), (9.9, 75, 103, 81.7), (10.8, 93, 112, 83.5),
        (7.5, 56, 157, 86.3), (7.4, 57, 159, 86.2),
    ),
    "S3": _column(
        (13.4, 50, 61, 75.6), (11.9, 49, 61, 79.3), (32.7, 120, 150, 44.9), (21.1, 86, 125, 57.7),
        (12.6, 82, 191, 85.1), (12.1, 67, 173, 85.1), (11.0, 54, 100, 83.0), (10.6, 65, 79, 85.5),
        (11.3, 83, 103, 89.2), (8.4, 58, 261, 90.8), (6.7, 57, 181, 91.3),
    ),
    "S4": _column(
        (31.1, 108, 142, 41.8), (24.3, 110, 148, 57.4), (101.9, 856, 969, 44.9), (39.6, 154, 193, 42.4),
        (22.4, 217, 717, 66.9), (22.0, 262, 873, 72.9), (20.4, 133, 281, 65.9), (21.3, 102, 144, 64.9),
        (23.8, 111, 182, 65.5), (16.7, 167, 617, 75.4), (16.7, 163, 689, 75.2),
    ),
}  # fmt: skip
"""By scenario and policy."""


LABELS = {"S1": "poisson", "S2": "bursty", "S3": "gentd26", "S4": "servegen"}
RULES = ("exhaustive-ttl", "exhaustive")
"""What policies are compared with: llama-swap's rule, with ``ttl`` and without."""
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """What is played."""

    windows: int = 24
    clairvoyant: int = 0
    """Windows of each scenario, spread evenly, for which the best possible is looked for, too."""
    bound_seconds: float = 60.0
    """Time for each of those and each objective."""
    servegen: Path | None = None
    """The trace of S4; None: it is generated."""
    gentd26: Path | None = None
    """The trace of S3; None: S3 is left out."""
    policies: tuple[str, ...] = tuple(POLICIES)
    labels: tuple[str, ...] = tuple(LABELS)
    jobs: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WindowJob:
    """One window of one scenario under all policies."""

    label: str
    window: int
    trace: Path | None
    policies: tuple[str, ...]
    bound_seconds: float
    """0: the best possible is not looked for."""


Samples = dict[str, WindowSample]


@dataclass(frozen=True, slots=True)
class PlayedScenario:
    """All windows of one scenario."""

    label: str
    source: str
    samples: dict[str, list[WindowSample]]
    """By policy; clairvoyants have fewer windows."""
    bounded: tuple[int, ...]
    """These."""


def play(plan: ReferencePlan, progress: Callable[[str], None] | None = None) -> list[PlayedScenario]:
    """Play everything; ``progress`` gets one line per window. Raises TraceError, SimulationError, ValueError, and
    ModuleNotFoundError for clairvoyants without the extra ``lab``.
    """
    jobs = [job for label in plan.labels for job in _jobs(plan, label)]
    found: dict[str, list[tuple[str, Samples]]] = {}
    for number, (job, result) in enumerate(zip(jobs, _results(jobs, plan.jobs), strict=True), start=1):
        found.setdefault(job.label, []).append(result)
        if progress is not None:
            progress(f"{number} of {len(jobs)} windows")
    played = []
    for label, results in found.items():
        samples: dict[str, list[WindowSample]] = {}
        for _, own in results:
            for policy, sample in own.items():
                samples.setdefault(policy, []).append(sample)
        bounded = tuple(place for place, (_, own) in enumerate(results) if CLAIRVOYANT[0] in own)
        played.append(PlayedScenario(label, results[0][0], samples, bounded))
    return played


def _jobs(plan: ReferencePlan, label: str) -> list[WindowJob]:
    trace = {"S3": plan.gentd26, "S4": plan.servegen}.get(label)
    if label == "S3" and trace is None:
        return []
    count = min(plan.windows, len(GENTD26_EVENINGS)) if label == "S3" else plan.windows
    if label == "S4" and trace is not None:
        hours = 1 + int(max((arrival.at_seconds for arrival in load(trace)), default=0.0) // _HOUR)
        count = min(count, hours)
    few = min(plan.clairvoyant, count)
    bounded = {number * count // few for number in range(few)}  # not the first ones: a trace may begin at night
    return [
        WindowJob(label, window, trace, plan.policies, plan.bound_seconds if window in bounded else 0.0)
        for window in range(count)
    ]


def _results(jobs: Sequence[WindowJob], workers: int) -> "Iterable[tuple[str, Samples]]":
    if workers <= 1:
        yield from map(one_window, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(one_window, jobs)


def one_window(job: WindowJob) -> tuple[str, Samples]:
    """Play one window under every policy; also its source as text."""
    scenario = reference(LABELS[job.label], job.window, trace=job.trace)
    found = {name: sampled(run(scenario, POLICIES[name](), RunOptions(name=name)), scenario) for name in job.policies}
    if job.bound_seconds:
        from kybernate.lab.bounds.certificate import certificate

        best = certificate(scenario, seconds_budget=job.bound_seconds)
        late = certificate(scenario, seconds_budget=job.bound_seconds, objective="slo")
        schedules = (best.reactive_schedule, best.schedule, late.reactive_schedule, late.schedule)
        for name, schedule in zip(CLAIRVOYANT, schedules, strict=True):
            found[name] = planned(schedule.wait, schedule.visits, scenario)
    return scenario.source, found


def table(played: Sequence[PlayedScenario], seed: int = 0) -> dict[str, Any]:
    """The report as data: ``rows``, ``published`` beside ours, ``paired`` against llama-swap's rule, and
    ``clairvoyant`` comparisons over the windows for which there is one. Times in model seconds, shares 0 to 1.
    """
    report: dict[str, Any] = {"rows": [], "published": [], "paired": [], "clairvoyant": [], "scenarios": []}
    for one in played:
        pools = {policy: Pool(samples) for policy, samples in one.samples.items()}
        windows = {policy: len(samples) for policy, samples in one.samples.items()}
        name = f"{one.label} {LABELS[one.label]}"
        most = max(windows.values())
        requests = sum(len(sample.waits) for sample in next(iter(one.samples.values())))
        report["scenarios"].append({"scenario": name, "source": one.source, "windows": most, "requests": requests})
        drawn = {count: draws(count, seed) for count in set(windows.values())}
        spread = {policy: pool.resampled(drawn[windows[policy]]) for policy, pool in pools.items()}
        for policy, pool in pools.items():
            figures, sides = pool.figures(), intervals(spread[policy])
            report["rows"].append(_row(name, policy, figures, sides))
            published = PUBLISHED[one.label].get(policy)
            if published is not None and windows[policy] == most:
                four = interval([one.wait_mean_s for one in pool.resampled(draws(most, seed, size=4))])
                report["published"].append(_beside(name, policy, published, figures, sides, four))
            for rule in RULES:
                if policy != rule and rule in pools and windows[policy] == most:
                    beside = _paired(spread[policy], spread[rule], figures, pools[rule].figures())
                    report["paired"].append({"scenario": name, "policy": policy, "against": rule, **beside})
        report["clairvoyant"] += _against(name, one.samples, one.bounded)
    return report


def _row(scenario: str, policy: str, figures: Figures, sides: dict[str, Interval]) -> dict[str, Any]:
    row: dict[str, Any] = {"scenario": scenario, "policy": policy}
    row |= {metric: getattr(figures, metric) for metric in METRICS}
    return row | {f"{metric}_ci": list(sides[metric]) for metric in METRICS}


def _beside(
    scenario: str, policy: str, published: PublishedRow, ours: Figures, sides: dict[str, Interval], four: Interval
) -> dict[str, Any]:
    low, high = sides["wait_mean_s"]
    return {
        "scenario": scenario,
        "policy": policy,
        "published_wait_mean_s": published.mean,
        "wait_mean_s": ours.wait_mean_s,
        "wait_mean_s_ci": [low, high],
        "in_interval": _within(published.mean, low, high),
        "wait_mean_s_of_four": list(four),
        "in_interval_of_four": _within(published.mean, *four),
        "published_slo_attainment": published.attainment / 100,
        "slo_attainment": ours.slo_attainment,
    }


def _within(value: float, low: float, high: float) -> bool:
    """Published figures are rounded to a tenth."""
    return low - 0.05 <= value <= high + 0.05


def _paired(own: Sequence[Figures], rule: Sequence[Figures], figures: Figures, base: Figures) -> dict[str, Any]:
    """Changes against a rule; intervals from the same draws for both."""
    row: dict[str, Any] = {}
    for metric in ("wait_mean_s", "wait_p99_s"):
        changes = [getattr(a, metric) / max(getattr(b, metric), 1e-9) - 1 for a, b in zip(own, rule, strict=True)]
        row[f"{metric}_change"] = getattr(figures, metric) / max(getattr(base, metric), 1e-9) - 1
        row[f"{metric}_change_ci"] = list(interval(changes))
    for metric in ("slo_attainment", "immediate"):
        gained = [getattr(a, metric) - getattr(b, metric) for a, b in zip(own, rule, strict=True)]
        row[f"{metric}_change"] = getattr(figures, metric) - getattr(base, metric)
        row[f"{metric}_change_ci"] = list(interval(gained))
    return row


def _against(scenario: str, samples: dict[str, list[WindowSample]], bounded: Sequence[int]) -> list[dict[str, Any]]:
    """Every policy against the clairvoyants that restore on demand, over the windows that these have."""
    if not bounded:
        return []
    mean, slo = (Pool(samples[name]).figures() for name in (CLAIRVOYANT[0], CLAIRVOYANT[2]))
    rows = []
    for policy, own in samples.items():
        if policy in CLAIRVOYANT:
            continue
        figures = Pool([own[window] for window in bounded]).figures()
        rows.append(
            {
                "scenario": scenario,
                "policy": policy,
                "windows": len(bounded),
                "wait_mean_s": figures.wait_mean_s,
                "wait_mean_above": figures.wait_mean_s / max(mean.wait_mean_s, 1e-9) - 1,
                "slo_attainment": figures.slo_attainment,
                "slo_attainment_share": figures.slo_attainment / max(slo.slo_attainment, 1e-9),
            }
        )
    return rows
