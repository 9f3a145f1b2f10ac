"""Comparisons: the same arrivals on two stacks, so that one invocation shows what a feature changes.

``--compare-bound``: a workload with seats bound to their groups, then with the groups as one pool, beside what the
simulator expects of it. ``hot-group`` does that with a shipped workload: everything is asked of the seats of group
G0 while those of G1 rest; ``hot-pair`` with pairs, G01 and G23, and ``hot-quad`` with two groups of four GPUs, where
the second group has one model, which rests; ``hot-mig`` so with a MIG instance of each of two GPUs.

``packed``: five models of 12 to 44 GiB on one GPU of 80 GiB, first with one slot, then packed by memory. The fake
driver counts a restore without room as a violation, and an engine that finds no memory crashes.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from kybernate.config import load
from kybernate.dev.demo import report, workload
from kybernate.dev.demo.client import Expect
from kybernate.dev.demo.session import (
    COLD_SPEED,
    DEFAULT_SPEED,
    HOLD_MODEL_SECONDS,
    Demo,
    DemoError,
    Live,
    arrivals,
    on_stack,
    stack_options,
    with_profiles,
)
from kybernate.dev.demo.simulated import Played, SwitchCosts, simulated
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.dev.stack import StackOptions
from kybernate.engines import DRIVER_BACKENDS
from kybernate.lab.traces import Arrival
from kybernate.policy import Policy

HOT = ("hot-a", "hot-b", "hot-c")
COLD = ("cold-a", "cold-b", "cold-c")
KYB_RUN = ("/kyb/kyb-run", "--")
"""In front of the engines of groups of several GPUs, and with --backend: what the driver does not move ends, and starts
on the other."""
HOT_SIZES = {"hot-group": 1, "hot-pair": 2, "hot-quad": 4, "hot-mig": 1}
"""GPUs of each group, by scenario."""
MIG_PRESET, MIG_VRAM = "2xA100-mig-3g", "30GiB"
SIZES = {"small-a": "12GiB", "small-b": "18GiB", "middle-a": "24GiB", "middle-b": "30GiB", "large": "44GiB"}
"""The models of ``packed`` with their VRAM."""
REQUESTS = 480
PACKED_REQUESTS = 240
"""Five models on one slot are overloaded with more."""
DURATION_SECONDS = 600.0
"""Model seconds; each of the two runs takes 25 s at the default speed."""
POLICY = "kyb-balanced"
LEAST_FALL = 0.25
"""Of the mean wait, for a scenario to pass."""

SEEDS = 20
"""Simulations of each run: which seat is where at a time follows from milliseconds, so that one says little."""

Read = Callable[[], Iterable[Arrival]]


class DemoScenario(StrEnum):
    """The shipped scenarios."""

    HOT_GROUP = "hot-group"
    HOT_PAIR = "hot-pair"
    HOT_QUAD = "hot-quad"
    HOT_MIG = "hot-mig"
    PACKED = "packed"

    @property
    def feature(self) -> str:
        """What its second run has and its first has not."""
        return "packing" if self is DemoScenario.PACKED else "pooled"


async def play(
    which: DemoScenario | None, demo: Demo, expect: Expect, live: Live, say: Callable[[str], None]
) -> report.Report:
    """Play a scenario, or with None the workload that was asked for, without and with the feature.

    Raises DemoError and what a stack raises.
    """
    if demo.router or demo.host_bytes or (demo.chaos and which is None) or (which and demo.traces):
        what = "--scenario brings its own stack and workload" if which else "--compare-bound starts its own two stacks"
        raise DemoError(f"{what}; leave out --router, {'--trace' if which else '--chaos'} and --host-memory")
    if which is DemoScenario.HOT_MIG:
        demo = dataclasses.replace(demo, backend=demo.backend or "restart")
        if not {*DRIVER_BACKENDS}.isdisjoint((demo.backend or "").split(",")):
            raise DemoError("--scenario hot-mig: the driver cannot checkpoint MIG instances; leave out --backend mixed")
    cold, pooled = demo.backend == "restart", which is not DemoScenario.PACKED
    speed = demo.speed or (COLD_SPEED if cold else DEFAULT_SPEED)
    feature = DemoScenario.HOT_GROUP.feature if which is None else which.feature
    read: Read | None = arrivals(demo) if demo.traces else None
    if which is not None:
        asked = own_arrivals(demo, which)
        read = lambda: asked  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="kyb-demo-") as name:
        folder = Path(name)
        if which is None:
            second = await asyncio.to_thread(stack_options, demo, folder, speed)
        else:
            second = await asyncio.to_thread(build_options, which, demo, folder, speed)
        if demo.chaos:  # nothing to compare: waits are those of what was broken
            return await _run(f"with-{feature}", demo, second, read, expect, live, say) | {"scenario": str(which)}
        first = with_profiles(second, folder, **({"rebalance": False} if pooled else {"packing": "slots"}))
        live.keep = pooled
        before = await _run(f"without-{feature}", demo, first, read, expect, live, say)
        played = live.played
        after = await _run(f"with-{feature}", demo, second, read, expect, live, say)
        policy, both = load(second.config).policy.build(), [one for one in (played, live.played) if one is not None]
        live.stage = "simulating"
        expected = await asyncio.to_thread(_expected, policy, both) if both else {}
    return compared(before, after, which) | expected


async def play_runs(
    which: DemoScenario | None, demo: Demo, runs: int, expect: Expect, live: Live, say: Callable[[str], None]
) -> report.Report:
    """Play so many comparisons: of traces consecutive parts, else with consecutive seeds. One says little where the
    gain is small: which seat is where follows from milliseconds.

    Raises DemoError and what a stack raises.
    """
    if runs == 1:
        return await play(which, demo, expect, live, say)
    if demo.chaos:
        raise DemoError("--runs compares, and --chaos plays a scenario alone; leave out one of them")
    length = demo.duration or 0.0
    if demo.traces and not length:
        raise DemoError("--runs plays consecutive parts of a trace; say how long each is with --duration")
    parts = [_part(demo, number) for number in range(runs)]
    for one in parts if demo.traces else ():
        if next(arrivals(one)(), None) is None:
            raise DemoError(f"no request of the trace is between seconds {one.start:g} and {one.start + length:g}")
    found = []
    for number, one in enumerate(parts, 1):
        say(f"run {number} of {runs}")
        found.append(
            await play(which, one, expect, live, say)
            | {"run": f"from {one.start:g} s" if demo.traces else f"seed {one.seed}"}
        )
    return total(found)


def _part(demo: Demo, number: int) -> Demo:
    logs = demo.logs and demo.logs / f"run-{number + 1}"
    if demo.traces:
        return dataclasses.replace(demo, start=demo.start + number * (demo.duration or 0.0), logs=logs)
    return dataclasses.replace(demo, seed=demo.seed + number, logs=logs)


def own_arrivals(demo: Demo, which: DemoScenario = DemoScenario.HOT_GROUP) -> tuple[Arrival, ...]:
    """The requests of both runs of a scenario."""
    models, requests = (HOT, REQUESTS) if which is not DemoScenario.PACKED else (tuple(SIZES), PACKED_REQUESTS)
    trace = workload.generate(models, seed=demo.seed, requests=requests, duration=DURATION_SECONDS)
    end = DURATION_SECONDS if demo.duration is None else demo.start + demo.duration
    part = (arrival for arrival in trace if demo.start <= arrival.at_seconds < end)
    return tuple(arrival._replace(at_seconds=arrival.at_seconds - demo.start) for arrival in part)


def compared(
    without: report.Report, featured: report.Report, which: DemoScenario | None = DemoScenario.HOT_GROUP
) -> report.Report:
    """The run with the feature, and what it changed."""
    feature = DemoScenario.HOT_GROUP.feature if which is None else which.feature
    scenario = {} if which is None else {"scenario": which.value}
    return (
        featured
        | scenario
        | {
            feature: True,
            f"without_{feature}": without,
            "wait_mean_without_s": without["wait_mean_s"],
            "wait_fall": _fall(without["wait_mean_s"], featured["wait_mean_s"]),
        }
    )


def total(runs: Sequence[report.Report]) -> report.Report:
    """Several comparisons as one: sums of counts, of what went wrong over both stacks, and means over all requests."""
    sums = {key: sum(one[key] for one in runs) for key in ("requests", "ok", "switches", "moves")}
    stacks = [stack for one in runs for stack in (one, _first(one))]
    sums |= {key: sum(stack[key] or 0 for stack in stacks) for key in report.WRONG}
    means = [_over_all(runs, key) for key in ("wait_mean_without_s", "wait_mean_s")]
    result = {"runs": list(runs)} | sums | dict(zip(("wait_mean_without_s", "wait_mean_s"), means, strict=True))
    result["wait_fall"] = _fall(*means)
    if all("simulated_waits_s" in one for one in runs):
        counts = [one["requests"] for one in runs]
        single = [[one[key] for one in runs] for key in ("simulated_waits_without_s", "simulated_waits_s")]
        result |= spread(*([fmean(each, counts) for each in zip(*waits, strict=True)] for waits in single))
    return result


def failures(result: report.Report) -> list[str]:
    """Why a comparison, or one of several, did not show what it is for; empty when all did."""
    if "runs" in result:
        return [f"run {number}: {why}" for number, one in enumerate(result["runs"], 1) for why in failures(one)]
    if "chaos" in result:
        moved = [] if result["moves"] or result["scenario"] == DemoScenario.PACKED else ["no seat moved"]
        return report.passed(result, chaos=True) + moved
    packed, first = "without_packing" in result, _first(result)
    without = "with one slot" if packed else "with bound seats"
    why = report.passed(result, chaos=False) + [f"{without}: {one}" for one in report.passed(first, chaos=False)]
    if first["moves"]:
        why.append("bound seats moved")
    if "scenario" not in result:
        return why
    if not packed and not result["moves"]:
        why.append("no seat moved")
    if result["wait_fall"] is None or result["wait_fall"] < LEAST_FALL:
        why.append(f"the mean wait fell by {result['wait_fall'] or 0.0:.0%} and not by {LEAST_FALL:.0%}")
    return why


def _expected(policy: Policy, played: Sequence[Played]) -> dict[str, Any]:
    """What the simulator says about both runs in ``SEEDS`` runs, each from its own beginning, both with the costs of
    all switches that were seen: a machine that became slower is no effect of the feature."""
    steps = tuple(step for one in played for step in one.steps)
    before, after = (simulated(replace(one, steps=steps), policy, SEEDS) for one in played)
    first, second = (
        [round(sum(one.wait) / max(1, len(one.wait)), 6) for one in outcomes] for outcomes in (before, after)
    )
    return spread(first, second) | {
        "simulated_waits_without_s": first,
        "simulated_waits_s": second,
        "simulated_moves": round(fmean(one.counters["moves"] for one in after)),
        "switch_costs_s": [round(costs.park_seconds + costs.activate_seconds, 3) for costs in map(SwitchCosts, played)],
    }


def spread(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Means over simulations of both runs, by their mean waits, and the least and the most of a single one."""
    waits = [round(fmean(first), 6), round(fmean(second), 6)]
    falls = [1.0 - pooled / bound for bound, pooled in zip(first, second, strict=True) if bound]
    return {
        "simulated_wait_mean_without_s": waits[0],
        "simulated_wait_range_without_s": [round(min(first), 6), round(max(first), 6)],
        "simulated_wait_mean_s": waits[1],
        "simulated_wait_range_s": [round(min(second), 6), round(max(second), 6)],
        "simulated_wait_fall": _fall(*waits),
        "simulated_wait_fall_range": [round(min(falls), 4), round(max(falls), 4)] if falls else None,
    }


def _first(result: report.Report) -> report.Report:
    """The run without the feature."""
    found: report.Report = result.get("without_packing") or result["without_pooled"]
    return found


def _over_all(runs: Sequence[report.Report], key: str) -> float:
    return round(fmean([one[key] or 0.0 for one in runs], [one["requests"] for one in runs]), 6)


def _fall(before: float | None, after: float | None) -> float | None:
    return round(1.0 - after / before, 4) if before and after is not None else None


async def _run(
    name: str,
    demo: Demo,
    options: StackOptions,
    read: Read | None,
    expect: Expect,
    live: Live,
    say: Callable[[str], None],
) -> report.Report:
    one = dataclasses.replace(demo, logs=demo.logs / name if demo.logs is not None else None)
    live.begin_again()
    say(name.replace("-", " "))
    return await on_stack(one, options, read, expect, live, say)


def build_options(which: DemoScenario, demo: Demo, folder: Path, speed: float) -> StackOptions:
    """The stack of a scenario, whose files are written to ``folder``."""
    packed = which is DemoScenario.PACKED
    seats = workload.TraceLayout((tuple(SIZES),), len(SIZES)) if packed else _hot(which)
    config, pods = folder / "config.yaml", folder / "pods.yaml"
    config.write_text(workload.config_yaml(seats, policy=POLICY, packed=packed))
    starts = not packed and (seats.size > 1 or seats.instances or demo.backend)
    vram = dict.fromkeys(seats.models, MIG_VRAM) if seats.instances else SIZES
    pods.write_text(workload.pods_yaml(seats, demo.driver, vram, KYB_RUN if starts else ()))
    gpus = seats.size * len(seats.groups)
    settings = {
        "router": {"KYB_HOLD_SECONDS": str(HOLD_MODEL_SECONDS)},
        "checkpointer": {"KYB_PARK_ALLOW": "several-gpus"},
    }
    return StackOptions(
        driver=demo.driver,
        backend=demo.backend,
        config=config,
        pods=pods,
        port=0,
        preset=MIG_PRESET if seats.instances else "default",
        gpus=gpus,
        speed=speed,
        settings=settings,
    )


def _hot(which: DemoScenario) -> workload.TraceLayout:
    """Two groups. But for ``hot-group`` the second has a single model: the others come from the first."""
    groups = (HOT, COLD if which is DemoScenario.HOT_GROUP else COLD[:1])
    first = {one.index: one.uuid for one in reversed(hardware(MIG_PRESET).instances)}  # an instance of each GPU
    instances = (first[0], first[1]) if which is DemoScenario.HOT_MIG else ()
    return workload.TraceLayout(groups, len(HOT), HOT_SIZES[which], instances)
