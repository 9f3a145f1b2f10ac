"""The workload that ships with Kybernate: generated, from published arrival statistics of real tenants.

Source of the figures: Alibaba ServeGen (github.com/alibaba/ServeGen, Apache-2.0; Xiang et al., "ServeGen: Workload
Characterization and Generation of Large Language Model Serving in Production"), the per-client windows in
``data/*/*/chunk-*-trace.csv``: for each 10 minutes of a client its request rate, the CV of the gaps between requests
and a fitted Gamma or Weibull distribution of these gaps. Per tenant we carry over two figures, computed so:

* ``rate``: mean of the rates of all windows in which the client sent anything, requests per second;
* ``shape``: median of the Gamma shapes of the windows fitted by Gamma, weighted by their rates.

Token lengths: quantiles of Azure's 2023 conversation trace (``kybernate/lab/traces/windows.py`` names the source).

What is made of them: gaps are drawn from the tenant's Gamma shape and stretched so that its requests fill the
duration; the numbers of requests go by the square root of the rates, since seven equally small seats are more of a
test for a scheduler than one large and six idle ones. So the shape of a tenant's gaps is the published one; the total
rate and the balance between tenants are chosen.
"""

import heapq
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from kybernate.lab.traces import Arrival, Trace
from kybernate.lab.traces.windows import OUTPUT_QUANTILES, PROMPT_QUANTILES, length, unit_gap

REQUESTS = 2100
DURATION_SECONDS = 1800.0
"""Model seconds. At the default speed this takes 75 s."""

MAX_OUTPUT_TOKENS = 256
"""Longer answers are cut here: a decode of minutes shows nothing about switching."""


class Tenant(NamedTuple):
    """One ServeGen client: which one, and its two figures."""

    source: str
    rate: float
    shape: float


TENANTS: tuple[Tenant, ...] = (
    Tenant("m-large/49", 0.4741, 0.3679),
    Tenant("m-mid/46", 0.2495, 0.2332),
    Tenant("m-small/2", 0.8744, 0.8422),
    Tenant("deepseek-r1/53", 0.2342, 0.6237),
    Tenant("m-large/4", 0.5074, 0.6593),
    Tenant("mm-image/20", 0.5425, 1.071),
    Tenant("deepseek-r1/63", 0.2170, 1.642),
)


def generate(
    models: Sequence[str], *, seed: int, requests: int = REQUESTS, duration: float = DURATION_SECONDS
) -> Trace:
    """The workload over these models: the i-th model plays the i-th tenant (again from the first after the last).

    Exactly ``requests`` arrivals within ``duration`` model seconds, the same for the same arguments everywhere.
    """
    if not models:
        raise ValueError("a workload needs at least one model")
    played = [(model, TENANTS[index % len(TENANTS)]) for index, model in enumerate(models)]
    counts = _shares([math.sqrt(tenant.rate) for _, tenant in played], requests)
    streams = [
        _tenant(model, tenant, count, duration, random.Random(f"{seed}/{index}/{model}"))
        for index, ((model, tenant), count) in enumerate(zip(played, counts, strict=True))
    ]
    arrivals = tuple(heapq.merge(*streams))
    return Trace("workload", "generated", lambda: iter(arrivals))


def _tenant(model: str, tenant: Tenant, count: int, duration: float, random_: random.Random) -> list[Arrival]:
    """``count`` arrivals whose gaps have the tenant's shape; one gap more than arrivals, so that none is at the end."""
    gaps = [unit_gap("Gamma", tenant.shape, random_) for _ in range(count + 1)]
    stretch = duration / sum(gaps)
    arrivals: list[Arrival] = []
    at = 0.0
    for gap in gaps[:-1]:
        at += gap * stretch
        output = min(MAX_OUTPUT_TOKENS, length(OUTPUT_QUANTILES, random_))
        arrivals.append(Arrival(at, model, length(PROMPT_QUANTILES, random_), output))
    return arrivals


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Split ``total`` by weight; what rounding leaves over goes to the first ones."""
    shares = [int(total * weight / sum(weights)) for weight in weights]
    for index in range(total - sum(shares)):
        shares[index % len(shares)] += 1
    return shares
