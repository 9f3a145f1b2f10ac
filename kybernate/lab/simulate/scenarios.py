"""Ready scenarios: the four of the reference table, the grid of regimes, and any trace on any node.

S1 ``poisson``   4 seats, Zipf, 0.12 requests/s
S2 ``bursty``    6 seats, 60 s on / 300 s off, 0.3 requests/s
S3 ``gentd26``   10 most used models of Alibaba GenTD26, evening hours of days 17 to 21; only with its file
S4 ``servegen``  10 seats, 0.32 requests/s: hours of the derived trace if its file is given, else generated alike

A window is one hour; the same window has the same requests for every policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

from kybernate.lab.simulate.generate import (
    SERVEGEN_RATE,
    SERVEGEN_TENANTS,
    SERVICE_MEAN,
    draw_service,
    mmpp,
    poisson,
    tenant,
    together,
    zipf,
)
from kybernate.lab.simulate.model import Scenario, SimGroup
from kybernate.lab.simulate.node import HARDWARE, Cost, Node, by_requests, from_arrivals, sized_seats
from kybernate.lab.traces import load

HOUR = 3600.0
DAY = 86_400.0
REFERENCE = ("poisson", "bursty", "gentd26", "servegen")
SEATS = {"poisson": 4, "bursty": 6, "gentd26": 10, "servegen": 10}
RATE = {"poisson": 0.12, "bursty": 0.3}
GENTD26_EVENINGS = tuple((day, hour) for day in (17, 18, 20, 19, 21) for hour in (20, 21, 22, 23))
"""(day, hour) of the windows of S3; days count from the first of the trace."""


def reference(name: str, window: int = 0, *, trace: Path | None = None, cost: Cost = HARDWARE["fast"]) -> Scenario:
    """One window of one of ``REFERENCE``. ``trace`` is GenTD26's file for S3 (needed) and the derived trace for S4.

    Raises ValueError for a name that is not there, TraceError for a file that cannot be read.
    """
    if name in RATE:
        return hour_of(name, RATE[name], window, cost)
    if name == "servegen":
        return _servegen(window, trace, cost)
    if name == "gentd26":
        if trace is None:
            raise ValueError("scenario gentd26 needs the trace: give the path of GenTD26's lora_request_trace.csv")
        day, hour = GENTD26_EVENINGS[window % len(GENTD26_EVENINGS)]
        # The ten most used models of the day, for its hour: their service times are drawn, since GenTD26 makes images.
        return evening_of(trace, day * DAY, hour * HOUR, window, cost)
    raise ValueError(f"no reference scenario {name!r}; there are {', '.join(REFERENCE)}")


def regime(arrivals: str, load_: float, switch_seconds: float, window: int = 0, *, duration: float = HOUR) -> Scenario:
    """One cell of the grid {poisson, bursty} x load x seconds of a whole switch (half to park, half to activate).

    ``load_`` is requests per second times mean seconds in flight, per slot: 1 is one request in flight all the time.
    """
    made = hour_of(arrivals, load_ / SERVICE_MEAN, window, HARDWARE["fast"], duration=duration)
    half = switch_seconds / 2
    seats = tuple(replace(seat, park_seconds=half, activate_seconds=half) for seat in made.seats)
    return replace(made, name=f"{arrivals} load {load_:g} switch {switch_seconds:g} s, window {window}", seats=seats)


def hour_of(kind: str, rate: float, window: int, cost: Cost, *, duration: float = HOUR) -> Scenario:
    """Generated arrivals of a kind (``poisson`` or ``bursty``) on one group; Zipf shares."""
    makers: dict[str, Callable[[float, float, Random], Iterable[float]]] = {"poisson": poisson, "bursty": mmpp}
    if kind not in makers:
        raise ValueError(f"no kind of arrivals {kind!r}; there are {', '.join(makers)}")
    count = SEATS[kind]
    streams = [
        iter(makers[kind](rate * share, duration, Random(f"{kind}/{window}/{index}")))
        for index, share in enumerate(zipf(count))
    ]
    at, seat = together(streams)
    return Scenario(
        name=f"{kind}, window {window}",
        seats=sized_seats(numbered(count), cost),
        groups=(SimGroup("G0"),),
        at=at,
        seat=seat,
        service=services(len(at), f"{kind}/{window}"),
        duration=duration,
        source=f"generated: {kind}, {rate:.3g} requests/s",
    )


def numbered(count: int) -> tuple[str, ...]:
    """Names of generated seats: s0, s1, …"""
    return tuple(f"s{index}" for index in range(count))


def services(count: int, seed: str) -> tuple[float, ...]:
    """Seconds in flight, drawn."""
    random = Random(f"{seed}/service")
    return tuple(draw_service(random) for _ in range(count))


def _servegen(window: int, trace: Path | None, cost: Cost) -> Scenario:
    if trace is not None:
        node = Node(cost=cost)
        made = from_arrivals(load(trace, window * HOUR, HOUR), node, models=by_requests(load(trace)))
        return replace(made, name=f"servegen, window {window}", duration=HOUR, source=f"hour {window} of {trace.name}")
    # A day is drawn as a whole, and its hours are the windows: a tenant that is away for hours stays away.
    day, hour = divmod(window, 24)
    rows = [(at - hour * HOUR, seat) for at, seat in zip(*_servegen_day(day), strict=True)]
    rows = [(at, seat) for at, seat in rows if 0 <= at < HOUR]
    names = tuple(one.source for one in SERVEGEN_TENANTS)
    return Scenario(
        name=f"servegen, window {window}",
        seats=sized_seats(names, cost),
        groups=(SimGroup("G0"),),
        at=tuple(at for at, _ in rows),
        seat=tuple(seat for _, seat in rows),
        service=services(len(rows), f"servegen/{window}"),
        duration=HOUR,
        source="generated like ten intermittent ServeGen clients",
    )


@lru_cache(maxsize=2)
def _servegen_day(day: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Kept, since its hours are asked for one after the other."""
    streams = [
        tenant(one, SERVEGEN_RATE * one.share, DAY, Random(f"servegen/{day}/{one.source}")) for one in SERVEGEN_TENANTS
    ]
    return together(streams)


def evening_of(trace: Path, day: float, hour: float, window: int, cost: Cost) -> Scenario:
    """An hour of GenTD26 on the ten most used models of that day."""
    models = by_requests(load(trace, day, DAY))[:10]
    made = from_arrivals(load(trace, day + hour, HOUR), Node(cost=cost), models=models)
    drawn = services(len(made.at), f"gentd26/{window}")
    return replace(made, name=f"gentd26, window {window}", service=drawn, duration=HOUR, source=f"{trace.name}")
