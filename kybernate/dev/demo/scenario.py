"""Scenarios: a layout, a workload and two runs of it, so that one invocation shows what a feature changes.

``hot-group``: everything is asked of the seats of group G0 while those of G1 rest. The same arrivals are played twice,
without and with rebalancing; with it, seats of G0 move to G1 by themselves.

``packed``: five models of 12 to 44 GiB on one GPU of 80 GiB, first with one slot, then packed by memory. The fake
driver counts a restore without room as a violation, and an engine that finds no memory crashes.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from kybernate.dev.demo import report, workload
from kybernate.dev.demo.client import Expect
from kybernate.dev.demo.session import DEFAULT_SPEED, HOLD_MODEL_SECONDS, Demo, DemoError, Live, on_stack
from kybernate.dev.stack import StackOptions
from kybernate.lab.traces import Arrival

HOT = ("hot-a", "hot-b", "hot-c")
COLD = ("cold-a", "cold-b", "cold-c")
SIZES = {"small-a": "12GiB", "small-b": "18GiB", "middle-a": "24GiB", "middle-b": "30GiB", "large": "44GiB"}
"""The models of ``packed`` with their VRAM."""
REQUESTS = 480
PACKED_REQUESTS = 240
"""Five models on one slot are overloaded with more."""
DURATION_SECONDS = 600.0
"""Model seconds; each of the two runs takes 25 s at the default speed."""
POLICY = "kyb-balanced"
LEAST_FALL = 0.25
"""Of the mean wait, for the demo to pass."""


class DemoScenario(StrEnum):
    """The shipped scenarios."""

    HOT_GROUP = "hot-group"
    PACKED = "packed"

    @property
    def feature(self) -> str:
        """What its second run has and its first has not."""
        return "packing" if self is DemoScenario.PACKED else "rebalance"


async def play(
    which: DemoScenario, demo: Demo, expect: Expect, live: Live, say: Callable[[str], None], *, both: bool = True
) -> report.Report:
    """Play a scenario without and with its feature, or only without. Raises DemoError and what a stack raises."""
    if demo.traces or demo.router or demo.chaos:
        raise DemoError("--scenario brings its own stack and workload; leave out --trace, --router and --chaos")
    asked = arrivals(demo, which)
    without = await _run(which, demo, asked, expect, live, say, featured=False)
    if not both:
        return without | {"scenario": which.value, which.feature: False}
    featured = await _run(which, demo, asked, expect, live, say, featured=True)
    return compared(without, featured, which)


def arrivals(demo: Demo, which: DemoScenario = DemoScenario.HOT_GROUP) -> tuple[Arrival, ...]:
    """The requests of both runs."""
    models, requests = (HOT, REQUESTS) if which is DemoScenario.HOT_GROUP else (tuple(SIZES), PACKED_REQUESTS)
    trace = workload.generate(models, seed=demo.seed, requests=requests, duration=DURATION_SECONDS)
    end = DURATION_SECONDS if demo.duration is None else demo.start + demo.duration
    part = (arrival for arrival in trace if demo.start <= arrival.at_seconds < end)
    return tuple(arrival._replace(at_seconds=arrival.at_seconds - demo.start) for arrival in part)


def compared(
    without: report.Report, featured: report.Report, which: DemoScenario = DemoScenario.HOT_GROUP
) -> report.Report:
    """The run with the scenario's feature, and what it changed."""
    before, after = without["wait_mean_s"], featured["wait_mean_s"]
    fall = round(1.0 - after / before, 4) if before and after is not None else None
    return featured | {
        "scenario": which.value,
        which.feature: True,
        f"without_{which.feature}": without,
        "wait_mean_without_s": before,
        "wait_fall": fall,
    }


def failures(result: report.Report) -> list[str]:
    """Why a scenario did not show what it is for; empty when it did."""
    which = DemoScenario(result.get("scenario", DemoScenario.HOT_GROUP))
    if not result.get(which.feature):
        return [f"{result['moves']} moves although rebalancing is off"] if result["moves"] else []
    first = result[f"without_{which.feature}"]
    without = "without rebalancing" if which is DemoScenario.HOT_GROUP else "with one slot"
    why = [f"{without}: {one}" for one in report.passed(first, chaos=False)]
    if which is DemoScenario.HOT_GROUP and not result["moves"]:
        why.append("no seat moved")
    if first["moves"]:
        why.append("seats moved although rebalancing was off")
    if result["wait_fall"] is None or result["wait_fall"] < LEAST_FALL:
        why.append(f"the mean wait fell by {result['wait_fall'] or 0.0:.0%} and not by {LEAST_FALL:.0%}")
    return why


async def _run(
    which: DemoScenario,
    demo: Demo,
    asked: tuple[Arrival, ...],
    expect: Expect,
    live: Live,
    say: Callable[[str], None],
    *,
    featured: bool,
) -> report.Report:
    speed = demo.speed or DEFAULT_SPEED
    name = f"{'with' if featured else 'without'}-{which.feature}"
    one = dataclasses.replace(demo, logs=demo.logs / name if demo.logs is not None else None)

    def read() -> Iterator[Arrival]:
        return iter(asked)

    with tempfile.TemporaryDirectory(prefix="kyb-demo-") as folder:
        options = await asyncio.to_thread(_options, which, demo, Path(folder), speed, featured)
        live.begin_again()
        say(name.replace("-", " "))
        result: dict[str, Any] = await on_stack(one, options, read, expect, live, say)
    return result


def _options(which: DemoScenario, demo: Demo, folder: Path, speed: float, featured: bool) -> StackOptions:
    packed = which is DemoScenario.PACKED
    seats = workload.TraceLayout((tuple(SIZES),), len(SIZES)) if packed else workload.TraceLayout((HOT, COLD), len(HOT))
    config, pods = folder / "config.yaml", folder / "pods.yaml"
    options = {"packed" if packed else "rebalance": featured}
    config.write_text(workload.config_yaml(seats, policy=POLICY, **options))
    pods.write_text(workload.pods_yaml(seats, demo.driver, SIZES))
    gpus = len(seats.groups)
    settings = {"router": {"KYB_HOLD_SECONDS": str(HOLD_MODEL_SECONDS)}}
    return StackOptions(driver=demo.driver, config=config, pods=pods, port=0, gpus=gpus, speed=speed, settings=settings)
