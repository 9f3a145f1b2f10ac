"""What each placement strategy makes of the same streams of pods, on 64 simulated nodes of 8 GPUs.

Deployments come and go (Poisson arrivals, exponential life, 1 to 6 replicas of 1, 2 or 4 GPUs each); every replica
takes a seat and keeps it. Two ways to a node: *node by scheduler*, where Kubernetes' scheduler has chosen the least
loaded node and the strategy chooses the group in it, which is what the plugin decides; *whole pool*, where the
strategy ranks the groups of all nodes, as with a scheduler that scores the same way. The strategies see the same
streams; intervals are bootstrapped over the seeds.
"""

import itertools
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush

from rich.console import Console
from rich.table import Table

from kybernate.config import NodeConfig
from kybernate.config.fields import PLACEMENTS
from kybernate.dev.fakes.gpu.spec import PRESETS, Preset, build
from kybernate.topology import Group, plan
from services.plugin.core.placement import GroupLoad, GroupRelations, best

NODES = 64
SEEDS = 10
ARRIVALS = 1_500
"""Replicas per stream; the first third fills the pool and is not counted."""
SEATS_PER_GROUP = 3
SIZES = ((1, 0.6), (2, 0.25), (4, 0.15))
REPLICAS = (1, 1, 1, 2, 2, 3, 4, 6)
LOADS = (0.5, 1.0)
"""GPUs that all seats together would like to have, per GPU of the pool; above 1 seats share whatever one does."""
RESAMPLES = 2_000

RULES = {
    "first-fit": ("40-60%", "high", "<1 ms"),
    "best-fit": ("70-85%", "medium", "1-5 ms"),
    "worst-fit": ("30-50%", "low", "1-5 ms"),
    "bin-pack": ("85-95%", "very low", "10-50 ms"),
    "spread": ("50-70%", "medium", "5-10 ms"),
    "topology-aware": ("60-80%", "low", "10-30 ms"),
}
"""The rule of thumb of the customer's guide to GPU scheduling: utilisation, fragmentation, time to schedule."""

METRICS = {
    "utilisation": "% GPUs with an allocated seat, of all GPUs of nodes with an allocated seat",
    "nodes": "nodes that have a seat, of 64",
    "at_once": "% replicas that were placed on GPUs without an allocated seat (the others take turns)",
    "at_once_4": "% the same, of replicas of four GPUs",
    "fragmentation": "% free GPUs that are in no free group of four",
    "worst_node": "% of a deployment of several replicas that one node takes with it, at worst",
    "nvlink": "% seats of pairs that are on NVLink pairs (half of the pairs are)",
    "decide_us": "microseconds per decision",
}


@dataclass(frozen=True, slots=True)
class Replica:
    """One pod."""

    number: int
    deployment: int
    size: int
    comes: float
    goes: float


def stream(seed: int, load: float) -> list[Replica]:
    """The same for every strategy."""
    chance = random.Random(seed)
    mean_size = sum(size * share for size, share in SIZES)
    rate = load * NODES * 8 / (mean_size * statistics.mean(REPLICAS))  # deployments per mean life
    found: list[Replica] = []
    now = 0.0
    for deployment in itertools.count():
        now += chance.expovariate(rate)
        size = chance.choices([size for size, _ in SIZES], [share for _, share in SIZES])[0]
        life = chance.expovariate(1.0)
        for _ in range(chance.choice(REPLICAS)):
            found.append(Replica(len(found), deployment, size, now, now + life))
        if len(found) >= ARRIVALS:
            return found[:ARRIVALS]
    raise AssertionError("unreachable")


@dataclass
class Model:
    """One kind of node: its groups and how they lie to each other, by index."""

    groups: tuple[Group, ...]
    overlapping: tuple[tuple[int, ...], ...]
    nearby: tuple[tuple[int, ...], ...]
    distance: tuple[tuple[int, ...], ...]
    numa_nodes: tuple[int, ...]
    of_size: dict[int, tuple[int, ...]]
    gpus: tuple[frozenset[int], ...]

    @classmethod
    def make(cls) -> "Model":
        """Two sockets with four GPUs each, PCIe only but for one NVLink bridge per socket; groups 4 > 2 > 1."""
        plain = PRESETS["8xL40S"]
        hardware = build(Preset(plain.name, plain.memory_bytes, plain.places, "nvlink:0-1,4-5", 4))
        profiles = [
            {"name": f"{n}x", "resource": f"kyb.ai/{n}x", "groupSize": n, "seatsPerGroup": SEATS_PER_GROUP}
            for n, _ in SIZES
        ]
        text = json.dumps({"profiles": profiles, "gpuTopology": {"overlap": "timeshare"}})
        groups = plan(NodeConfig.model_validate_json(text), hardware.gpus, hardware.links).groups
        around = GroupRelations.of(groups, hardware.links)
        index = {group.name: number for number, group in enumerate(groups)}
        return cls(
            groups,
            tuple(tuple(index[name] for name in around.overlapping[group.name]) for group in groups),
            tuple(tuple(index[name] for name in around.nearby[group.name]) for group in groups),
            tuple(around.distance[group.name] for group in groups),
            tuple(len(around.numa_nodes[group.name]) for group in groups),
            {size: tuple(n for n, g in enumerate(groups) if len(g.gpus) == size) for size, _ in SIZES},
            tuple(frozenset(gpu.index for gpu in group.gpus) for group in groups),
        )


@dataclass
class Pool:
    """64 nodes and who has which seat."""

    model: Model
    strategy: str
    whole: bool
    chance: random.Random
    used: list[list[int]] = field(init=False)
    """By node and group: seats in use."""
    seats: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By replica: node and group."""
    known: dict[tuple[int, int], list[GroupLoad]] = field(default_factory=dict)
    """By node and size: its groups as they are, until something changes there."""
    seconds: float = 0.0
    decisions: int = 0

    def __post_init__(self) -> None:
        self.used = [[0] * len(self.model.groups) for _ in range(NODES)]

    def place(self, replica: Replica) -> tuple[int, int] | None:
        """Give it a seat; None when there is none of its size."""
        nodes = range(NODES) if self.whole else self._by_scheduler(replica.size)
        places = [place for node in nodes for place in self._places(node, replica.size)]
        began = time.perf_counter()
        found = best(self.strategy, places)
        self.seconds += time.perf_counter() - began
        self.decisions += 1
        if found is None:
            return None
        node, group = divmod(found.order, len(self.model.groups))
        self._change(node, group, 1)
        self.seats[replica.number] = node, group
        return node, group

    def leave(self, replica: Replica) -> None:
        """Its pod is gone."""
        seat = self.seats.pop(replica.number, None)
        if seat is not None:
            self._change(*seat, -1)

    def _change(self, node: int, group: int, by: int) -> None:
        self.used[node][group] += by
        for size in self.model.of_size:
            self.known.pop((node, size), None)

    def _by_scheduler(self, size: int) -> list[int]:
        """The node with the fewest pods among those with a free seat; any of equal ones."""
        free = [n for n in range(NODES) if any(self.used[n][g] < SEATS_PER_GROUP for g in self.model.of_size[size])]
        least = min((sum(self.used[node]) for node in free), default=0)
        return self.chance.sample([node for node in free if sum(self.used[node]) == least], 1) if free else []

    def _places(self, node: int, size: int) -> list[GroupLoad]:
        if (node, size) not in self.known:
            self.known[node, size] = [self._look(node, group) for group in self.model.of_size[size]]
        return self.known[node, size]

    def _look(self, node: int, group: int) -> GroupLoad:
        model, used = self.model, self.used[node]
        # In the whole pool a neighbourhood is a node: what is kept empty, or lost, as a whole.
        nearby = sum(used) if self.whole else sum(used[other] for other in model.nearby[group])
        return GroupLoad(
            name="",
            order=node * len(model.groups) + group,
            seats=SEATS_PER_GROUP,
            free=SEATS_PER_GROUP - used[group],
            overlapping_allocated=sum(used[other] for other in model.overlapping[group]),
            nearby_allocated=nearby,
            distance=model.distance[group],
            numa_nodes=model.numa_nodes[group],
        )


def play(model: Model, strategy: str, whole: bool, seed: int, load: float) -> dict[str, float]:
    """One stream on one pool; means over time from the first third on."""
    pool = Pool(model, strategy, whole, random.Random(seed))
    replicas, leaving = stream(seed, load), list[tuple[float, int]]()
    begin = len(replicas) // 3
    sums: defaultdict[str, float] = defaultdict(float)
    weight, last = 0.0, 0.0
    found, at_once = Counter[int](), Counter[int]()
    for replica in replicas:
        while leaving and leaving[0][0] <= replica.comes:
            pool.leave(replicas[heappop(leaving)[1]])
        if replica.number >= begin and replica.comes > last:
            for name, value in measures(pool, replicas).items():
                sums[name] += value * (replica.comes - last)
            weight += replica.comes - last
        last = replica.comes
        seat = pool.place(replica)
        if seat is not None:
            heappush(leaving, (replica.goes, replica.number))
            if replica.number >= begin:
                node, group = seat
                found[replica.size] += 1
                alone = pool.used[node][group] == 1 and not any(pool.used[node][o] for o in model.overlapping[group])
                at_once[replica.size] += alone
    means = {name: value / weight for name, value in sums.items()}
    decide = pool.seconds / pool.decisions * 1e6
    shares = {"at_once": at_once.total() / max(found.total(), 1), "at_once_4": at_once[4] / max(found[4], 1)}
    return {**means, **shares, "decide_us": decide}


def measures(pool: Pool, replicas: list[Replica]) -> dict[str, float]:
    """The pool at one instant."""
    model = pool.model
    taken = fragments = free = busy_nodes = 0
    for used in pool.used:
        covered = frozenset().union(*(model.gpus[g] for g, count in enumerate(used) if count))
        busy_nodes += bool(covered)
        taken += len(covered)
        free += 8 - len(covered)
        whole = sum(4 for group in model.of_size[4] if not model.gpus[group] & covered)
        fragments += 8 - len(covered) - whole
    homes: defaultdict[int, Counter[int]] = defaultdict(Counter)
    pairs = near = 0
    for number, (node, group) in pool.seats.items():
        homes[replicas[number].deployment][node] += 1
        if replicas[number].size == 2:
            pairs += 1
            near += model.distance[group][0] == 0
    shares = [max(home.values()) / home.total() for home in homes.values() if home.total() > 1]
    return {
        "utilisation": taken / max(8 * busy_nodes, 1),
        "nodes": float(busy_nodes),
        "fragmentation": fragments / max(free, 1),
        "worst_node": statistics.mean(shares) if shares else 0.0,
        "nvlink": near / max(pairs, 1),
    }


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the bootstrapped 95 % interval of the mean."""
    chance = random.Random(1)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.fmean(values), means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


async def run(seeds: int = SEEDS) -> dict[str, float]:
    """Prints a table per load and way; returns the means, ``<way>_<load>_<strategy>_<metric>``."""
    model = Model.make()
    figures: dict[str, float] = {}
    console = Console(width=165)
    for whole, load in itertools.product((False, True), LOADS):
        way = "pool" if whole else "node"
        title = f"{'whole pool' if whole else 'node by scheduler'}, load {load:g}, {seeds} seeds (0 to {seeds - 1})"
        table = Table(title=title, caption="mean (95 % interval, bootstrapped); right: the rule of thumb")
        for name in ("strategy", *METRICS, "rule: used", "fragmented", "time"):
            table.add_column(name, justify="left" if name == "strategy" else "right")
        for strategy in PLACEMENTS:
            runs = [play(model, strategy, whole, seed, load) for seed in range(seeds)]
            cells = []
            for name in METRICS:
                mean, low, high = interval([one[name] for one in runs])
                figures[f"{way}_{load:g}_{strategy}_{name}"] = mean
                cells.append(_cell(name, mean, low, high))
            table.add_row(strategy, *cells, *RULES[strategy])
        console.print(table)
    for name, meaning in METRICS.items():
        console.print(f"{name}: {meaning}", style="dim")
    return figures


def _cell(name: str, mean: float, low: float, high: float) -> str:
    times = 1 if name in ("nodes", "decide_us") else 100
    return f"{mean * times:.0f} ({low * times:.0f}-{high * times:.0f})"
