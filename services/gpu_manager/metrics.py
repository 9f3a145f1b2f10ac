"""The manager's metrics: gauges are read from the state at scrape time, effects are counted when carried out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.messages import GroupDecided, SeatActivated
from kybernate.seat import SeatState
from services.gpu_manager.core import obstacles, view
from services.gpu_manager.core.demand import PHASES
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.phases import clock
from services.gpu_manager.core.state import Effect, NodeState, Rider, Sample
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
        own = _seats(node, now), _models(node, now), _groups(node), _gpus(node), self._node(node)
        families = dict[str, CounterMetricFamily | GaugeMetricFamily]()
        for one in chain(*own, *(rider.metrics(node, now) for rider in node.riders[Rider.metrics])):
            if one.name not in families:
                kind = CounterMetricFamily if one.counter else GaugeMetricFamily
                families[one.name] = kind(one.name, one.text, labels=["node", *one.labels])
            if one.value is not None:
                families[one.name].add_metric([node.name, *one.labels.values()], one.value)
        yield from families.values()

    def _node(self, node: NodeState) -> Iterator[Sample]:
        text = "Wall seconds of each phase of the group's last switch that activated a seat"
        for group in node.groups:
            for phase, seconds in self._last.get(group, {"": None}).items():
                yield Sample("kybernate_last_switch_seconds", text, seconds, {"group": group, "phase": phase})
        text = "Broken invariants; nothing is granted on their GPUs"
        yield Sample("kybernate_invariant_violations", text, node.violations, counter=True)
        text = "Inputs that contradict the state and changed nothing"
        yield Sample("kybernate_inputs_refused", text, node.refused, counter=True)
        text = "Decisions of the policy that could not be used; a plain rule decided"
        yield Sample("kybernate_policy_errors", text, self._policy.errors, counter=True)


def _seats(node: NodeState, now: Now) -> Iterator[Sample]:
    for seat in node.seats.values():
        one, group = {"seat": seat.id, "model": seat.model}, {"group": seat.group.name}
        state = group | one | {"state": str(seat.state)}
        yield Sample("kybernate_seat_state", "1 for the state a seat is in", 1, state)
        text = "Learned model seconds that evidence and comparison of answers take in a switch to the seat"
        verify = seat.durable.costs.verify_seconds
        yield Sample("kybernate_seat_verify_seconds", text, verify if seat.model else None, one)
        text = "Ends in a row of a seat's engine that had not served"
        yield Sample("kybernate_seat_failures", text, seat.durable.failed.count if seat.model else None, one)
        text = (
            "Times that a seat had GPU memory while it rested: called past the router, or by a process in its container"
        )
        woke = node.woke.get(seat.id)
        model = one if woke is None else one | {"model": woke.model}
        yield Sample("kybernate_seat_woke", text, None if woke is None else woke.times, model, counter=True)
        text = "1 while requests wait for the seat; stage: what it waits for (kyb why); on: the seat in its way"
        for stage, on in _blocked(node, seat, now):
            value = 1 if stage else None
            yield Sample("kybernate_seat_blocked", text, value, group | one | {"stage": stage, "on": on})
        time = clock(node, seat, now) if seat.state in PHASES else None  # of a state that ends by itself
        phase, since = group | one | {"phase": str(seat.state)}, now.wall - seat.entered_wall
        text = "Wall seconds that the seat has been in this phase"
        yield Sample("kybernate_phase_seconds", text, since if time else None, phase)
        text = "What the phase usually takes; no sample until measured"
        yield Sample("kybernate_phase_usual_seconds", text, time.usual or None if time else None, phase)
        text = "1 past the deadline of the phase, or far beyond its usual time"
        yield Sample("kybernate_phase_late", text, time.late(now) if time else None, phase)


def _blocked(node: NodeState, seat: ManagedSeat, now: Now) -> list[tuple[str, str]]:
    """What keeps its requests waiting, and each seat in its way."""
    if seat.pod is None or seat.state is SeatState.ACTIVE or not view.demand(node, seat).waiting:
        return [("", "")]
    found = obstacles.stage(node, seat, now)
    named = found.data.get("seats") or [found.data.get("victim") or found.data.get("seat") or ""]
    return [(found.stage, str(on)) for on in named]


def _models(node: NodeState, now: Now) -> Iterator[Sample]:
    """By model: the number of seats of a node bounds the labels."""
    seats = defaultdict[str, list[ManagedSeat]](list)
    for seat in node.seats.values():
        seats[seat.model].append(seat)
    for model, served in seats.items():
        found, one = [view.demand(node, seat) for seat in served], {"model": model}
        text = "Requests that wait for a model, over all routers and gateways"
        yield Sample("kybernate_waiting_requests", text, sum(d.waiting for d in found) if model else None, one)
        text = "Model seconds that the oldest waiting request has waited; 0: none waits"
        oldest = max(d.oldest_wait(now) for d in found)
        yield Sample("kybernate_oldest_wait_seconds", text, oldest if model else None, one)
        text, slo = "Model seconds that a request for this model may wait", served[-1].terms.tier.slo_seconds
        yield Sample("kybernate_slo_seconds", text, slo if model else None, one)


def _groups(node: NodeState) -> Iterator[Sample]:
    for group in node.setup.groups:
        one = {"group": group.name}
        text = "VRAM of seats that hold their group, as last measured"
        held = [seat for seat in view.seats_on(node, group) if seat.lease]
        for state in {one.state: 0 for one in held} or ("",):
            vram = sum(seat.durable.vram_bytes for seat in held if seat.state == state)
            yield Sample("kybernate_vram_bytes", text, vram if held else None, one | {"state": str(state)})
        text = "VRAM of a group's GPUs together"
        yield Sample("kybernate_gpu_memory_bytes", text, sum(gpu.memory_bytes for gpu in group.gpus), one)
        yield Sample("kybernate_group_switching", "1 while a group switches", group.name in node.switches, one)


def _gpus(node: NodeState) -> Iterator[Sample]:
    """``gpu`` is the UUID, as in DCGM's label ``UUID``."""
    for gpu in {gpu.uuid: gpu for group in node.setup.groups for gpu in group.gpus}.values():
        text, one = "1 while the device plugin takes the GPU for faulty", {"gpu": gpu.uuid, "index": str(gpu.index)}
        yield Sample("kybernate_gpu_faulty", text, bool(gpu.fault(node.faulty)), one)
    for seat in node.seats.values():
        for gpu in seat.group.gpus:
            text, one = "1 for each seat that holds the GPU", {"gpu": gpu.uuid, "seat": seat.id, "model": seat.model}
            yield Sample("kybernate_gpu_owner", text, 1 if seat.lease else None, one)
