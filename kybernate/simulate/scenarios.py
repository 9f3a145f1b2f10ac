"""Ready scenarios: the four of the reference table, the grid of regimes, and any trace on any node.

S1 ``poisson``   4 seats, Zipf, 0.12 requests/s
S2 ``bursty``    6 seats, 60 s on / 300 s off, 0.3 requests/s
S3 ``gentd26``   10 most used models of Alibaba GenTD26, evening hours of days 17 to 21; only with its file
S4 ``servegen``  10 seats, 0.32 requests/s: hours of the derived trace if its file is given, else generated alike

A window is one hour; the same window has the same requests for every policy.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from kybernate.simulate.costs import GB, HARDWARE, Cost
from kybernate.simulate.generate import (
    SERVEGEN_RATE,
    SERVEGEN_TENANTS,
    SERVICE_MEAN,
    draw_service,
    mmpp,
    poisson,
    service_seconds,
    tenant,
    together,
    zipf,
)
from kybernate.simulate.model import Scenario, SimGroup, SimSeat
from kybernate.traces import Arrival, load

HOUR = 3600.0
DAY = 86_400.0
VRAM_GB = (36, 28, 20, 34, 60, 24, 20, 44, 28, 20)
"""Sizes of the seats, again from the first after the last."""
REFERENCE = ("poisson", "bursty", "gentd26", "servegen")
SEATS = {"poisson": 4, "bursty": 6, "gentd26": 10, "servegen": 10}
RATE = {"poisson": 0.12, "bursty": 0.3}
GENTD26_EVENINGS = tuple((day, hour) for day in (17, 18, 20, 19, 21) for hour in (20, 21, 22, 23))
"""(day, hour) of the windows of S3; days count from the first of the trace."""


def reference(name: str, window: int = 0, *, trace: Path | None = None, cost: Cost = HARDWARE["fast"]) -> Scenario:
    """One window of one of ``REFERENCE``. ``trace`` is GenTD26's file for S3 (needed) and the derived trace for S4.

    Raises ValueError for a name that is not there, KeyError never; TraceError for a file that cannot be read.
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
        seats=seats(count, cost),
        groups=(SimGroup("G0"),),
        at=at,
        seat=seat,
        service=services(len(at), f"{kind}/{window}"),
        duration=duration,
        source=f"generated: {kind}, {rate:.3g} requests/s",
    )


def services(count: int, seed: str) -> tuple[float, ...]:
    """Seconds in flight, drawn."""
    random = Random(f"{seed}/service")
    return tuple(draw_service(random) for _ in range(count))


def seats(count: int, cost: Cost, *, names: Sequence[str] = (), group: str = "G0") -> tuple[SimSeat, ...]:
    """Seats of the sizes of ``VRAM_GB``."""
    made = []
    for index in range(count):
        vram = VRAM_GB[index % len(VRAM_GB)] * GB
        name = names[index] if names else f"s{index}"
        park, activate = cost.park_seconds(vram), cost.activate_seconds(vram)
        made.append(SimSeat(name, group, park, activate, vram_bytes=vram, host_bytes=vram, model=name))
    return tuple(made)


def _servegen(window: int, trace: Path | None, cost: Cost) -> Scenario:
    if trace is not None:
        made = from_arrivals(load(trace, window * HOUR, HOUR), cost=cost, models=_models(load(trace)))
        return replace(made, name=f"servegen, window {window}", duration=HOUR, source=f"hour {window} of {trace.name}")
    # A day is drawn as a whole, and its hours are the windows: a tenant that is away for hours stays away.
    day, hour = divmod(window, 24)
    streams = [
        tenant(one, SERVEGEN_RATE * one.share, DAY, Random(f"servegen/{day}/{one.source}")) for one in SERVEGEN_TENANTS
    ]
    rows = [(at - hour * HOUR, seat) for at, seat in zip(*together(streams), strict=True)]
    rows = [(at, seat) for at, seat in rows if 0 <= at < HOUR]
    names = tuple(one.source for one in SERVEGEN_TENANTS)
    return Scenario(
        name=f"servegen, window {window}",
        seats=seats(len(names), cost, names=names),
        groups=(SimGroup("G0"),),
        at=tuple(at for at, _ in rows),
        seat=tuple(seat for _, seat in rows),
        service=services(len(rows), f"servegen/{window}"),
        duration=HOUR,
        source="generated like ten intermittent ServeGen clients",
    )


def evening_of(trace: Path, day: float, hour: float, window: int, cost: Cost) -> Scenario:
    """An hour of GenTD26 on the ten most used models of that day."""
    models = _models(load(trace, day, DAY), 10)
    made = from_arrivals(load(trace, day + hour, HOUR), cost=cost, models=models)
    drawn = services(len(made.at), f"gentd26/{window}")
    return replace(made, name=f"gentd26, window {window}", service=drawn, duration=HOUR, source=f"{trace.name}")


def _models(arrivals: Iterable[Arrival], most: int | None = None) -> tuple[str, ...]:
    """Models by number of requests, most first."""
    counts: dict[str, int] = {}
    for arrival in arrivals:
        counts[arrival.model] = counts.get(arrival.model, 0) + 1
    return tuple(sorted(counts, key=lambda model: (-counts[model], model))[:most])


def from_arrivals(
    arrivals: Iterable[Arrival], *, cost: Cost, models: Sequence[str] = (), speed_up: float = 1.0, name: str = "trace"
) -> Scenario:
    """A trace on one group, one seat per model; requests for other than ``models`` (default: all) are left out.

    ``speed_up`` 2 makes the gaps half as long. Times and service come from the trace's times and tokens.
    """
    rows = list(arrivals)
    wanted = tuple(models) or _models(rows)
    place = {model: index for index, model in enumerate(wanted)}
    kept = [row for row in rows if row.model in place]
    at = tuple(row.at_seconds / speed_up for row in kept)
    return Scenario(
        name=name,
        seats=seats(len(wanted), cost, names=wanted),
        groups=(SimGroup("G0"),),
        at=at,
        seat=tuple(place[row.model] for row in kept),
        service=tuple(service_seconds(row.prompt_tokens, row.output_tokens) for row in kept),
        duration=at[-1] if at else 0.0,
    )
