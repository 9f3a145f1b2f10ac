"""Arrivals drawn from processes, and how long requests are in flight; deterministic for a seed.

Each source gives the arrival times of one seat. Rates are requests per model second.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import pairwise
from random import Random
from typing import NamedTuple

from kybernate.lab.traces.formats import DECODE_SECONDS_PER_TOKEN
from kybernate.lab.traces.windows import WINDOW_SECONDS, unit_gap

PREFILL_TOKENS_PER_SECOND = 8000.0
"""A mid-size model on one GPU: a request is in flight for prompt / 8000 + 25 ms x output tokens
(``DECODE_SECONDS_PER_TOKEN``)."""

SERVICE_QUANTILES = (
    *(0.22, 1.07, 1.36, 1.5, 1.61, 1.74, 1.87, 1.99, 2.09, 2.17, 2.25, 2.3, 2.37, 2.43, 2.5, 2.59, 2.69, 2.8, 2.95),
    *(3.15, 3.35, 3.61, 3.9, 4.13, 4.5, 5.02, 5.45, 9.47, 9.73, 9.91, 10.01, 10.05, 10.13, 10.28, 10.41, 10.53, 10.74),
    *(10.88, 11.41, 13.19, 15.15, 16.24, 25.14),
)
"""Seconds in flight by that rule, at ``_SHARES`` of the 19,366 requests of Azure's 2023 conversation trace, counted by
us (AzurePublicDataset, AzureLLMInferenceTrace_conv.csv, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024). Mean 5.42 s."""
_SHARES = (*(step / 40 for step in range(40)), 0.99, 0.995, 1.0)


def service_seconds(prompt_tokens: int, output_tokens: int) -> float:
    """How long a request is in flight when it is alone."""
    return prompt_tokens / PREFILL_TOKENS_PER_SECOND + output_tokens * DECODE_SECONDS_PER_TOKEN


def draw_service(random: Random, mean: float | None = None) -> float:
    """Seconds in flight of one request, distributed as in Azure's conversations; ``mean`` stretches them."""
    share = random.random()
    place = bisect_right(_SHARES, share) - 1
    low, high = _SHARES[place], _SHARES[place + 1]
    seconds = SERVICE_QUANTILES[place]
    seconds += (share - low) / (high - low) * (SERVICE_QUANTILES[place + 1] - seconds)
    return seconds if mean is None else seconds * mean / SERVICE_MEAN


SERVICE_MEAN = sum(
    (high - low) * (first + second) / 2
    for (low, high), (first, second) in zip(pairwise(_SHARES), pairwise(SERVICE_QUANTILES), strict=True)
)
"""Of ``draw_service``, seconds."""


def zipf(count: int, exponent: float = 1.0) -> tuple[float, ...]:
    """Shares of ``count`` seats, the first the largest; exponent 0: equal."""
    weights = [1.0 / (rank + 1) ** exponent for rank in range(count)]
    return tuple(weight / sum(weights) for weight in weights)


def poisson(rate: float, duration: float, random: Random) -> Iterator[float]:
    """Independent arrivals."""
    at = random.expovariate(rate)
    while at < duration:
        yield at
        at += random.expovariate(rate)


def mmpp(rate: float, duration: float, random: Random, *, on: float = 60.0, off: float = 300.0) -> Iterator[float]:
    """Bursts: silent for ``off`` seconds in the mean, Poisson for ``on``, both exponential; ``rate`` over all."""
    burst_rate = rate * (on + off) / on
    at, bursting = 0.0, random.random() < on / (on + off)
    while at < duration:
        until = at + random.expovariate(1.0 / (on if bursting else off))
        if bursting:
            for offset in poisson(burst_rate, min(until, duration) - at, random):
                yield at + offset
        at, bursting = until, not bursting


class ServeGenTenant(NamedTuple):
    """How one client of a hosted service sends, in windows of ten minutes."""

    source: str
    share: float
    """Of all requests."""
    present: float
    """Share of windows in which it sends anything."""
    stays: float
    """Probability that it sends in the next window, having sent in this one."""
    spread: float
    """Standard deviation of the logarithm of its windows' rates."""
    memory: float
    """Correlation of that logarithm from one window to the next."""
    shape: float
    """Of the Gamma distribution of its gaps within a window."""


SERVEGEN_TENANTS: tuple[ServeGenTenant, ...] = (
    ServeGenTenant("m-large/49", 0.275, 0.74, 0.84, 1.68, 0.0, 0.368),
    ServeGenTenant("m-small/40", 0.148, 0.20, 0.38, 1.82, 0.9, 1.044),
    ServeGenTenant("m-mid/46", 0.143, 0.40, 0.68, 1.33, 0.44, 0.233),
    ServeGenTenant("m-large/136", 0.099, 0.36, 0.94, 1.42, 0.82, 1.006),
    ServeGenTenant("deepseek-r1/53", 0.099, 0.59, 0.97, 0.78, 0.60, 0.624),
    ServeGenTenant("m-small/2", 0.075, 0.74, 0.98, 0.86, 0.65, 0.842),
    ServeGenTenant("deepseek-r1/63", 0.053, 0.33, 0.97, 0.47, 0.63, 1.642),
    ServeGenTenant("m-large/4", 0.044, 0.68, 0.98, 0.81, 0.25, 0.659),
    ServeGenTenant("mm-image/20", 0.032, 0.08, 0.58, 1.66, 0.75, 1.071),
    ServeGenTenant("m-mid/64", 0.031, 0.72, 0.96, 0.64, 0.35, 1.111),
)
"""Ten intermittent clients of Alibaba ServeGen (github.com/alibaba/ServeGen, Apache-2.0; Xiang et al., "ServeGen:
Workload Characterization and Generation of Large Language Model Serving in Production"). ``shape`` is the median of
the published Gamma shapes of the client's windows, weighted by rate; the other figures were counted by us over one day
of these clients' windows, scaled to 0.317 requests per second in total."""

SERVEGEN_RATE = 0.317


def tenant(one: ServeGenTenant, rate: float, duration: float, random: Random) -> Iterator[float]:
    """Arrivals of a client like this: present or not, louder or quieter per window, bursty within.

    ``rate`` is its mean over a long time; a single day may be far from it, as with the real ones.
    """
    comes = (1.0 - one.stays) * one.present / (1.0 - one.present) if one.present < 1 else 1.0
    there = random.random() < one.present
    level, kept = random.gauss(0.0, 1.0), min(0.95, max(0.0, one.memory))
    needed, start = unit_gap("Gamma", one.shape, random), 0.0
    while start < duration:
        if there:
            here = rate / one.present * math.exp(one.spread * level - one.spread**2 / 2)
            done, width = 0.0, min(WINDOW_SECONDS, duration - start)
            while needed <= (width - done) * here:
                done += needed / here
                yield start + done
                needed = unit_gap("Gamma", one.shape, random)
            needed -= (width - done) * here
        there = random.random() < (one.stays if there else comes)
        level = kept * level + math.sqrt(1.0 - kept * kept) * random.gauss(0.0, 1.0)
        start += WINDOW_SECONDS


def together(streams: Sequence[Iterator[float]]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """All seats' arrivals in order: times and seat indices."""

    def tagged(index: int, stream: Iterator[float]) -> Iterator[tuple[float, int]]:
        return ((at, index) for at in stream)

    rows = list(merge(*(tagged(index, stream) for index, stream in enumerate(streams))))
    return tuple(at for at, _ in rows), tuple(index for _, index in rows)
