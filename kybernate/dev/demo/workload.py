"""The shipped workload, and which seats a replayed trace gets.

The workload is generated, from published arrival statistics of real tenants.

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

A replayed trace gets one seat per model, the heaviest first, on the least loaded group. Groups fill in order (the
plugin's first-fit placement): all groups but the last have the same number of seats, and the pods are written group
by group, so that the plugin forms the groups that were planned here.
"""

import heapq
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

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


VRAM_GIB = 48
"""Of each model on each GPU; no two fit on one GPU of the stack."""
MOST_MODELS = 32
"""Each model is an engine process; more than this is no demo any more."""


class LayoutError(Exception):
    """The trace cannot be given seats; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class TraceLayout:
    """Models by group; every group but the last has ``seats_per_group`` of them."""

    groups: tuple[tuple[str, ...], ...]
    seats_per_group: int
    size: int = 1
    """GPUs of each group."""
    instances: tuple[str, ...] = ()
    """UUIDs of the MIG instances that the groups are; empty: whole GPUs."""

    @property
    def resource(self) -> str:
        """Of all its seats."""
        return f"kyb.ai/gpu-{self.size}x-seat"

    @property
    def models(self) -> tuple[str, ...]:
        """All models, in the order of their seats."""
        return tuple(model for group in self.groups for model in group)


def plan(weights: Mapping[str, float], gpus: int) -> TraceLayout:
    """Place models by weight (any unit of load) on groups of one GPU each. Raises LayoutError."""
    if not weights:
        raise LayoutError("the trace has no request in the asked time; change --start or --duration")
    if len(weights) > MOST_MODELS:
        raise LayoutError(
            f"the trace has {len(weights)} models and the demo plays at most {MOST_MODELS}; "
            "take a shorter part with --start and --duration, or play several as one with --map MODEL=ONE"
        )
    seats = -(-len(weights) // gpus)
    full, rest = divmod(len(weights), seats)
    free = [seats] * full + [rest] * bool(rest)
    groups: list[list[str]] = [[] for _ in free]
    loads = [(0.0, index) for index in range(len(free))]
    for model in sorted(weights, key=lambda name: (-weights[name], name)):
        load, index = heapq.heappop(loads)
        groups[index].append(model)
        if len(groups[index]) < free[index]:
            heapq.heappush(loads, (load + weights[model], index))
    return TraceLayout(tuple(tuple(group) for group in groups), seats)


def config_yaml(layout: TraceLayout, *, packed: bool = False, policy: str = "") -> str:
    """The node configuration of this layout: groups G0, G1, … or G01, G23, …; one active slot each, or packed by
    memory."""
    size = layout.size
    profile: dict[str, Any] = {
        "name": f"{size}x",
        "resource": layout.resource,
        "groupSize": size,
        "seatsPerGroup": layout.seats_per_group,
    }
    members = [range(first, first + size) for first in range(0, size * len(layout.groups), size)]
    gpus = [[uuid] for uuid in layout.instances] or [[*one] for one in members]
    names = [f"G{''.join(map(str, one))}" for one in members]
    document: dict[str, Any] = {
        "profiles": [profile | ({"packing": "memory"} if packed else {})],
        "gpuTopology": {"groups": [{"name": name, "gpus": own} for name, own in zip(names, gpus, strict=True)]},
    }
    if layout.instances:
        document["migStrategy"] = "single"
        document["profiles"][0]["rebalance"] = True
    if policy:
        document["policy"] = {"name": policy}
    return yaml.safe_dump(document, sort_keys=False)


def pods_yaml(
    layout: TraceLayout,
    driver: Literal["fake", "stub"] = "fake",
    vram: Mapping[str, str] = MappingProxyType({}),
    front: Sequence[str] = (),
) -> str:
    """One pod per model, in the order of the seats, for a stack with this driver. ``vram``: of models, where it is not
    ``VRAM_GIB`` on each GPU. ``front``: begins the command of each."""
    names, usual = _pod_names(layout.models), f"{VRAM_GIB * layout.size}GiB"
    pods = [_pod(names[model], model, driver, vram.get(model, usual), layout.resource) for model in layout.models]
    for pod in pods:
        container = pod["spec"]["containers"][0]
        container["command"] = [*front, *container["command"]]
    return yaml.safe_dump_all(pods, sort_keys=False)


def _pod(name: str, model: str, driver: str, vram: str, resource: str) -> dict[str, Any]:
    command = ["python", "-m", "kybernate.dev.fakes.engine", "--model", model, "--vram", vram]
    command += ["--cuda"] if driver == "stub" else []
    backend = "cuda" if driver == "stub" else "fake"
    annotations = {"kyb.ai/model": model, "kyb.ai/vram": vram, "kyb.ai/backend": backend}
    container = {"name": "engine", "image": "fake", "command": command, "resources": {"limits": {resource: 1}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "demo", "annotations": annotations},
        "spec": {"containers": [container]},
    }


def _pod_names(models: Sequence[str]) -> dict[str, str]:
    """Kubernetes names for models: small letters, digits and dashes, unique."""
    names: dict[str, str] = {}
    for model in models:
        plain = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:50] or "model"
        name, number = plain, 1
        while name in names.values():
            number += 1
            name = f"{plain}-{number}"
        names[model] = name
    return names
