"""All seats of one node: who holds which GPUs, who waits, who yields. Pure: messages in, effects out.

``handle`` is the only entry point: nothing else changes the state. It dispatches the message, then lets every concerned
group advance; decisions are made in the modules below, and imports run one way:

    board → allocations, commands, recovery → riders → arbiter, reports → switch → moves → obstacles → view → state

The invariants (``docs/dev/architecture.md``) are checked after each message that had an effect (a GPU on which one is
broken gets no new grants) and by property tests. The shell (``manager``) writes the ledger before it carries out an
effect.
"""

from kybernate.messages import Command, DrainAck, JobProgress, KillJob, Presence, ReleaseJob, SwitchJob, TrafficSignal
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import allocations, arbiter, commands, moves, obstacles, recovery, reports, switch, view
from services.gpu_manager.core.inputs import (
    BusChanged,
    DrainAnnounced,
    EngineSeen,
    FaultyGpusSeen,
    ForeignProcessesSeen,
    InvariantBroken,
    JobAnswered,
    JobsReported,
    Now,
    Paused,
    Recovered,
    RecoveryBegun,
    RouterAskedOverHttp,
    StartCalls,
    Tick,
)
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.riders import RIDERS, operations
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.core.state import Effect, NodeSetup, NodeState, Rider, by_hook
from services.gpu_manager.failures import SERVED_SECONDS, Failures

S = SeatState


class Board:
    """The state of one node and its only entry point."""

    def __init__(self, setup: NodeSetup) -> None:
        self.node = NodeState(setup, by_hook(RIDERS))
        """Read it anywhere; only ``handle`` changes it."""

    def handle(self, message: object, now: Now) -> list[Effect]:  # noqa: C901, PLR0912
        """Take one message in and return everything that follows from it, in order. Raises TypeError if unknown."""
        node, repeated, claims = self.node, False, set(self.node.claims)
        node.effects = []
        match message:
            case TrafficSignal():
                repeated = not _on_signal(node, message, now)
            case Presence(component="router"):
                node.routers.update(message, now)
            case DrainAck():
                node.routers.acknowledge(message)
            case Command():
                node.effects.append(commands.answer(node, message, now))
            case JobProgress(status=status):
                reports.on_job_status(node, status, now)
            case JobAnswered(job=SwitchJob() as job, reply=reply):
                reports.on_job_answer(node, job, reply, now)
            case EngineSeen():
                reports.on_engine_answer(node, message, now)
            case DrainAnnounced(seat=seat, epoch=epoch):
                switch.on_drain_announced(node, seat, epoch, now)
            case JobsReported():
                allocations.on_jobs_report(node, message, now)
            case JobAnswered(job=KillJob() | ReleaseJob() as job, reply=reply):
                allocations.on_ending_answer(node, job, reply, now)
            case Owners():
                allocations.on_pods(node, message, now)
            case StartCalls(calls=calls):
                allocations.on_start_calls(node, calls, now)
            case ForeignProcessesSeen():
                allocations.on_gpu_processes(node, message, now)
            case FaultyGpusSeen(faults=faults):
                node.faulty = faults
            case BusChanged(connected=connected):
                node.on_bus(connected, now)
            case RouterAskedOverHttp():
                node.routers.permit(now)
            case Paused():
                node.routers.pause(now)
            case RecoveryBegun():
                recovery.ask(node, message, now)
            case Recovered(begun=begun, reply=reply):
                recovery.recover(node, begun, reply, now)
            case Presence() | Tick():
                pass
            case _:
                raise TypeError(f"the board does not know {type(message).__name__}")
        if node.recovered:
            self._advance(message, now, claims, repeated=repeated)
            if node.effects or node.broken:
                self._check_invariants()
        return node.effects

    def _check_invariants(self) -> None:
        """Where an invariant does not hold, nothing is granted any more, and it is logged and counted once."""
        node, before = self.node, self.node.broken
        node.broken = broken_invariants(node)
        for gpu, text in node.broken.items():
            if gpu not in before:
                node.violations += 1
                node.effects.append(InvariantBroken(gpu, text))

    def _advance(self, message: object, now: Now, claims: set[str], *, repeated: bool) -> None:
        """Let every concerned group follow its demand, and step its switch or decide whether one begins."""
        node = self.node
        node.moved_views.clear()
        for group in _due(node, message, now, claims=claims, repeated=repeated):
            for seat in view.seats_on(node, group):
                _follow_demand(node, seat, now)
                allocations.end_of_life(node, seat, now)
            if (under_way := node.switches.get(group.name)) is not None:
                switch.step(node, under_way, now)
            else:
                arbiter.decide(node, group, now)
        for state in node.groups.values():
            if state.kept:
                moves.step(node, state, now)
        for rider in node.riders[Rider.step]:
            rider.step(node, now)


# --- demand -----------------------------------------------------------------------------------------------------------


def _on_signal(node: NodeState, signal: TrafficSignal, now: Now) -> bool:
    """Take a signal in and learn from it. True: its source reported other counts than before."""
    changed = node.levels.update(signal, now)
    seat = node.seats.get(signal.seat or view.best_seat(node, signal.model) or "")
    if seat is not None and seat.model == signal.model:
        node.learning.update(signal, seat.id, now)
    return changed


def _follow_demand(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """Remember when a seat was last busy, whether it has answered and the cause of its demand; let an operator's wish
    lapse."""
    if seat.pod is None:
        return
    found, usage, learned = view.demand(node, seat), seat.usage, node.learning.of(seat.id, seat.model)
    served = usage.served if learned is None else learned.service.count
    long = now.wall >= seat.entered_wall + SERVED_SECONDS
    if seat.state is S.ACTIVE and not usage.proven and (served != usage.served or long):
        usage.proven, seat.durable.failed = True, Failures()
    usage.served = served
    had, usage.has_requests = usage.has_requests, bool(found.waiting or found.in_flight)
    if had or usage.has_requests:  # the last one ended with this message
        usage.busy = now.model
        usage.unclaimed = False
    if found.cause:
        seat.cause = found.cause
    if usage.wanted_since is not None and now.wall > usage.wanted_until:
        usage.wanted_since = None


# --- which groups decide ----------------------------------------------------------------------------------------------


def _due(node: NodeState, message: object, now: Now, *, claims: set[str], repeated: bool) -> tuple[Group, ...]:
    """The groups for which a message or the time may change something, in the order in which they decide.

    ``claims``: the groups that had one before the message. ``repeated``: a signal with the counts of the last one.
    (1) Demand has expired, or a claim was dropped: all groups, since the groups that it kept waiting need not share a
    GPU with the one that had it. (2) Otherwise the groups of the message, those that share GPUs with them and those to
    which their seats may move. (3) Groups that share GPUs or lanes decide by the longest wait, whatever their size: in
    any fixed order a group that comes late would never see a holder that may yield, nor a free lane.
    """
    expired = node.levels.expire(now)
    node.routers.expire(now)
    for name, claim in tuple(node.claims.items()):
        seat = node.seats[claim.seat]
        if not view.wanted(node, seat, now) or obstacles.unready(node, seat, node.groups[name].group, now):
            del node.claims[name]
    if expired or claims - node.claims.keys():  # (1)
        groups = node.setup.groups
    else:
        groups = _concerned(node, message, repeated=repeated)  # (2)
    if not node.setup.lanes and not any(node.groups[group.name].neighbours for group in groups):
        return groups
    return tuple(sorted(groups, key=lambda group: obstacles.turn(node, group, now)))  # (3)


def _concerned(node: NodeState, message: object, *, repeated: bool) -> tuple[Group, ...]:
    """Groups for which a message may change something, with their neighbours and peers; all when it does not tell.

    Signals are frequent: only seats that are parked or at the gate can move, and wait ages count with the next tick, so
    that a signal about any other seat, or one with the counts of the last one, does not concern the peers.
    """
    groups, peers = node.setup.groups, True
    match message:
        case Presence():
            groups = tuple(group for group in groups if group.name in node.switches)
        case DrainAck(seat=name) | DrainAnnounced(seat=name) if name in node.seats:
            return (node.seats[name].group,)  # only the switch in which it leaves reads them
        case JobProgress(status=status):
            freed = status.done and bool(node.setup.lanes)  # any other may have its lane now
            groups = tuple(group for group in groups if freed or group.name == status.group)
        case JobAnswered(job=SwitchJob(group=name)):
            groups = tuple(group for group in groups if group.name == name)
        case _:
            seat = node.seats.get(getattr(message, "seat", None) or "")
            if seat is not None:
                groups = (seat.group,)
                peers = not isinstance(message, TrafficSignal) or not (
                    repeated or seat.state not in (S.PARKED, S.WAITING)
                )
    found = {group.name: group for group in groups}
    for name in tuple(found):
        state = node.groups[name]
        found |= {other.name: other for other in (*state.neighbours, *(state.peers if peers else ()))}
    return tuple(found.values())


# --- invariants -----------------------------------------------------------------------------------------------------


def broken_invariants(node: NodeState) -> dict[str, str]:
    """GPU → the invariant that does not hold on it. Quarantined seats may hold too much: that is why they are; also
    while they are deleted."""
    found: dict[str, str] = {}
    by_gpu: dict[str, set[str]] = {}
    for group in node.setup.groups:
        seats, switch = view.holders(node, group), node.switches.get(group.name)
        if any(seat.state is S.QUARANTINED or seat.facts.conflict for seat in seats):
            continue
        text = "" if len(seats) <= group.slots else f"{group.name}: {len(seats)} hold, {group.slots} may"
        if switch is not None and not (switch.victim or switch.incoming):
            text = f"the switch of {group.name} moves no seat"
        elif (
            switch is not None
            and switch.incoming
            and not switch.holds_group
            and operations.drain_on(node, group) is not None
        ):
            text = f"{node.seats[switch.incoming].name} is brought to {group.name}, which is drained"
        for gpu in group.gpus:
            granted = [seat for seat in seats if seat.durable.reserved_bytes is not None]  # the ledger may be lost
            reserved = sum(seat.reserved_bytes(gpu.memory_bytes, granted=True) for seat in granted)
            budget = gpu.memory_bytes - (group.profile.memory_reserve if group.profile.packs and len(seats) > 1 else 0)
            if reserved > budget:
                text = f"{gpu.uuid}: {reserved} bytes reserved of {budget}"
            if text:
                found[gpu.uuid] = text
            if seats or (switch is not None and switch.holds_group):
                by_gpu.setdefault(gpu.uuid, set()).add(group.name)
    shared = {gpu: groups for gpu, groups in by_gpu.items() if len(groups) > 1}
    return found | {gpu: f"{gpu} belongs to two groups: {', '.join(sorted(names))}" for gpu, names in shared.items()}
