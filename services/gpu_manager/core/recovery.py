"""What a manager takes for true after its start: the ledger remembers, evidence decides. Pure.

Each owned seat gets the state that its processes are in, by the table ``RECOVERED``. A live process without park
evidence holds its group, also when the ledger is lost; when more seats hold a group than may, all of them are
quarantined and nothing is granted there. An unfinished job of the checkpointer is adopted as the switch it belongs to.
A drain that was under way is over: no router was asked to go on with it, so the seat serves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kybernate.messages import EVENT_OF_STATE, AskJobs, JobReply, JobStatus, KillJob, ReleaseJob, SeatProgress
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import operations, switch, view
from services.gpu_manager.core.group_switch import Drain, GroupSwitch, JobExchange, SwitchPhase, SwitchTimes
from services.gpu_manager.core.inputs import Now, Recovered, RecoveryBegun, SeatTicket, WallTime
from services.gpu_manager.core.managed_seat import (
    FROZEN_STATES,
    PARKED_NOWHERE,
    REHEARSAL,
    START_DEADLINE_SECONDS,
    ManagedSeat,
    Rehearsal,
)
from services.gpu_manager.core.riders import RIDERS
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeState
from services.gpu_manager.ledger import Durable, Freeze, Ledger, LedgerEntry

S = SeatState


# --- the table --------------------------------------------------------------------------------------------------------


class ContainerEvidence(StrEnum):
    """What kubelet's pods, beside the ledger, tell about a seat's container."""

    NEW = "new"  # it runs, and the ledger knows another one, not a younger one: it was started with a ticket
    RUNNING = "running"  # it runs, and the ledger knows it or is lost
    STOPPED = "stopped"  # it has run and does not any more
    ABSENT = "absent"  # it never ran
    DELETED_WITH_TICKET = "deleted-with-ticket"  # the pod is going; its ticket may be taken, and no process was seen
    DELETED_HOLDING = "deleted-holding"  # the pod is going; its processes held the group, or the ledger is lost
    DELETED_PARKED = "deleted-parked"  # the pod is going; it has processes, and held nothing
    DELETED = "deleted"  # the pod is going and has no process


class DriverEvidence(StrEnum):
    """What the checkpointer tells about a seat's processes."""

    ALIVE = "alive"  # it cannot tell
    ACTIVE = "active"  # they run
    PARKED = "parked"
    GONE = "gone"
    LOST = "lost"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class RecoveredAs:
    """What a seat is from now on."""

    state: SeatState
    lease: bool
    process: bool
    """It has a process."""
    ticket_open: bool = False
    """Its ticket may be taken already, and a process may come of it."""
    reason: str = ""
    """Empty where the driver's own reason counts."""


_C, _D = ContainerEvidence, DriverEvidence
_REMEMBERED = (S.STARTING, S.LOST, S.QUARANTINED)
"""States that a live process does not contradict, and that the driver does not know."""
_GOING = "its pod is being deleted"
_INHERITED = "its container may start by an open ticket beside seats that leave it no room"
_DELETED = (_C.DELETED_HOLDING, _C.DELETED_PARKED)
_CONDEMNED = "the driver reports it as parked while it is killed"
_RUNNING = (_C.NEW, _C.RUNNING)
_NOT_RUNNING = (_C.STOPPED, _C.ABSENT)
_LIVE = (_D.ALIVE, _D.ACTIVE)
_HOLDS = (_D.ACTIVE, _D.LOST, _D.QUARANTINED)
"""Evidence of processes on the GPUs."""
_EXISTS = (*_HOLDS, _D.PARKED)
"""Evidence of processes."""

_Row = tuple[Iterable[ContainerEvidence], Iterable[DriverEvidence], Iterable[SeatState], RecoveredAs]
_ROWS: tuple[_Row, ...] = (
    # Any state in the ledger, FREE when it has none; the rows below refine the ones above.
    ((_C.NEW,), _LIVE, S, RecoveredAs(S.STARTING, True, True)),
    ((_C.RUNNING,), _LIVE, S, RecoveredAs(S.ACTIVE, True, True)),
    *(((_C.RUNNING,), _LIVE, (known,), RecoveredAs(known, True, True)) for known in _REMEMBERED),
    (_RUNNING, (_D.PARKED,), S, RecoveredAs(S.PARKED, False, True)),
    (_RUNNING, (_D.GONE,), S, RecoveredAs(S.BACKOFF, False, False, reason="its processes are gone")),
    (_RUNNING, (_D.LOST,), S, RecoveredAs(S.LOST, True, True)),
    (_RUNNING, (_D.QUARANTINED,), S, RecoveredAs(S.QUARANTINED, True, True)),
    ((_C.STOPPED,), _D, S, RecoveredAs(S.BACKOFF, False, False, reason="its container is not running")),
    ((_C.ABSENT,), _D, S, RecoveredAs(S.WAITING, False, False)),
    # Processes that the driver has exist, whatever the pods say: their list may be stale.
    (_NOT_RUNNING, (_D.PARKED,), S, RecoveredAs(S.PARKED, False, True)),
    (_NOT_RUNNING, (_D.ACTIVE,), S, RecoveredAs(S.ACTIVE, True, True)),
    *((_NOT_RUNNING, (_D.ACTIVE,), (known,), RecoveredAs(known, True, True)) for known in _REMEMBERED),
    (_NOT_RUNNING, (_D.LOST,), S, RecoveredAs(S.LOST, True, True)),
    (_NOT_RUNNING, (_D.QUARANTINED,), S, RecoveredAs(S.QUARANTINED, True, True)),
    (_NOT_RUNNING, _D, (S.STARTING,), RecoveredAs(S.STARTING, True, False, ticket_open=True)),
    (_NOT_RUNNING, _HOLDS, (S.STARTING,), RecoveredAs(S.STARTING, True, True, ticket_open=True)),
    # Processes that are being killed are no copy, whatever the driver says: part of their memory stays in use.
    ((_C.RUNNING, *_NOT_RUNNING), (_D.PARKED,), (S.LOST,), RecoveredAs(S.LOST, True, True, reason=_CONDEMNED)),
    ((_C.DELETED_WITH_TICKET,), _D, S, RecoveredAs(S.RELEASING, True, False, True, _GOING)),
    ((_C.DELETED_HOLDING,), _D, S, RecoveredAs(S.RELEASING, True, True, reason=_GOING)),
    ((_C.DELETED_HOLDING,), (_D.PARKED,), S, RecoveredAs(S.RELEASING, False, True, reason=_GOING)),
    ((_C.DELETED_PARKED,), _D, S, RecoveredAs(S.RELEASING, False, True, reason=_GOING)),
    (_DELETED, (_D.GONE,), S, RecoveredAs(S.RELEASING, False, False, reason=_GOING)),
    ((_C.DELETED,), _D, S, RecoveredAs(S.RELEASING, False, False, reason=_GOING)),
    ((*_DELETED, _C.DELETED), _HOLDS, S, RecoveredAs(S.RELEASING, True, True, reason=_GOING)),
    ((_C.DELETED_WITH_TICKET,), _HOLDS, S, RecoveredAs(S.RELEASING, True, True, True, _GOING)),
)
RECOVERED: dict[tuple[ContainerEvidence, DriverEvidence, SeatState], RecoveredAs] = {
    (container, driver, state): found
    for containers, drivers, states, found in _ROWS
    for container in containers
    for driver in drivers
    for state in states
}
"""(container, driver, the ledger's state) → what the seat is. Total; each rule is a test."""


def container_evidence(pod: SeatPod, entry: LedgerEntry | None) -> ContainerEvidence:
    """Compare a pod with the ledger.

    (1) It runs another container than the ledger's. (2) The pod is going: by its ticket, its processes and its lease.
    (3) It runs. (4) It does not, also if the list shows the container that had ended before the last ticket.
    """
    known = entry.durable if entry is not None else Durable(seen_running=pod.running)
    waits = _waits(entry)
    over = waits and entry is not None and entry.state is not S.RELEASING
    if pod.running and entry is not None and pod.container_id != known.container_id:  # (1)
        return _C.NEW
    if pod.deleting:  # (2)
        if waits:
            return _C.DELETED_WITH_TICKET
        if not known.seen_running:
            return _C.DELETED
        return _C.DELETED_HOLDING if entry is None or entry.lease else _C.DELETED_PARKED
    if pod.running and not over:  # (3)
        return _C.RUNNING
    return _C.STOPPED if known.container_id else _C.ABSENT  # (4)


def _waits(entry: LedgerEntry | None) -> bool:
    """True if its last ticket may be taken and no process of it was seen; it may be quarantined or deleted since."""
    return entry is not None and entry.lease and not entry.durable.seen_running


def driver_evidence(seen: SeatProgress | None) -> DriverEvidence:
    """What the checkpointer's answer proves: without an answer, or before the first one, processes count as alive."""
    match seen.outcome if seen is not None else "":
        case "active" | "started":
            return _D.ACTIVE
        case "parked" | "gone" | "lost" | "quarantined" as outcome:
            return DriverEvidence(outcome)
    return _D.ALIVE


# --- the question -----------------------------------------------------------------------------------------------------


def ask(node: NodeState, begun: RecoveryBegun, now: Now) -> None:
    """Ask the checkpointer for evidence. The epoch fences: it accepts no job of an earlier manager after this.

    It fences all GPUs of the node: seats of others may be on their way there. Where more was done than the ledger has,
    the epoch goes above what an earlier manager may just have sent, also with the clock set back.
    """
    remembered = max((begun.ledger.epoch, *(ticket.epoch for ticket in open_tickets(begun.ledger, begun.tickets))))
    highest = max(remembered, begun.published.epoch, begun.seen)
    behind = begun.ledger.lost or highest > remembered
    node.epoch = max(node.epoch, highest + _JOBS_LATE * behind)
    entries = {entry.seat: entry for entry in begun.ledger.seats}
    targets = []
    for seat, pod, entry in _owned(node, begun.owners, entries):
        running = pod.container_id if pod.running else None
        container_id = running or (entry.durable.container_id if entry else "")
        if container_id:
            known = node.unowned_seat(seat.id, seat.home)
            node.own(known, pod)
            known.durable.container_id = container_id
            known.durable.vram_bytes = entry.durable.vram_bytes if entry else 0
            target = known.target(view.group_with_gpus(node, seat, entry.on) if entry else None)
            kept = max(sum(_kept_on(gpu, one) for one in begun.ledger.seats) for gpu in target.gpus)
            targets.append(target.model_copy(update={"kept_bytes": kept}))
    gpus = sorted({uuid for group in node.setup.groups for uuid in group.uuids})
    epoch = node.next_epoch(now)
    question = AskJobs(cause="recovery", node=node.name, epoch=epoch, targets=tuple(targets), gpus=tuple(gpus))
    node.effects.append(question)


def _kept_on(gpu: str, entry: LedgerEntry) -> int:
    """VRAM on this GPU that a seat's processes keep while parked, as the ledger has it."""
    gpus = entry.on or entry.gpus
    return -(-entry.durable.residue_bytes // len(gpus)) if gpu in gpus and entry.durable.measured else 0


_JOBS_LATE = 3_600_000
"""Epochs, about milliseconds: by how much a job on its way may lie above all that is remembered."""
_ROWS_LATE = 60_000
"""Epochs, about milliseconds: by how much rows of the roster may lie behind the events, which routers have seen too.
A seq is about a microsecond."""


def _above(known: int, published: int, late: int) -> int:
    """A number above those that routers have seen, when the ledger was lost or is older than the roster; else 0."""
    return published + late if published > known else 0


def _owned(
    node: NodeState, owners: Owners, entries: dict[str, LedgerEntry]
) -> list[tuple[ManagedSeat, SeatPod, LedgerEntry | None]]:
    """The owned seats. A pod that only the ledger knows is gone from kubelet, and its processes may not be."""
    pods = {pod.seat: pod for pod in owners.pods}
    found = []
    for seat in node.seats.values():
        pod, entry = pods.get(seat.id), entries.get(seat.id)
        if entry is not None and (pod is None or pod.uid != entry.pod_uid):
            pod = _departed(entry)
        if pod is not None:
            found.append((seat, _not_before(pod, entry), entry))
    return found


def _not_before(pod: SeatPod, entry: LedgerEntry | None) -> SeatPod:
    """The pod; one from before the container that the ledger has seen running (the API server's store went back) says
    nothing about containers."""
    known = entry.durable if entry is not None and entry.pod_uid == pod.uid else None
    if known is None or not known.runs_after(pod.restarts):
        return pod
    return replace(pod, container_id=known.container_id, restarts=known.restarts, running=True)


def _departed(entry: LedgerEntry) -> SeatPod:
    """The pod that the ledger knows and kubelet does not list any more."""
    namespace, _, name = entry.pod.rpartition("/")
    return SeatPod(
        seat=entry.seat,
        resource="",
        namespace=namespace,
        name=name,
        uid=entry.pod_uid,
        container="",
        container_id=entry.durable.container_id or None,
        deleting=True,
        annotations=entry.annotations,
    )


# --- recovery ---------------------------------------------------------------------------------------------------------


def open_tickets(ledger: Ledger, tickets: tuple[SeatTicket, ...]) -> tuple[SeatTicket, ...]:
    """The tickets that are younger than the ledger and may still lead to a process: it, or its last record, was lost.

    An older one that the ledger has no start for is over: its seat was freed.
    """
    return tuple(one for one in tickets if one.epoch > ledger.epoch and one.age_seconds <= START_DEADLINE_SECONDS)


def evidence_by_seat(reply: JobReply) -> dict[tuple[str, str], SeatProgress]:
    """What the checkpointer found, by seat and pod UID. It does not look at the seats of a job under way: a container
    whose processes this job found gone counts as gone."""
    found = {(seat.seat, seat.pod_uid): seat for seat in reply.seats}
    for progress in (progress for status in reply.jobs if not status.done for progress in status.park):
        seen = found.get((progress.seat, progress.pod_uid))
        if progress.outcome == "gone" and seen is not None and seen.container_id == progress.container_id:
            found[progress.seat, progress.pod_uid] = progress
    return found


def _unused(
    known: Recovered, evidence: dict[tuple[str, str], SeatProgress], tickets: tuple[SeatTicket, ...]
) -> tuple[SeatTicket, ...]:
    """Open tickets without those that a container has used: the pods show one, and the driver does not find it
    gone (then it may be the one before, and the list stale)."""
    running = {pod.seat: pod.uid for pod in known.owners.pods if pod.running}
    gone = {key for key, seen in evidence.items() if driver_evidence(seen) is _D.GONE}
    return tuple(one for one in tickets if one.seat not in running or (one.seat, running[one.seat]) in gone)


def with_tickets(ledger: Ledger, tickets: tuple[SeatTicket, ...], owners: Owners) -> Ledger:
    """The ledger with an entry for each of these tickets, in the place of an older one. A container that the pods show
    there has ended before."""
    entries = {entry.seat: entry for entry in ledger.seats}
    ended = {(pod.seat, pod.uid): pod.container_id or "" for pod in owners.pods}
    for ticket in tickets:
        known = entries.get(ticket.seat)
        if known is None or known.pod_uid != ticket.pod_uid:
            known = LedgerEntry(seat=ticket.seat, state=S.STARTING, epoch=0, lease=True, pod="", pod_uid=ticket.pod_uid)
        container = ended.get((ticket.seat, ticket.pod_uid), known.durable.container_id)
        durable = replace(known.durable, ticket=ticket.call, seen_running=False, container_id=container)
        durable.vram_bytes = durable.vram_bytes or ticket.vram_bytes
        now = {"state": S.STARTING, "lease": True, "epoch": ticket.epoch, "on": (), "durable": durable}
        entries[ticket.seat] = known.model_copy(update=now)
    epoch = max((ledger.epoch, *(ticket.epoch for ticket in tickets)))
    return ledger.model_copy(update={"seats": tuple(entries.values()), "epoch": epoch})


def recover(node: NodeState, known: Recovered, now: Now) -> None:
    """Fill the state; from then on the board decides."""
    evidence = evidence_by_seat(known.reply)
    tickets = _unused(known, evidence, open_tickets(known.ledger, known.tickets))
    ledger = with_tickets(known.ledger, tickets, known.owners)
    published = _above(ledger.epoch, known.published.epoch, _ROWS_LATE)
    node.epoch = max(node.epoch, ledger.epoch, known.reply.highest_epoch, published)
    node.seq = max(node.seq, ledger.seq, _above(ledger.seq, known.published.seq, 1000 * _ROWS_LATE))
    node.move_seconds = ledger.move_seconds
    operations.restore(node, ledger)
    entries = {entry.seat: _doubted(entry) if ledger.lost else entry for entry in ledger.seats}
    listed = {(pod.seat, pod.uid) for pod in known.owners.pods}
    for seat, pod, entry in _owned(node, known.owners, entries):
        node.own(seat, pod)
        seat.owner.misses = 0 if (seat.id, pod.uid) in listed else 2
        _recover_seat(node, seat, pod, entry, evidence.get((seat.id, pod.uid)), now)
    _wait_for_lost_tickets(node, known, now)
    for ticket in tickets:
        seat = node.seats[ticket.seat]
        given = now.wall + -ticket.age_seconds
        seat.entered_wall, seat.gate.ticket_given = given, given
    for status in sorted(known.reply.jobs, key=lambda status: status.epoch):  # a seat may be in two: the later counts
        if not status.done and not status.op.startswith(REHEARSAL):
            _adopt(node, status, entries, now)
        elif not status.done:
            _starts_on(node, status, now)
    for seat in node.seats.values():
        _assume_residue(seat, entries.get(seat.id))
        for rider in RIDERS:
            rider.found(seat, remembered=seat.id in entries)
        if seat.state not in FROZEN_STATES:  # a switch that goes on may have frozen it a moment ago
            seat.durable.freeze = Freeze()
    serving = {seat.seat for seat in known.reply.seats if seat.outcome == "active" and seat.gpus}
    _quarantine_conflicts(node, serving)  # after that: both seats of a switch seem to live while it is under way
    _publish(node, entries, now, behind=published > 0)
    node.routers.remember((*ledger.routers.items(), *ledger.more_routers), now)
    node.routers.unsettle(now)
    node.recovered = True


def _recover_seat(
    node: NodeState, seat: ManagedSeat, pod: SeatPod, entry: LedgerEntry | None, seen: SeatProgress | None, now: Now
) -> None:
    """One owned seat, by the table."""
    container = container_evidence(pod, entry)
    asked = pod.container_id if pod.running else entry.durable.container_id if entry is not None else ""
    seen = seen if seen is not None and seen.container_id == asked else None
    driver = driver_evidence(seen)
    known = entry.state if entry is not None else S.FREE
    inherits = known is S.QUARANTINED and _waits(entry)
    found = RECOVERED[container, driver, S.STARTING if inherits else known]
    if inherits and found.state is S.STARTING:
        found = replace(found, state=S.QUARANTINED, reason=_INHERITED)
    group, located = _group(node, seat, found, entry, seen, fresh=container is _C.NEW)
    if not located:
        found = _unlocated(found, seen)
    if entry is not None:
        seat.epoch, seat.durable = entry.epoch, entry.durable.copy()
    elif pod.running:
        seat.durable.started = True
        seat.durable.vram_bytes = seen.vram_bytes if seen is not None else 0
    if pod.running and (entry is None or container is _C.NEW):
        seat.durable.begins(pod.container_id or "", pod.restarts)
        seat.durable.residue_bytes, seat.durable.measured = 0, False  # of the container before
    seat.durable.seen_running, seat.processes_gone = found.process, not found.process
    seat.durable.unlocated = not located
    seat.durable.conflict &= located and found.state in (S.QUARANTINED, S.RELEASING)
    seat.outlives_list = found.process and driver in _EXISTS and not (pod.running or pod.deleting)
    seat.state, seat.lease = found.state, found.lease
    seat.reason = found.reason or (seen.reason if seen is not None and driver in (_D.LOST, _D.QUARANTINED) else "")
    seat.entered, seat.entered_wall = now.unix, now.wall
    seat.gate.ticket_open, seat.gate.ticket_given = found.ticket_open, now.wall
    seat.residence.group = group
    if seat.state is S.ACTIVE:
        seat.usage.active_since = seat.usage.busy = now.model


_COPIED = frozenset({S.PARKED, S.ACTIVATING, S.MIGRATING})


def _assume_residue(seat: ManagedSeat, entry: LedgerEntry | None) -> None:
    """A seat whose park the ledger does not know keeps an assumed residue."""
    known = entry is not None and entry.state in _COPIED and seat.durable.measured
    if seat.pod is not None and not known and seat.state in _COPIED:
        seat.assume_residue()


def _wait_for_lost_tickets(node: NodeState, known: Recovered, now: Now) -> None:
    """A seat with an owner and without a process may have a ticket that was lost with the ledger and its seat folder.
    Its own container is waited for as long as a start may take."""
    latest = now.wall + START_DEADLINE_SECONDS
    for name, until in known.ledger.unaccounted.items():
        seat = node.seats.get(name)
        if seat is not None and not seat.durable.seen_running and WallTime(until) > now.wall:
            node.unaccounted[name] = min(WallTime(until), latest)  # an instant of another boot proves nothing
    remembered = {ticket.seat for ticket in known.tickets}
    for seat in node.seats.values() if known.ledger.lost else ():
        held = seat.durable.seen_running or seat.gate.ticket_open
        if seat.pod is not None and not held and seat.id not in remembered:
            node.unaccounted[seat.id] = latest


def _doubted(entry: LedgerEntry) -> LedgerEntry:
    """An entry of a ledger without its last record: the seat may have moved since."""
    return entry.model_copy(update={"durable": replace(entry.durable, unlocated=True)})


def _group(
    node: NodeState,
    seat: ManagedSeat,
    found: RecoveredAs,
    entry: LedgerEntry | None,
    seen: SeatProgress | None,
    *,
    fresh: bool,
) -> tuple[Group, bool]:
    """Where a seat is: by evidence, else as the ledger has it; and whether that is certain.

    ``fresh``: its container is younger than the ledger's entry, which tells nothing about it.

    A container starts, and gets its first context, on its home group. Without a ledger, a seat may be on any group of
    its pool; one that was being moved may be on either. What its pod allows tells nothing: it may allow less than when
    the seat moved.
    """
    if not found.process:
        return seat.home, True
    if (seen_on := view.group_with_gpus(node, seat, seen.gpus if seen is not None else ())) is not None:
        return seen_on, True
    recorded = entry is not None and not entry.durable.unlocated
    if recorded and found.state is S.STARTING:
        return seat.home, True
    known = recorded and not fresh and entry is not None and entry.state is not S.MIGRATING
    if not known and seen is not None and seen.no_context:
        return seat.home, True
    group = view.group_with_gpus(node, seat, entry.on if entry is not None else ()) or seat.home
    return group, known or not node.groups[seat.home.name].peers


def _unlocated(found: RecoveredAs, seen: SeatProgress | None) -> RecoveredAs:
    """What a seat is that may be on any group of its pool: it holds all of them, until evidence names its GPUs."""
    match found.state:
        case S.PARKED:
            return RecoveredAs(S.LOST, False, True, reason=PARKED_NOWHERE)
        case S.ACTIVE | S.STARTING | S.QUARANTINED:
            why = f" ({seen.reason})" if seen is not None and seen.reason else ""
            text = f"neither the ledger nor the driver tells on which GPU of its pool it is{why}"
            return replace(found, state=S.QUARANTINED, reason=f"{text}; if that lasts, delete its pod")
    return found


def _adopt(node: NodeState, status: JobStatus, entries: dict[str, LedgerEntry], now: Now) -> None:
    """Go on with a switch that the checkpointer has not finished.

    All seats that it parks are leaving, though the switch names one victim. A seat whose pod is another one now has
    processes that the job does not touch: it stays as its evidence has it.
    """
    parks = [(node.seats[p.seat], p) for p in status.park if p.seat in node.seats]
    victim = parks[0][0] if parks else None
    incoming = node.seats.get(status.activate.seat) if status.activate else None
    concerned = incoming or victim
    if concerned is None:
        return
    state = node.groups.get(status.group)
    group = state.group if state is not None else (victim or concerned).group
    node.switches[group.name] = GroupSwitch(
        op=status.op,
        epoch=status.epoch,
        group=group.name,
        victim=victim.id if victim else None,
        incoming=incoming.id if incoming else None,
        cause=concerned.default_cause,
        phase=SwitchPhase.JOB,
        drain=Drain(deadline=now.model),
        times=SwitchTimes(decided=now.wall, drained=now.wall),
        job=JobExchange(journaled=True),
    )
    for seat, progress in parks:
        if _concerns(progress, seat):
            parked = progress.outcome == "parked"
            seat.state, seat.lease = (S.PARKED, False) if parked else (S.PARKING, True)
            if parked:
                seat.learn_park(progress)
            seat.epoch, seat.op, seat.reason = status.epoch, status.op, ""
            seat.residence.group, seat.durable.unlocated = group, False
    if incoming is not None and status.activate is not None and _concerns(status.activate, incoming):
        _adopt_incoming(incoming, group, entries.get(incoming.id), free=switch.victims_off(node, status))
        incoming.epoch, incoming.op = status.epoch, status.op


def _starts_on(node: NodeState, status: JobStatus, now: Now) -> None:
    """The seat of a rehearsal starts, and follows it; where the ledger was lost its processes seem to serve. It has not
    moved yet."""
    for progress in status.park:
        seat = node.seats.get(progress.seat)
        if seat is None or not (seat.lease and _concerns(progress, seat)):
            continue
        if seat.state is S.ACTIVE or (seat.state is S.QUARANTINED and seat.durable.unlocated):
            seat.state, seat.durable.unlocated, seat.reason = S.STARTING, False, ""
        if seat.state is S.STARTING:
            seat.rehearsal = Rehearsal(status.op, status.epoch, progress.container_id, now.wall)


def _concerns(progress: SeatProgress, seat: ManagedSeat) -> bool:
    """True if the seat has a process, and it is the one that the job names, not one that comes of a later ticket."""
    return switch.about(seat, progress) and seat.durable.seen_running and not seat.gate.ticket_open


def _adopt_incoming(seat: ManagedSeat, group: Group, entry: LedgerEntry | None, *, free: bool) -> None:
    """The seat that a switch brings back to a group.

    (1) The victim still holds the GPUs: it is parked. (2) They are free: it holds them. (3) It comes from another
    group. (4) Nothing tells from which: if it did not arrive, it could not be restored.
    """
    if seat.durable.unlocated and (entry is None or entry.durable.unlocated):  # (4)
        seat.state, seat.reason = S.LOST, PARKED_NOWHERE
        return
    seat.durable.unlocated, seat.reason = False, ""
    seat.state, seat.lease = S.PARKED, False  # (1)
    if not free:
        return
    elsewhere = seat.group.name != group.name
    seat.state, seat.lease = S.ACTIVATING, True  # (2)
    if elsewhere or (entry is not None and entry.state is S.MIGRATING):  # (3)
        seat.state = S.MIGRATING
        seat.residence.parked_on = seat.group if elsewhere else seat.home
    seat.residence.group = group


def _quarantine_conflicts(node: NodeState, listed: set[str]) -> None:
    """More seats on a group than may hold it, or seats of two groups on one GPU: the evidence contradicts itself.

    ``listed``: seats whose processes the driver lists there. Where those alone are no conflict, they serve on, and only
    the others are quarantined.
    """
    for group in node.setup.groups:
        holders = view.holders(node, group)
        others = view.overlapping(node, group) if holders else []
        if len(holders) > group.slots or others:
            names = ", ".join(seat.id for seat in (*holders, *others))
            sure = [seat for seat in holders if seat.id in listed]
            clear = len(sure) <= group.slots and not any(seat.id in listed for seat in others)
            for seat in holders:
                if clear and seat in sure:
                    seat.durable.conflict = False
                    continue
                seat.state, seat.durable.conflict = S.QUARANTINED, True
                seat.reason = f"{names} all seem to hold group {group.name}; delete the pods that should not"


_AT_REST = frozenset({S.WAITING, S.PARKED, S.BACKOFF, S.ACTIVE, S.STARTING, S.QUARANTINED})


def _publish(node: NodeState, entries: dict[str, LedgerEntry], now: Now, *, behind: bool) -> None:
    """Publish what is not as the ledger had it, or all, if it lies ``behind`` the roster; what is, is only written to
    the roster again.

    Whether a kill or a release was ever received is not known: send it again, it does no harm twice.
    """
    switching = {seat for switch in node.switches.values() for seat in (switch.victim, switch.incoming)}
    owned = [seat for seat in node.seats.values() if seat.pod is not None]
    for seat in owned:
        entry = entries.get(seat.id)
        as_known = entry is not None and entry.state is seat.state and not behind
        if as_known and seat.state in _AT_REST:
            continue
        if seat.id not in switching:
            seat.epoch = node.next_epoch(now)
        node.emit(seat, EVENT_OF_STATE[seat.state], now, previous=entry.state if entry else S.FREE)
    for seat in owned:
        kind = KillJob if seat.state is S.LOST else ReleaseJob
        if seat.state is S.LOST or (seat.state is S.RELEASING and seat.durable.seen_running):
            job = kind(cause=seat.default_cause, node=node.name, epoch=seat.epoch, target=seat.target())
            node.effects.append(job)


# --- the ledger -------------------------------------------------------------------------------------------------------


def ledger(node: NodeState, boot: str, last: Ledger | None = None) -> Ledger:
    """What must survive a restart. Of ``last`` the entries that are still true are taken over; where nothing changed,
    it is returned itself."""
    present = sorted(node.routers.present)
    routers = dict(present)
    known = {entry.seat: entry for entry in last.seats} if last is not None else {}
    seats = tuple(_entry(seat, seat.pod, known.get(seat.id)) for seat in node.seats.values() if seat.pod is not None)
    found = Ledger(
        boot_id=boot,
        epoch=node.epoch,
        seq=node.seq,
        seats=seats,
        routers=routers,
        more_routers=tuple(router for router in present if routers[router[0]] != router[1]),
        move_seconds=node.move_seconds,
        orders=tuple(replace(order) for order in node.orders.values()),
        drains=tuple(drain.op for drain in node.drains.values()),
        unaccounted={seat: float(until) for seat, until in node.unaccounted.items()},
    )
    return last if last is not None and found == last else found


def _entry(seat: ManagedSeat, pod: SeatPod, known: LedgerEntry | None) -> LedgerEntry:
    """The seat's entry; ``known`` itself, if that is still true."""
    facts: dict[str, Any] = {
        "seat": seat.id,
        "state": seat.state,
        "epoch": seat.epoch,
        "lease": seat.lease,
        "pod": pod.pod,
        "pod_uid": pod.uid,
        "annotations": pod.annotations,
        "gpus": seat.home.uuids,
        "on": seat.group.uuids if seat.group.name != seat.home.name else (),
        "durable": seat.durable,
    }
    if known is not None and vars(known) == facts:
        return known
    return LedgerEntry(**facts | {"durable": seat.durable.copy()})
