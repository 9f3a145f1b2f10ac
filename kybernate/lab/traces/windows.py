"""Arrivals drawn from statistics of arrivals: ServeGen's windows (model, client, start, rate, CV, gap distribution),
and rates of a Prometheus, between whose requests gaps are exponential.

Each client is a renewal process in operational time: a gap of mean 1 is drawn with the present window's shape, and
the next request comes when the integral of the rate has grown by that gap. So the expected number of requests of a
window is rate times width, whatever the shape, and bursts go on across window borders. The published ``scale`` is
not used: the rate is the measured fact, and a fitted scale does not reproduce it exactly.
"""

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kybernate.lab.traces.formats import Arrival

WINDOW_SECONDS = 600.0
COLUMNS = frozenset({"model", "client", "window_start_s", "rate_rps", "pattern", "shape"})

PROMPT_QUANTILES = (
    *(2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020),
    *(1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734, 4083, 14050),
)
OUTPUT_QUANTILES = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000)
"""Token lengths in steps of 5 %, minimum to maximum, counted by us over the 19,366 rows of Azure's 2023 conversation
trace (AzurePublicDataset, AzureLLMInferenceTrace_conv.csv, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024)."""


class Window(NamedTuple):
    """What one client did during ``WINDOW_SECONDS``."""

    start_seconds: float
    rate: float
    """Requests per second."""
    pattern: str
    """``Gamma`` or ``Weibull``."""
    shape: float


def of_prometheus(answer: Any) -> dict[str, list[Window]]:
    """Windows by model, from an answer of ``query_range`` with rates per second of the last ten minutes, a step of ten
    minutes, and a label ``model``; series of one model add up. Times begin at 0. Raises ValueError."""
    try:
        series = [(str(one["metric"]["model"]), one["values"]) for one in answer["data"]["result"]]
        points = [(model, float(at), float(rate)) for model, values in series for at, rate in values]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no matrix of rates by model ({type(error).__name__}: {error})") from None
    begin = min((at for _, at, _ in points), default=0.0)
    rates: dict[tuple[str, float], float] = {}
    for model, at, rate in points:
        if 0 < rate < math.inf:
            key = (model, round(at - begin, 3))
            rates[key] = rates.get(key, 0.0) + rate
    _check_steps({round(at - begin, 3) for _, at, _ in points})
    found: dict[str, list[Window]] = {}
    for (model, start), rate in rates.items():
        found.setdefault(model, []).append(Window(start, rate, "Gamma", 1.0))
    return found


def _check_steps(moments: Iterable[float]) -> None:
    """Values are ten minutes apart; some may be missing. Raises ValueError."""
    distances = [later - earlier for earlier, later in pairwise(sorted(moments))]
    wrong = [distance for distance in distances if distance % WINDOW_SECONDS]
    if distances and (wrong or min(distances) > WINDOW_SECONDS):
        raise ValueError(
            f"values are {min(wrong or distances):g} s apart instead of {WINDOW_SECONDS:.0f}; ask with step=600"
        )


def unit_gap(pattern: str, shape: float, random_: random.Random) -> float:
    """One gap with mean 1 and the burstiness of this shape (a lower shape is burstier)."""
    if pattern == "Gamma":
        return random_.gammavariate(shape, 1.0 / shape)
    return random_.weibullvariate(1.0 / math.gamma(1.0 + 1.0 / shape), shape)


def length(quantiles: Sequence[int], random_: random.Random) -> int:
    """A token count from quantiles in equal steps, straight lines between them; at least 1."""
    place = random_.random() * (len(quantiles) - 1)
    low = int(place)
    return max(1, round(quantiles[low] + (place - low) * (quantiles[low + 1] - quantiles[low])))


def draw(windows: Sequence[Window], model: str, random_: random.Random) -> Iterator[Arrival]:
    """Arrivals of one client over its windows, which must be in order of time."""
    needed = -1.0
    for window in windows:
        done = 0.0
        while True:
            if needed < 0:
                needed = unit_gap(window.pattern, window.shape, random_)
            left = (WINDOW_SECONDS - done) * window.rate
            if needed > left:
                needed -= left
                break
            done += needed / window.rate
            needed = -1.0
            at = window.start_seconds + done
            yield Arrival(at, model, length(PROMPT_QUANTILES, random_), length(OUTPUT_QUANTILES, random_))


def merged(clients: dict[str, list[Window]], seed: int) -> Iterator[Arrival]:
    """All clients' arrivals in order of time; each client has its own stream of random numbers."""
    streams: Iterable[Iterator[Arrival]] = [
        draw(sorted(windows), name, random.Random(f"{seed}/{name}")) for name, windows in sorted(clients.items())
    ]
    return heapq.merge(*streams)
