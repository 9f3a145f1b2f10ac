"""What a service does while it gets a twentieth of a CPU, and after: a real stack under load, with a scale-down.

One service of a stack with fake GPUs is starved for ``SECONDS``, by its cgroup where cgroups can be written, else by
SIGSTOP and SIGCONT in turn. Meanwhile clients send requests, and the pods of three parked seats are deleted. Recovered:
the seats of these pods are free and every other model answers. A service that is asked again before its first answer is
out does its work twice, and stays slow after the starvation: releases and starts of processes are counted.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.processes import process_tree
from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.session import violations_of
from kybernate.dev.stack import Stack, StackOptions
from tests.until import until

SECONDS = 60.0
SHARE = 0.05
SPEED = 10.0
SERVICES = ("checkpointer", "gpu_manager", "plugin", "router", "nats")
CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 0.1
RATE, RATES = 4.0, {"router": 300.0}
"""Requests a second; a router needs more of them than others to have too little with ``SHARE``."""
DELETED = 3
LONGEST_SECONDS = 120.0


async def run(services: Iterable[str] = SERVICES, seconds: float = SECONDS) -> dict[str, float]:
    """Figures by service."""
    return {f"{name}: {what}": value for name in services for what, value in (await _starved(name, seconds)).items()}


async def _starved(name: str, seconds: float) -> dict[str, float]:
    options = StackOptions(port=0, speed=SPEED, announce=False, settings={"router": {"KYB_HOLD_SECONDS": "900"}})
    async with Stack(options) as stack, client_session() as http:
        seats = await stack.ready(300.0)
        before, starts = await violations_of(stack.layout.driver_socket), dict(stack.starts)
        ending = [seat for seat in seats if seat["state"] == "parked"][:DELETED]
        models = sorted({seat["model"] for seat in seats} - {seat["model"] for seat in ending})
        outcomes: list[bool | None] = []
        load = asyncio.create_task(_load(http, stack.url, models, outcomes, RATES.get(name, RATE)))
        health: list[float] = []
        probe = asyncio.create_task(_probe(http, _health_url(stack, name, seats), health))
        throttled: list[float] = []
        async with _share(process_tree(stack.pids[name]), throttled):
            await asyncio.sleep(seconds / 3)
            for seat in ending:
                body = {"namespace": seat["pod"].split("/")[0], "name": seat["pod"].split("/")[1]}
                async with http.post(f"{stack.layout.kubelet_url}/control/delete", json=body) as answer:
                    answer.raise_for_status()
            await asyncio.sleep(seconds * 2 / 3)
        load.cancel()
        probe.cancel()
        await asyncio.gather(load, probe, return_exceptions=True)
        began = time.monotonic()
        async with asyncio.timeout(LONGEST_SECONDS):
            await asyncio.gather(*(_answers(http, stack.url, model) for model in models))
            names = {seat["seat"] for seat in ending}
            await until(
                lambda: _free(http, stack.console, names),
                what="the seats of deleted pods are free",
                timeout=LONGEST_SECONDS,
            )
        recovered = time.monotonic() - began
        released = stack.logs("checkpointer").count('"seat.released"')
        again = sum(stack.starts[each] - starts[each] for each in starts)
        return {
            "requests": float(len(outcomes)),
            "not answered when it ended": float(outcomes.count(None)),
            "failed": float(outcomes.count(False)),
            "throttled, % of the time": max(throttled, default=100.0),
            "slowest /healthz s": max(health, default=0.0),
            "recovered after s": recovered,
            "seats released": float(len(ending)),
            "releases done": float(released),
            "processes started again": float(again),
            "violations": float((await violations_of(stack.layout.driver_socket) or 0) - (before or 0)),
        }


async def _load(
    http: aiohttp.ClientSession, url: str, models: list[str], outcomes: list[bool | None], rate: float
) -> None:
    """``rate`` requests a second, to one model after another."""
    async with asyncio.TaskGroup() as group:
        for model in itertools.cycle(models):
            group.create_task(_counted(http, url, model, outcomes))
            await asyncio.sleep(1.0 / rate)


async def _counted(http: aiohttp.ClientSession, url: str, model: str, outcomes: list[bool | None]) -> None:
    try:
        await _answers(http, url, model)
        outcomes.append(True)
    except aiohttp.ClientError:
        outcomes.append(False)
    except asyncio.CancelledError:
        outcomes.append(None)
        raise


async def _answers(http: aiohttp.ClientSession, url: str, model: str) -> None:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        await answer.read()


async def _probe(http: aiohttp.ClientSession, url: str, seconds: list[float]) -> None:
    """Ask for the health of the starved service each second; kubelet waits 5 s for it, six times. No answer until the
    end counts with the time waited."""
    while True:
        began = time.monotonic()
        try:
            async with http.get(f"{url}/healthz") as answer:
                await answer.read()
        finally:
            seconds.append(time.monotonic() - began)
        await asyncio.sleep(1.0)


def _health_url(stack: Stack, name: str, seats: Sequence[Mapping[str, Any]]) -> str:
    if name in ("router", "nats"):  # nats-server has no such page here
        return stack.url
    if name == "gpu_manager":
        return str(seats[0]["manager_url"])
    (line,) = [json.loads(line) for line in stack.logs(name).splitlines() if f'"{name}.serving"' in line]
    return str(line.get("health") or line["url"])


async def _free(http: aiohttp.ClientSession, url: str, ending: set[str]) -> bool:
    async with http.get(f"{url}/v1/seats") as answer:
        rows = (await answer.json())["seats"]
    return not any(row["seat"] in ending and row["state"] != "free" for row in rows)


@asynccontextmanager
async def _share(pids: list[int], throttled: list[float]) -> AsyncIterator[None]:
    """Leave these processes ``SHARE`` of a CPU; in how many percent of the periods they wanted more."""
    folder = CGROUPS / f"kyb-starved-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text(str(int(PERIOD * 1e6)))
        (folder / "cpu.cfs_quota_us").write_text(str(int(PERIOD * SHARE * 1e6)))
    except OSError:
        duty = asyncio.create_task(_duty(pids))
        try:
            yield
        finally:
            duty.cancel()
            await asyncio.gather(duty, return_exceptions=True)
        return
    try:
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        throttled.append(100.0 * int(stat["nr_throttled"]) / max(1, int(stat["nr_periods"])))
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (CGROUPS / "cgroup.procs").write_text(pid)
        folder.rmdir()


async def _duty(pids: list[int]) -> None:
    try:
        while True:
            for signum, share in ((signal.SIGSTOP, 1 - SHARE), (signal.SIGCONT, SHARE)):
                _signal(pids, signum)
                await asyncio.sleep(PERIOD * share)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
