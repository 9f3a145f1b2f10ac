"""The manager's metrics: gauges are read from the state at scrape time, effects are counted when carried out."""

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.messages import GroupDecided, SeatActivated
from kybernate.seat import SeatState
from services.gpu_manager.core import obstacles, view
from services.gpu_manager.core.demand import PHASES
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.phases import clock
from services.gpu_manager.core.state import Effect, NodeState, Rider
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.manager import Manager

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_MOVING = (SeatState.MIGRATING, SeatState.STARTING)
_DISK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class ManagerMetrics(Collector):
    """All metrics of one manager; it observes the effects that the manager carries out."""

    def __init__(self, registry: CollectorRegistry, manager: Manager, policy: GuardedPolicy) -> None:
        self._manager, self._policy = manager, policy
        text = "Wall seconds of each phase of a switch that activated a seat; total: decision to serving"
        labels = ("phase", "backend", "group")
        self._switch = Histogram("kybernate_switch_seconds", text, labels, buckets=_SECONDS, registry=registry)
        self._last: dict[str, dict[str, float]] = {}
        """By group: the phases of its last switch that activated a seat."""
        text = "Seats that came to serve on another group; way: map (restored there) or restart (started there)"
        self._moves = Counter("kybernate_moves", text, ("way", "group"), registry=registry)
        text = "Decisions about a group; switch: a seat gets it. by: policy, operator or claim"
        labels = ("decision", "by", "group")
        self._decisions = Counter("kybernate_decisions", text, labels, registry=registry)
        text = "Wall seconds that writing the ledger took, with fsync where it is durable"
        self._ledger = Histogram("kybernate_ledger_write_seconds", text, buckets=_DISK, registry=registry)
        manager.observe, manager.observe_write = self.observe, self._ledger.observe
        registry.register(self)

    def observe(self, effect: Effect) -> None:
        """Count one effect that was carried out."""
        if isinstance(effect, GroupDecided):
            self._decisions.labels(effect.decision, effect.by, effect.group).inc()
        if isinstance(effect, SeatActivated) and effect.way and effect.previous in _MOVING:
            self._moves.labels(effect.way, effect.group).inc()
        if isinstance(effect, SeatActivated) and effect.seconds:
            backend = self._manager.node.seats[effect.seat].backend
            self._last[effect.group] = dict(effect.seconds)
            for phase, seconds in effect.seconds.items():
                self._switch.labels(phase, backend, effect.group).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges."""
        node, now = self._manager.node, self._manager.now()
        yield from _seats(node)
        yield from _phases(node, now)
        yield from _demand(node, now)
        yield _blocked(node, now)
        text = "Wall seconds of each phase of the group's last switch that activated a seat"
        last = _gauge("kybernate_last_switch_seconds", text, "node", "group", "phase")
        for group, phases in self._last.items():
            for phase, seconds in phases.items():
                last.add_metric([node.name, group, phase], seconds)
        yield last
        yield from _memory(node)
        yield from _groups(node)
        yield from _gpus(node)
        broken = "Broken invariants; nothing is granted on their GPUs"
        refused = "Inputs that contradict the state and changed nothing"
        failed = "Decisions of the policy that could not be used; a plain rule decided"
        for name, text, value in (
            ("kybernate_invariant_violations", broken, node.violations),
            ("kybernate_inputs_refused", refused, node.refused),
            ("kybernate_policy_errors", failed, self._policy.errors),
        ):
            counter = CounterMetricFamily(name, text, labels=["node"])
            counter.add_metric([node.name], value)
            yield counter
        families = dict[str, CounterMetricFamily | GaugeMetricFamily]()
        for one in (one for rider in node.riders[Rider.metrics] for one in rider.metrics(node, now)):
            kind, labels = CounterMetricFamily if one.counter else GaugeMetricFamily, ["node", *one.labels]
            family = families.setdefault(one.name, kind(one.name, one.text, labels=labels))
            if one.value is not None:
                family.add_metric([node.name, *one.labels.values()], one.value)
        yield from families.values()


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _seats(node: NodeState) -> Iterable[Metric]:
    state = _gauge("kybernate_seat_state", "1 for the state a seat is in", "node", "group", "seat", "model", "state")
    for seat in node.seats.values():
        state.add_metric([node.name, seat.group.name, seat.id, seat.model, str(seat.state)], 1)
    yield state
    text = "Learned model seconds that evidence and comparison of answers take in a switch to the seat"
    verify = _gauge("kybernate_seat_verify_seconds", text, "node", "seat", "model")
    text = "1 for a seat whose backend failed twice, with what parks it now"
    demoted = _gauge("kybernate_seat_demoted", text, "node", "seat", "model", "backend")
    text = "1 for a seat whose engine the checkpointer cannot reach: its answers are not compared after a park"
    unverified = _gauge("kybernate_seat_unverified", text, "node", "seat", "model")
    text = "Ends in a row of a seat's engine that had not served"
    failures = _gauge("kybernate_seat_failures", text, "node", "seat", "model")
    for seat in node.seats.values():
        if seat.model:
            failures.add_metric([node.name, seat.id, seat.model], seat.durable.failed.count)
        if seat.model and seat.durable.unverified:
            unverified.add_metric([node.name, seat.id, seat.model], 1)
        if seat.model:
            verify.add_metric([node.name, seat.id, seat.model], seat.durable.costs.verify_seconds)
        if seat.durable.demoted:
            demoted.add_metric([node.name, seat.id, seat.model, seat.backend], 1)
    text = "Times that a seat had GPU memory while it rested: called past the router, or by a process in its container"
    woke = CounterMetricFamily("kybernate_seat_woke", text, labels=["node", "seat", "model"])
    for name, one in node.woke.items():
        woke.add_metric([node.name, name, one.model], one.times)
    yield woke
    yield verify
    yield demoted
    yield unverified
    yield failures


def _phases(node: NodeState, now: Now) -> Iterable[Metric]:
    """Of each seat in a state that ends by itself."""
    labels = ("node", "group", "seat", "model", "phase")
    age = _gauge("kybernate_phase_seconds", "Wall seconds that the seat has been in this phase", *labels)
    usual = _gauge("kybernate_phase_usual_seconds", "What the phase usually takes; no sample until measured", *labels)
    late = _gauge("kybernate_phase_late", "1 past the deadline of the phase, or far beyond its usual time", *labels)
    for seat in node.seats.values():
        if seat.state not in PHASES:
            continue
        time, values = clock(node, seat, now), [node.name, seat.group.name, seat.id, seat.model, str(seat.state)]
        age.add_metric(values, now.wall - seat.entered_wall)
        late.add_metric(values, float(time.late(now)))
        if time.usual:
            usual.add_metric(values, time.usual)
    yield age
    yield usual
    yield late


def _demand(node: NodeState, now: Now) -> Iterable[Metric]:
    """By model: the number of seats of a node bounds the labels."""
    waiting, oldest, slo = Counts[str](), defaultdict[str, float](float), dict[str, float]()
    for seat in node.seats.values():
        if seat.pod is None:
            continue
        found = view.demand(node, seat)
        waiting[seat.model] += found.waiting
        oldest[seat.model] = max(oldest[seat.model], found.oldest_wait(now))
        slo[seat.model] = seat.terms.tier.slo_seconds
    text = "Requests that wait for a model, over all routers and gateways"
    yield _by_model(node, "kybernate_waiting_requests", text, waiting)
    text = "Model seconds that the oldest waiting request has waited; 0: none waits"
    yield _by_model(node, "kybernate_oldest_wait_seconds", text, oldest)
    yield _by_model(node, "kybernate_slo_seconds", "Model seconds that a request for this model may wait", slo)


def _blocked(node: NodeState, now: Now) -> Metric:
    """What keeps requests waiting: at most one sample for each seat that they wait for and each seat in its way."""
    text = "1 while requests wait for the seat; stage: what it waits for (kyb why); on: the seat in its way"
    gauge = _gauge("kybernate_seat_blocked", text, "node", "group", "seat", "model", "stage", "on")
    for seat in node.seats.values():
        if seat.pod is None or seat.state is SeatState.ACTIVE or not view.demand(node, seat).waiting:
            continue
        found = obstacles.stage(node, seat, now)
        named = found.data.get("seats") or [found.data.get("victim") or found.data.get("seat") or ""]
        for on in named:
            gauge.add_metric([node.name, seat.group.name, seat.id, seat.model, found.stage, str(on)], 1)
    return gauge


def _by_model(node: NodeState, name: str, text: str, values: dict[str, float] | Counts[str]) -> Metric:
    gauge = _gauge(name, text, "node", "model")
    for model, value in values.items():
        gauge.add_metric([node.name, model], value)
    return gauge


def _memory(node: NodeState) -> Iterable[Metric]:
    vram = defaultdict[tuple[str, str], int](int)
    for seat in node.seats.values():
        if seat.lease:
            vram[seat.group.name, str(seat.state)] += seat.durable.vram_bytes
    gauge = _gauge(
        "kybernate_vram_bytes", "VRAM of seats that hold their group, as last measured", "node", "group", "state"
    )
    for (group, state), value in vram.items():
        gauge.add_metric([node.name, group, state], value)
    yield gauge
    total = _gauge("kybernate_gpu_memory_bytes", "VRAM of a group's GPUs together", "node", "group")
    for one in node.setup.groups:
        total.add_metric([node.name, one.name], sum(gpu.memory_bytes for gpu in one.gpus))
    yield total


def _groups(node: NodeState) -> Iterable[Metric]:
    switching = _gauge("kybernate_group_switching", "1 while a group switches", "node", "group")
    for group in node.setup.groups:
        switching.add_metric([node.name, group.name], float(group.name in node.switches))
    yield switching


def _gpus(node: NodeState) -> Iterable[Metric]:
    """``gpu`` is the UUID, as in DCGM's label ``UUID``."""
    faulty = _gauge(
        "kybernate_gpu_faulty", "1 while the device plugin takes the GPU for faulty", "node", "gpu", "index"
    )
    owner = _gauge("kybernate_gpu_owner", "1 for each seat that holds the GPU", "node", "gpu", "seat", "model")
    for gpu in {gpu.uuid: gpu for group in node.setup.groups for gpu in group.gpus}.values():
        faulty.add_metric([node.name, gpu.uuid, str(gpu.index)], float(bool(gpu.fault(node.faulty))))
    for seat in node.seats.values():
        for gpu in seat.group.gpus if seat.lease else ():
            owner.add_metric([node.name, gpu.uuid, seat.id, seat.model], 1)
    yield faulty
    yield owner
