"""``kyb plan`` on a fleet of 25 models: how long it takes, whether the plan of a day holds on the next one, and how far
its forecasts miss; and a month of 200 models: CPU seconds, and seconds until its first layout.

``python -m bench plan``: ``KYB_SERVEGEN_WINDOWS`` is the path of ServeGen's windows (docs/dev/demo.md, Workloads); of
them ``MODELS`` clients that send every day are chosen, with all rates scaled so that a day has ``REQUESTS`` in the
mean. Some minutes on one core; but for the seconds, figures do not depend on the machine.
"""

import asyncio
import csv
import gzip
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kybernate.lab.forecast import backtest, forecast, hourly
from kybernate.lab.plan import JUDGED
from kybernate.lab.traces import load
from kybernate.lab.traces.windows import WINDOW_SECONDS

MODELS = 25
REQUESTS = 2700
DAYS = 14
PLANNED = tuple(range(0, 12, 2))
"""Days that are planned, from 0; each plan is played on the day after it."""
LARGE, MONTH, LARGE_REQUESTS = 250, 30, 3000
"""Clients, days and requests a day of the large plan; some fifty of so many send nothing at that rate."""
SLO = "20:0.95"
DAY = 86_400
HORIZONS = (1, 4)
"""Days that are forecast."""
FORECASTS = ("naive week", "naive day", "level", "trend")
DRAWS, CLIENTS = 8, 15
"""Fleets whose forecasts' bands are compared with days that no fit has seen, and clients of each."""
STARTS = ((7, 7), (8, 4), (9, 4), (10, 4))
"""Days that are known, and days that are forecast."""


async def run() -> dict[str, float]:
    """Prints a row for each planned day; returns points between planned and unseen attainment, and CPU seconds."""
    path = os.environ.get("KYB_SERVEGEN_WINDOWS")
    if path is None:
        Console(stderr=True).print("KYB_SERVEGEN_WINDOWS is not set: nothing is planned")
        return {}
    columns = ("planned % (worst)", "promised % (least of a model)", "the day after: requests, % (worst)", "broken")
    table = Table("day: requests", "groups", "llama-swap's", *columns, "CPU s")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "fleet.csv.gz"
        write(trace, Path(path), MODELS, 1)
        for day in PLANNED:
            plan, seconds = await planned(trace, day)
            rows = {row["name"]: row for row in plan["layouts"]}  # of several policies the last needs least
            seats, after = rows["seats"], plan["verified"]
            shown = [f"{row['slo_attainment']:.1%} ({row['worst_attainment']:.1%})" for row in (seats, after)]
            groups = [f"{seats['groups']} ({seats['policy']})", str(rows["llama-swap"]["groups"])]
            promises = {name: one["promised"] for name, one in seats["models"].items() if one["promised"] is not None}
            promised = f"{seats['promised']:.1%} ({min(promises.values()):.1%}, {len(promises)} models)"
            judged = {name: one for name, one in after["models"].items() if one["requests"] >= JUDGED}
            missed = {
                name: 100 * (promise - judged[name]["attained"]) for name, promise in promises.items() if name in judged
            } | {"all": 100 * (seats["promised"] - after["slo_attainment"])}
            broken = ", ".join(f"{name} by {points:.1f}" for name, points in missed.items() if points > 0)
            unseen = f"{after['busiest']:,}, {shown[1]}"
            table.add_row(
                f"{day + 1}: {plan['requests']:,}", *groups, shown[0], promised, unseen, broken, f"{seconds:.1f}"
            )
            figures[f"day {day + 1}: points by which a promise was missed at most"] = max(0.0, *missed.values())
            figures[f"day {day + 1}: points on the day after"] = 100 * (
                after["slo_attainment"] - seats["slo_attainment"]
            )
            figures[f"day {day + 1}: CPU s"] = seconds
        figures |= backtests(Path(path), trace)
        figures |= bands(Path(path), trace)
        write_large(trace, Path(path))
        plan, seconds, first = await answered(trace)
        layouts = {row["name"]: row for row in plan["layouts"]}
        Console().print(
            f"{layouts['dedicated']['groups']} models, {plan['requests']:,} requests in {MONTH} days: "
            + ", ".join(f"{row['groups']} groups of {name} ({row['policy']})" for name, row in layouts.items())
            + f"; {seconds:.0f} CPU s, the first layout after {first:.0f} s"
        )
        figures |= {"large: CPU s": seconds, "large: s until the first layout": first}
    Console().print(table)
    return figures


def backtests(source: Path, trace: Path) -> dict[str, float]:
    """Prints how far forecasts of 1 and 4 days miss the expected requests per hour, and the drawn ones of the fleet;
    returns the weighted errors of hours, in percent."""
    hours: dict[str, list[float]] = {}
    for row in windows(source):
        hour, count = int(float(row["window_start_s"]) // 3600), float(row["rate_rps"]) * WINDOW_SECONDS
        for name in ("all clients", row["model"]):
            hours.setdefault(name, [0.0] * DAYS * 24)[hour] += count
    series = {name: hours[name] for name in ("all clients", "m-large", "m-small", "m-mid")}
    series[f"{MODELS} clients, drawn"] = hourly((one.at_seconds for one in load(trace)), DAYS * 24)
    table = Table(
        "", "days, forecasts", *FORECASTS, title="MAPE of hours (weighted; of whole days; in the band of 80 %)"
    )
    figures: dict[str, float] = {}
    for name, requests in series.items():
        for days in HORIZONS:
            tested, horizon, count = backtest(requests, days)
            cells = [
                f"{one.mape:.0%} ({one.wape:.0%}; {one.days_wape:.0%}"
                + (")" if one.coverage is None else f"; {one.coverage:.0%})")
                for one in tested
            ]
            table.add_row(name, f"{horizon}, {count}", *cells)
            figures |= {f"{name}, {days} d: {one.method}, weighted %": 100 * one.wape for one in tested}
    Console().print(table)
    return figures


def bands(source: Path, trace: Path) -> dict[str, float]:
    """Returns the share of days within the band that asks for 80 %, in percent, by the days that were known."""
    held: dict[str, list[bool]] = {}
    for seed in range(100, 100 + DRAWS):
        write(trace, source, CLIENTS, seed)
        requests = hourly((one.at_seconds for one in load(trace)), DAYS * 24)
        for known, ahead in STARTS:
            for day, (low, _, high) in enumerate(forecast(requests[: known * 24], ahead).days, known):
                came = sum(requests[day * 24 : (day + 1) * 24])
                held.setdefault(f"{ahead} days from day {known}: in the band of 80 %", []).append(low <= came <= high)
    figures = {name: 100 * sum(days) / len(days) for name, days in held.items()}
    Console().print(f"{DRAWS} draws of {CLIENTS} clients:", figures)
    return figures


def windows(source: Path) -> list[dict[str, str]]:
    """The rows of ServeGen's windows in the first ``DAYS`` days."""
    with gzip.open(source, "rt", newline="") as file:
        return [row for row in csv.DictReader(file) if float(row["window_start_s"]) < DAYS * DAY]


def write(path: Path, source: Path, models: int, seed: int) -> None:
    """The windows of so many clients, with their rates scaled."""
    rows = windows(source)
    days: dict[tuple[str, str], set[float]] = {}
    for row in rows:
        days.setdefault((row["model"], row["client"]), set()).add(float(row["window_start_s"]) // DAY)
    chosen = {*random.Random(seed).sample(sorted(name for name in days if len(days[name]) == DAYS), models)}
    kept = [row for row in rows if (row["model"], row["client"]) in chosen]
    factor = REQUESTS * DAYS / (WINDOW_SECONDS * sum(float(row["rate_rps"]) for row in kept))
    with gzip.open(path, "wt", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(row | {"rate_rps": float(row["rate_rps"]) * factor} for row in kept)


def write_large(path: Path, source: Path) -> None:
    """The windows of ``LARGE`` clients, again from the first after the last day until a month is full."""
    rows = windows(source)
    names = sorted({(row["model"], row["client"]) for row in rows})
    chosen = {*random.Random(2).sample(names, LARGE)}
    kept = [
        row | {"window_start_s": start}
        for again in range(0, MONTH, DAYS)
        for row in rows
        if (row["model"], row["client"]) in chosen
        and (start := float(row["window_start_s"]) + again * DAY) < MONTH * DAY
    ]
    factor = LARGE_REQUESTS * MONTH / (WINDOW_SECONDS * sum(float(row["rate_rps"]) for row in kept))
    with gzip.open(path, "wt", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(row | {"rate_rps": float(row["rate_rps"]) * factor} for row in kept)


async def planned(trace: Path, day: int) -> tuple[dict[str, Any], float]:
    """The answer of the command for one day, checked on the next, and its CPU seconds."""
    answer, seconds, _ = await answered(trace, "--start", day * DAY, "--duration", DAY, "--verify", (day + 1) * DAY)
    return answer, seconds


async def answered(trace: Path, *hours: object) -> tuple[dict[str, Any], float, float]:
    """The answer of the command, its CPU seconds, and the seconds until it has reported its first layout."""
    words = [Path(sys.executable).with_name("kyb"), "plan", trace, "--slo", SLO, *hours, "-o", "json"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *map(str, words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    await process.stderr.readline()
    first = time.monotonic() - began
    answer, _ = await process.communicate()
    return json.loads(answer), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, first
