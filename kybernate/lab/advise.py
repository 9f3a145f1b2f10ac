"""Which way to share GPUs fits a workload, why, what may go wrong, and what a fleet of them costs. Pure.

All knowledge is data (``advise.yaml``): rules with conditions, points, reasons and sources. Sums of points decide;
an excluded strategy is not possible. Memory in GB of 1e9 bytes.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field

from kybernate.annotations import PREFIX, parse
from kybernate.config.model import TIERS
from kybernate.config_errors import Strict
from kybernate.lab.simulate.node import GB, HARDWARE, Cost
from kybernate.onboard import OnboardError, engine_of, gpus_of

T = TypeVar("T")

DEFAULT_WAIT_SECONDS = 20.0
"""How long requests may wait for an activation where it is not given and no latency is promised: the default SLO."""
_SENSITIVE_MS = 1000.0
"""A promised p99 below this is sensitive to latency."""
_TWO_REPLICAS = 99.99
"""Percent that one replica cannot promise: guide 4.3."""
MEMORY_SHARE = 0.85
"""Of a shared GPU's memory that is planned for: the guide's alert threshold."""
MOST_REPLICAS, MOST_GPUS = 1000, 1024
"""Of one workload; each replica is placed by itself."""
_PARKED = ("seats", "packed")
"""Strategies whose models are parked in host memory."""
_COMPARED = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class Workload(Strict):
    """What is known of one workload; None: not known."""

    name: str
    kind: Literal["inference", "training", "development", "simulation"]
    tier: Literal["realtime", "batch", "development"] | None = None
    """Service class."""
    gpus: Annotated[int, Field(ge=0, le=MOST_GPUS)] = 1
    """That one replica uses at the same time; 0: it runs on CPUs."""
    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = 1
    vram_gb: Positive | None = None
    """On each of its GPUs."""
    busy: Share | None = None
    """Share of the time with at least one request, or with work."""
    latency_p99_ms: Positive | None = None
    """Promised."""
    max_wait_seconds: Annotated[float, Field(ge=0)] | None = None
    """How long a request may wait for its model to be activated."""
    availability: Annotated[float, Field(gt=0, le=100)] | None = None
    """Promised, in percent."""
    requests_per_minute: Positive | None = None
    """Promised throughput."""
    isolation: Literal["none", "memory", "fault", "tenant"] = "none"
    """From other workloads of the GPU."""
    tenants: Annotated[int, Field(ge=1)] = 1
    pattern: Literal["steady", "periodic", "variable"] | None = None
    parkable: bool = True
    """Its engine can be parked."""
    adapter_of: str = ""
    """The base model whose LoRA adapter it is; empty: it is no adapter."""

    @property
    def spread(self) -> bool:
        """Its replicas must not share a GPU: each keeps the promise alone."""
        return self.needed > 1 and self.availability is not None

    @property
    def needed(self) -> int:
        """Replicas: those that are stated, and two where the availability asks for them."""
        return max(self.replicas, 2 if (self.availability or 0) >= _TWO_REPLICAS else 1)


class Costs(Strict):
    """Of one GPU, any currency; what is left out is as in the rules."""

    hardware_price: Annotated[float, Field(ge=0)]
    years: Positive
    price_per_kwh: Annotated[float, Field(ge=0)]
    operations_share: Share
    host_memory_price_per_gb: Annotated[float, Field(ge=0)]
    cloud_price_per_hour: Annotated[float, Field(ge=0)]


class Description(Strict):
    """A file of ``kyb advise``; its workloads are validated one by one, with what a manifest states."""

    gpu: str = ""
    costs: dict[str, Any] = Field(default_factory=dict)
    workloads: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]


class GpuKind(Strict):
    """One product."""

    memory: Positive
    watts: Positive
    mig: tuple[tuple[float, int], ...]
    """(GB of a slice, its sevenths of the compute), smallest first; empty: it has no MIG."""
    source: str

    def slices(self, vram_gb: float) -> int:
        """How many slices that hold so much fit on it; 0: none holds it."""
        found = self.slice_for(vram_gb)
        return 0 if found is None else min(SEVENTHS // found[0], EIGHTHS // found[1])

    def slice_for(self, vram_gb: float, busy: float = 0.0, target: float = 1.0) -> tuple[int, int] | None:
        """(Sevenths of the compute, eighths of the memory) of the smallest slice that holds so much and whose share of
        the compute is used to at most ``target`` by work that keeps a whole GPU busy for ``busy`` of the time."""
        held = ((sevenths, size) for size, sevenths in self.mig if size >= vram_gb)
        fits = (one for one in held if busy <= target * one[0] / SEVENTHS + 1e-9)
        found = next(fits, None)
        return None if found is None else (found[0], round(found[1] / self.memory * EIGHTHS))


SEVENTHS, EIGHTHS = 7, 8
"""Into which MIG cuts the compute and the memory of a GPU."""


class Strategy(Strict):
    """One way to give GPUs to workloads."""

    meaning: str
    slowdown: float
    """Share by which work takes longer when others share the GPU."""
    target: Share
    """Utilisation that is planned for."""
    most: int = 1
    """Workloads of one GPU."""
    source: str


class Rule(Strict):
    """For and against, when all conditions hold."""

    id: str
    when: dict[str, Any]
    prefer: dict[str, int] = Field(default_factory=dict)
    avoid: dict[str, int] = Field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    because: str
    source: str


class Contradiction(Strict):
    """Statements that do not go together."""

    when: dict[str, Any]
    says: str


class Need(Strict):
    """What some strategies ask of the cluster."""

    of: tuple[str, ...]
    when: dict[str, Any]
    says: str


class Risk(Strict):
    """What may go wrong with some strategies."""

    of: tuple[str, ...]
    risk: str
    impact: str
    probability: Literal["low", "medium", "high"]
    mitigation: str
    source: str


class Knowledge(Strict):
    """The rules file."""

    strategies: dict[str, Strategy]
    gpus: dict[str, GpuKind]
    costs: Costs
    rules: tuple[Rule, ...]
    contradictions: tuple[Contradiction, ...]
    needs: tuple[Need, ...]
    risks: tuple[Risk, ...]


@cache
def knowledge() -> Knowledge:
    """The shipped rules."""
    text = files("kybernate.lab").joinpath("advise.yaml").read_text("utf-8")
    return Knowledge.model_validate(yaml.safe_load(text), strict=False)


WORKLOAD_KINDS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CronJob", "Pod")
"""Manifests that state a workload; others (Service, ConfigMap) may lie in the same file."""


def stated(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a Deployment, StatefulSet, Job or Pod states about its workload, as keys of ``Workload``."""
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec") or {}
    spec = (spec.get("jobTemplate") or {}).get("spec") or spec
    pod = spec.get("template") or manifest
    containers = (pod.get("spec") or {}).get("containers") or ()
    name = str(metadata.get("name", ""))
    annotations = parse((pod.get("metadata") or {}).get("annotations") or {})
    gpus = max([1, *(_asked(one) for one in containers)])
    found: dict[str, Any] = {"name": name, "gpus": gpus}
    if replicas := spec.get("replicas"):
        found["replicas"] = replicas
    try:
        engine_of(name, containers)
        found["kind"] = "inference"
    except OnboardError:
        if manifest.get("kind") in ("Job", "CronJob"):
            found["kind"] = "training"
    if annotations.vram_bytes:
        found["vramGb"] = annotations.vram_bytes / gpus / GB
    if found.get("kind") == "inference":
        tier = TIERS.get(annotations.tier)
        found["maxWaitSeconds"] = annotations.slo_seconds or (tier.slo_seconds if tier else DEFAULT_WAIT_SECONDS)
    return found


def _asked(container: Mapping[str, Any]) -> int:
    """GPUs of a container, whole ones or those of its seat (``kyb.ai/gpu-2x-seat``)."""
    names = ((container.get("resources") or {}).get("limits") or {}).keys()
    seats = [name.removeprefix(f"{PREFIX}gpu-").partition("x-")[0] for name in names if name.startswith(PREFIX)]
    return max([gpus_of(container), *(int(count) for count in seats if count.isdigit())])


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule that held."""

    rule: str
    effect: str
    """``for mig``, ``against seats``, ``not mps``: comma-separated."""
    text: str
    source: str
    decisive: bool = False
    """It has most points for the chosen strategy; where none is possible, it excludes most."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer for one workload."""

    workload: str
    strategy: str
    """Empty: none is possible."""
    points: dict[str, int]
    """Of each strategy that is possible."""
    reasons: tuple[Reason, ...]
    contradictions: tuple[str, ...]
    risks: tuple[str, ...]
    unknown: tuple[str, ...]
    """Facts that were not given and that a rule asks for."""
    needs: tuple[str, ...] = ()
    """What the strategy asks of the cluster."""

    @property
    def because(self) -> str:
        """The strongest reason for the strategy."""
        return next((reason.text for reason in self.reasons if reason.decisive), "")


def facts(workload: Workload, gpu: str, cost: Cost = HARDWARE["stock"], *, parking_pays: bool = True) -> dict[str, Any]:
    """What rules may ask: the statements of a description and what follows from them and from what a switch costs;
    None: not known."""
    kind, vram = knowledge().gpus[gpu], workload.vram_gb
    known = workload.model_dump(by_alias=True)
    promised = None if workload.latency_p99_ms is None else workload.latency_p99_ms < _SENSITIVE_MS
    sensitive = workload.kind == "inference" and (workload.tier == "realtime" or promised is True)
    wait = workload.max_wait_seconds
    if wait is None and workload.kind == "inference":
        wait = 0.0 if sensitive else DEFAULT_WAIT_SECONDS
    size, promise = int((vram or 0.0) * GB), workload.latency_p99_ms
    seconds = None if vram is None else cost.park_seconds(size) + cost.activate_seconds(size)
    covers = None if wait is None or seconds is None else wait >= seconds
    kept = None if promise is None or seconds is None else promise / 1000 >= seconds
    return known | {
        "gpu": f"{gpu} ({kind.memory:g} GB)",
        "latencySensitive": sensitive,
        "maxWaitSeconds": wait,
        "activationSeconds": seconds,
        "waitCoversActivation": covers,
        "p99CoversActivation": kept,
        "backInTime": workload.parkable and covers is not False and kept is not False,
        "parkingPays": parking_pays,
        "cpuOnly": workload.gpus == 0,
        "hasBase": bool(workload.adapter_of),
        "spread": workload.spread,
        "needed": workload.needed,
        "vramShare": None if vram is None else vram / kind.memory,
        "fitsMig": False if not kind.mig else None if vram is None else _slice(workload, kind) is not None,
    }


def _slice(workload: Workload, kind: GpuKind) -> tuple[int, int] | None:
    return kind.slice_for(workload.vram_gb or 0.0, workload.busy or 0.0, knowledge().strategies["mig"].target)


def holds(when: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """True when every condition holds; a fact that is not known makes none hold."""
    return all(known[name] is not None and _holds(wanted, known[name]) for name, wanted in when.items())


def _holds(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, list):  # values, or bounds that hold together
        return all(_holds(one, value) for one in wanted) if _comparison(wanted[0]) else value in wanted
    compared = _comparison(wanted)
    if compared is None:
        return bool(value == wanted)
    sign, bound = compared
    return bool(_COMPARED[sign](value, float(bound)))


def _comparison(wanted: Any) -> tuple[str, str] | None:
    sign, _, bound = str(wanted).partition(" ")
    return (sign, bound) if sign in _COMPARED else None


def advise(workload: Workload, gpu: str, cost: Cost = HARDWARE["stock"], *, parking_pays: bool = True) -> Advice:
    """The strategy with most points of those that are possible; of equal ones that which needs fewer GPUs."""
    rules, known = knowledge(), facts(workload, gpu, cost, parking_pays=parking_pays)
    held = [rule for rule in rules.rules if holds(rule.when, known)]
    excluded = {name for rule in held for name in rule.exclude}
    points = {
        name: sum(rule.prefer.get(name, 0) - rule.avoid.get(name, 0) for rule in held)
        for name in rules.strategies
        if name not in excluded
    }
    order = list(rules.strategies)
    best = max(points, key=lambda name: (points[name], order.index(name)), default="")
    named = [one.says.format_map(known) for one in rules.contradictions if holds(one.when, known)]
    risks = [
        f"{one.risk}: {one.impact.format_map(known)} ({one.probability}); {one.mitigation}"
        for one in rules.risks
        if best in one.of and _sayable(one.impact, known)
    ]
    first = max(held, key=lambda rule: rule.prefer.get(best, 0) if best else len(rule.exclude))
    reasons = tuple(
        Reason(rule.id, _effect(rule), rule.because.format_map(known), rule.source, rule is first) for rule in held
    )
    needs = tuple(
        one.says.format_map(known)
        for one in rules.needs
        if best in one.of and holds(one.when, known) and _sayable(one.says, known)
    )
    named += _disputes(held, best)
    return Advice(workload.name, best, points, reasons, tuple(named), tuple(risks), _unknown(known), needs)


def _effect(rule: Rule) -> str:
    parts = [f"for {name}" for name in rule.prefer] + [f"against {name}" for name in rule.avoid]
    return ", ".join(parts + [f"not {name}" for name in rule.exclude])


def _disputes(held: Sequence[Rule], best: str) -> list[str]:
    """Where a source recommends only strategies that another one outweighs or excludes; one point is a hint."""
    advised = {rule.id: [name for name, points in rule.prefer.items() if points > 1] for rule in held}
    return [
        f"{rule.source} says {' or '.join(advised[rule.id])} ({rule.id}); {_stronger(held, rule, best)}"
        for rule in held
        if best and advised[rule.id] and best not in rule.prefer
    ]


def _stronger(held: Sequence[Rule], rule: Rule, best: str) -> str:
    barred = [one for one in held if set(one.exclude) >= {name for name, points in rule.prefer.items() if points > 1}]
    if barred:
        return f"not possible: {barred[0].id} ({barred[0].source})"
    winner = max(held, key=lambda one: one.prefer.get(best, 0))
    return f"{winner.id} ({winner.source}) outweighs it"


def _sayable(text: str, known: Mapping[str, Any]) -> bool:
    return not any(value is None and f"{{{name}" in text for name, value in known.items())


def _unknown(known: Mapping[str, Any]) -> tuple[str, ...]:
    asked = set() if known["cpuOnly"] else {"vramGb"} | ({"busy"} if known["kind"] == "inference" else set())
    return tuple(sorted(name for name in asked if known[name] is None))


@dataclass(frozen=True, slots=True)
class FleetCost:
    """A fleet on so many GPUs; money a year."""

    gpus: int
    utilisation: float | None
    """Busy GPUs of all; None where ``busy`` of a workload is not known."""
    hardware: float
    power: float
    operations: float
    host_memory: float
    cloud: float
    unused: float | None
    """What of the total pays for idle GPUs. It is part of the total, not added to it."""

    @property
    def total(self) -> float:
        """A year."""
        return self.hardware + self.power + self.operations + self.host_memory + self.cloud


def fleet_gpus(chosen: Sequence[tuple[Workload, str]], gpu: str) -> dict[str, int]:
    """GPUs by strategy. Shared ones are filled by memory, by utilisation and by number of workloads; seats by how busy
    they are, an estimate (``kyb plan`` plays a trace). Replicas that must not share a GPU do not."""
    found: dict[str, int] = {}
    for name in knowledge().strategies:
        own = [one for one, strategy in chosen if strategy == name for _ in range(one.needed)]
        if name == "adapters" and own:
            found[name] = _adapter_gpus(own, [one for one, strategy in chosen if strategy != name])
        elif own:
            found[name] = _gpus(name, own, gpu)
    return found


def _adapter_gpus(own: Sequence[Workload], others: Sequence[Workload]) -> int:
    """GPUs of the engines of their bases; a base that is a workload of the fleet has separate engines, which serve
    its adapters too and are counted there."""
    strategy, found = knowledge().strategies["adapters"], 0
    for base, gpus in sorted({(one.adapter_of, one.gpus) for one in own}):
        engines = [one for one in others if one.name == base for _ in range(one.needed)]
        served = [*engines, *(one for one in own if (one.adapter_of, one.gpus) == (base, gpus))]
        found += gpus * max(0, _seat_groups(served, strategy) - len(engines))
    return found


def _gpus(name: str, own: Sequence[Workload], gpu: str) -> int:
    kind, strategy = knowledge().gpus[gpu], knowledge().strategies[name]
    if name in ("dedicated", "cpu"):
        return sum(one.gpus for one in own)
    if name in _PARKED:
        sizes = sorted({one.gpus for one in own})
        return sum(size * _seat_groups([one for one in own if one.gpus == size], strategy) for size in sizes)
    sized: list[tuple[float, float, Workload]]
    if name == "mig":
        sized = [(*(_slice(one, kind) or (SEVENTHS, EIGHTHS)), one) for one in own]
        limits = (float(SEVENTHS), float(EIGHTHS), SEVENTHS)
    else:
        slower = 1 + strategy.slowdown
        sized = [(one.vram_gb or 0.0, (one.busy or 0.0) * slower, one) for one in own]
        limits = (MEMORY_SHARE * kind.memory, strategy.target, strategy.most)

    def fits(held: Sequence[tuple[float, float, Workload]]) -> bool:
        first, second = sum(one[0] for one in held), sum(one[1] for one in held)
        names = [one.name for _, _, one in held if one.spread]
        full = first > limits[0] or second > limits[1] + 1e-9 or len(held) > limits[2]
        return not full and len(names) == len(set(names))

    return len(first_fit(sorted(sized, key=lambda one: (-one[0], -one[1], one[2].name)), fits))


def _seat_groups(own: Sequence[Workload], strategy: Strategy) -> int:
    """So many groups, or engines of one base; replicas that must not share one do not."""
    busy = sum(one.busy or 0.0 for one in own) * (1 + strategy.slowdown)
    apart = Counter(one.name for one in own if one.spread)
    return min(len(own), max(1, ceil(round(busy / strategy.target, 9)), *apart.values()))


def first_fit(items: Iterable[T], fits: Callable[[Sequence[T]], bool]) -> list[list[T]]:
    """Put each item into the first bin that still fits with it, else into a new one."""
    bins: list[list[T]] = []
    for item in items:
        held = next((held for held in bins if fits([*held, item])), None)
        if held is None:
            bins.append([item])
        else:
            held.append(item)
    return bins


def whole_gpus(chosen: Sequence[tuple[Workload, str]]) -> list[tuple[Workload, str]]:
    """The same workloads on GPUs of their own. Adapters stay in the engine of their base: none needs a GPU."""
    return [(one, name if name == "adapters" else "dedicated") for one, name in chosen]


def fleet_cost(chosen: Sequence[tuple[Workload, str]], gpu: str, costs: Costs) -> FleetCost:
    """What these workloads with these strategies need and cost a year."""
    count = sum(fleet_gpus(chosen, gpu).values())
    parked = sum((one.vram_gb or 0.0) * one.gpus * one.needed for one, name in chosen if name in _PARKED)
    rented = costs.cloud_price_per_hour > 0
    hardware = 0.0 if rented else count * costs.hardware_price / costs.years
    power = 0.0 if rented else count * knowledge().gpus[gpu].watts / 1000 * 8760 * costs.price_per_kwh
    operations = 0.0 if rented else count * costs.hardware_price * costs.operations_share
    cloud = count * 8760 * costs.cloud_price_per_hour
    known = all(one.busy is not None for one, _ in chosen)
    work = sum((one.busy or 0.0) * one.gpus * one.needed for one, _ in chosen)
    used = min(1.0, work / count) if known and count else None
    return FleetCost(
        gpus=count,
        utilisation=used,
        hardware=hardware,
        power=power,
        operations=operations,
        host_memory=parked * costs.host_memory_price_per_gb / costs.years,
        cloud=cloud,
        unused=None if used is None else (1 - used) * (hardware + operations + cloud),
    )


def advise_fleet(workloads: Sequence[Workload], gpu: str, costs: Costs, cost: Cost = HARDWARE["stock"]) -> list[Advice]:
    """Advice for each; those whose seats would together cost no less than whole GPUs are advised without parking."""
    found = [advise(one, gpu, cost) for one in workloads]
    sharers: dict[tuple[str, int], list[Workload]] = {}
    for one, advice in zip(workloads, found, strict=True):
        if advice.strategy in _PARKED:
            sharers.setdefault((advice.strategy, one.gpus), []).append(one)

    def pays(strategy: str, gpus: int) -> bool:
        own = sharers.get((strategy, gpus), ())
        parked, whole = (fleet_cost([(one, name) for one in own], gpu, costs) for name in (strategy, "dedicated"))
        return not own or parked.total < whole.total

    return [
        advice if pays(advice.strategy, one.gpus) else advise(one, gpu, cost, parking_pays=False)
        for one, advice in zip(workloads, found, strict=True)
    ]
