"""Scenarios: a layout, a workload and two runs of it, so that one invocation shows what a feature changes.

``hot-group``: everything is asked of the seats of group G0 while those of G1 rest. The same arrivals are played twice,
without and with rebalancing; with it, seats of G0 move to G1 by themselves.
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
REQUESTS = 480
DURATION_SECONDS = 600.0
"""Model seconds; each of the two runs takes 25 s at the default speed."""
POLICY = "kyb-balanced"
LEAST_FALL = 0.25
"""Of the mean wait, for the demo to pass."""


class DemoScenario(StrEnum):
    """The shipped scenarios."""

    HOT_GROUP = "hot-group"


async def play(
    demo: Demo, expect: Expect, live: Live, say: Callable[[str], None], *, rebalance: bool = True
) -> report.Report:
    """Play hot-group without and with rebalancing, or only without. Raises DemoError and what a stack raises."""
    if demo.traces or demo.router or demo.chaos:
        raise DemoError("--scenario brings its own stack and workload; leave out --trace, --router and --chaos")
    asked = arrivals(demo)
    without = await _run(demo, asked, expect, live, say, rebalance=False)
    if not rebalance:
        return without | {"scenario": DemoScenario.HOT_GROUP.value, "rebalance": False}
    rebalanced = await _run(demo, asked, expect, live, say, rebalance=True)
    return compared(without, rebalanced)


def arrivals(demo: Demo) -> tuple[Arrival, ...]:
    """The requests of both runs."""
    trace = workload.generate(HOT, seed=demo.seed, requests=REQUESTS, duration=DURATION_SECONDS)
    end = DURATION_SECONDS if demo.duration is None else demo.start + demo.duration
    part = (arrival for arrival in trace if demo.start <= arrival.at_seconds < end)
    return tuple(arrival._replace(at_seconds=arrival.at_seconds - demo.start) for arrival in part)


def compared(without: report.Report, rebalanced: report.Report) -> report.Report:
    """The run with rebalancing, and what it changed."""
    before, after = without["wait_mean_s"], rebalanced["wait_mean_s"]
    fall = round(1.0 - after / before, 4) if before and after is not None else None
    return rebalanced | {
        "scenario": DemoScenario.HOT_GROUP.value,
        "rebalance": True,
        "without_rebalance": without,
        "wait_mean_without_s": before,
        "wait_fall": fall,
    }


def failures(result: report.Report) -> list[str]:
    """Why a scenario did not show what it is for; empty when it did."""
    if not result.get("rebalance"):
        return [f"{result['moves']} moves although rebalancing is off"] if result["moves"] else []
    why = [f"without rebalancing: {one}" for one in report.passed(result["without_rebalance"], chaos=False)]
    if not result["moves"]:
        why.append("no seat moved")
    if result["without_rebalance"]["moves"]:
        why.append("seats moved although rebalancing was off")
    if result["wait_fall"] is None or result["wait_fall"] < LEAST_FALL:
        why.append(f"the mean wait fell by {result['wait_fall'] or 0.0:.0%} and not by {LEAST_FALL:.0%}")
    return why


async def _run(
    demo: Demo,
    asked: tuple[Arrival, ...],
    expect: Expect,
    live: Live,
    say: Callable[[str], None],
    *,
    rebalance: bool,
) -> report.Report:
    speed = demo.speed or DEFAULT_SPEED
    name = "with-rebalance" if rebalance else "without-rebalance"
    one = dataclasses.replace(demo, logs=demo.logs / name if demo.logs is not None else None)

    def read() -> Iterator[Arrival]:
        return iter(asked)

    with tempfile.TemporaryDirectory(prefix="kyb-demo-") as folder:
        options = await asyncio.to_thread(_options, demo, Path(folder), speed, rebalance)
        live.begin_again()
        say(name.replace("-", " "))
        result: dict[str, Any] = await on_stack(one, options, read, expect, live, say)
    return result


def _options(demo: Demo, folder: Path, speed: float, rebalance: bool) -> StackOptions:
    seats = workload.TraceLayout((HOT, COLD), len(HOT))
    config, pods = folder / "config.yaml", folder / "pods.yaml"
    config.write_text(workload.config_yaml(seats, rebalance=rebalance, policy=POLICY))
    pods.write_text(workload.pods_yaml(seats, demo.driver))
    settings = {"router": {"KYB_HOLD_SECONDS": str(HOLD_MODEL_SECONDS)}}
    return StackOptions(driver=demo.driver, config=config, pods=pods, port=0, gpus=2, speed=speed, settings=settings)
