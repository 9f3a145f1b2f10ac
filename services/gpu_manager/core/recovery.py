"""What a manager takes for true after its start: the ledger remembers, evidence decides. Pure.

Each fact of a seat is what the youngest evidence shows, and its state follows (``facts.py``). A live process without
park evidence holds its group, also when the ledger is lost; when more seats hold a group than may, those that were not
granted it are ended, or where that does not tell, all are quarantined and nothing is granted there. An unfinished job
of the checkpointer is a switch again, whose status is taken in as on every day. A drain that was under way is over: no
router was asked to go on with it, so the seat serves.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from kybernate.messages import EVENT_OF_STATE, AskJobs, JobReply, JobStatus, KillJob, ReleaseJob, SeatProgress
from kybernate.seat import COMING, SeatState, container_of
from kybernate.topology import Group
from services.gpu_manager.core import reports, starts, switch, view
from services.gpu_manager.core.facts import Facts, Owner, Process, Promise, Residence, Ticket, changed
from services.gpu_manager.core.inputs import Now, RecoveryBegun, SeatTicket, WallTime
from services.gpu_manager.core.managed_seat import PARKED_NOWHERE, REHEARSAL, ManagedSeat, Rehearsal
from services.gpu_manager.core.riders import operations
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeState, Rider, SwitchPhase
from services.gpu_manager.ledger import Ledger, LedgerEntry

S = SeatState


# --- the facts of a seat ----------------------------------------------------------------------------------------------

FORGOTTEN = (
    "the ledger was lost, and its seat folder has no ticket: its engine is ended, also one on its way, and starts cold"
)
_CONDEMNED = "the driver reports it as parked while it is killed"


@dataclass(frozen=True)
class Evidence:
    """What is known of an owned seat when the manager starts. Each fact follows from the best of it."""

    pod: SeatPod
    entry: LedgerEntry | None
    """What the ledger remembers of it; None: nothing."""
    seen: SeatProgress | None
    """What the checkpointer has of the processes of its present container; None: nothing, so they count as alive."""
    permitted: bool = False
    """Its last ticket is not over: where kyb-run lives, that no process does now proves nothing about a start."""
    folder_lost: bool = False
    """Its folder, and the ledger or its last record."""

    @property
    def driver(self) -> str:
        """The checkpointer's word; empty: none."""
        return "" if self.seen is None or self.early else self.seen.outcome

    @property
    def early(self) -> bool:
        """kyb-run is alone, and may still start an engine."""
        begins = self.fresh or self.state in (S.STARTING, S.RELEASING, S.QUARANTINED)
        alone = self.seen is not None and self.seen.outcome == "gone" and self.seen.keeper
        return alone and self.permitted and begins

    @cached_property
    def fresh(self) -> bool:
        """The pods show a container that the ledger does not know: it was started with a ticket."""
        known = self.entry.durable.container_id if self.entry is not None else self.pod.container_id
        return self.pod.running and (self.pod.container_id or "") != container_of(known or "")

    @property
    def state(self) -> SeatState:
        """The state that the ledger remembers."""
        return self.entry.state if self.entry is not None else S.FREE

    @property
    def unused(self) -> bool:
        """The ledger has a ticket and no process of it; the seat may be quarantined or deleted since."""
        return self.entry is not None and self.entry.lease and not self.entry.seen_running

    @property
    def forgotten(self) -> bool:
        """Nothing tells what let its engine in, or whether a container is on its way. The record before the last one
        tells of an engine that lives in the same container: what had ended would be in it."""
        known = self.entry is not None and self.entry.seen_running and not self.fresh
        return self.folder_lost and not (known and self.driver in (*reports.ON_GPUS, "parked"))

    @property
    def condemned(self) -> bool:
        """It was forgotten, now or before the last restart: it is ended, as is what still comes."""
        return self.forgotten or (self.state is S.LOST and self.unused)

    @cached_property
    def ticket(self) -> Ticket:
        """One that was not used: a container that the pods show beside it has ended before, but for one that the ledger
        does not know. A start that was under way keeps its ticket."""
        goes, runs = self.pod.deleting, self.pod.running
        waits = self.unused and not self.fresh
        if self.entry is None or not (waits or (self.state is S.STARTING and not (goes or runs))):
            return Ticket.NONE
        return Ticket.FORMER if self.entry.inherited else Ticket.OPEN

    @cached_property
    def alive(self) -> bool:
        """As the driver has it, also against the pods, whose list may be stale; else as they have it, and of a pod that
        leaves as the ledger has it. What they or the driver's copy show beside an open ticket was before that."""
        shown = self.pod.running and self.ticket is Ticket.NONE
        if self.pod.deleting and self.entry is not None:
            shown = self.fresh or self.entry.seen_running
        if self.driver in reports.ON_GPUS or (self.driver == "parked" and self.ticket is Ticket.NONE):
            return True
        return shown and self.driver != "gone"

    @property
    def residence(self) -> Residence:
        """As the driver has it, but not what is being killed, since a part of its memory stays in use. Where the driver
        is silent about a pod that leaves, as the ledger has it."""
        remembers = self.pod.deleting and not self.fresh and self.driver not in reports.ON_GPUS
        parked = remembers and self.entry is not None and not self.entry.lease
        if self.driver == "parked":
            parked = self.state is not S.LOST or self.fresh
        if not self.alive:
            return Residence.NOWHERE
        return Residence.RAM if parked and self.process is Process.RUNS else Residence.VRAM

    @cached_property
    def process(self) -> Process:
        """Whether it has one, and serves."""
        if self.alive:
            begins = self.fresh or self.state is S.STARTING or self.early
            return Process.LOADS if begins and self.driver != "parked" else Process.RUNS
        if self.ticket is not Ticket.NONE or self.pod.deleting:
            return Process.NONE
        ran = self.pod.running or (self.entry is not None and self.entry.durable.container_id)
        return Process.ENDED if ran else Process.NONE

    @property
    def promise(self) -> tuple[Promise, str]:
        """To end it or to leave it alone, as the driver says or the ledger remembers, and why. A new container has no
        promise."""
        if self.condemned:
            return Promise.ENDS, FORGOTTEN
        heir = self.state is S.QUARANTINED and self.unused
        if heir and (self.ticket is not Ticket.NONE or self.process is Process.LOADS):
            return Promise.HANDS_OFF, "its container may start by an open ticket beside seats that leave it no room"
        if not self.alive or self.ticket is not Ticket.NONE:
            return Promise.NONE, ""
        before, why = S.FREE if self.fresh else self.state, self.seen.reason if self.seen is not None else ""
        match self.driver:
            case "lost":
                return Promise.ENDS, why
            case "quarantined":
                return Promise.HANDS_OFF, why
            case "parked":
                return (Promise.ENDS, _CONDEMNED) if before is S.LOST else (Promise.NONE, "")
        return {S.LOST: Promise.ENDS, S.QUARANTINED: Promise.HANDS_OFF}.get(before, Promise.NONE), ""

    def facts(self) -> tuple[Facts, str]:
        """The facts of the seat, and the reason of its state; empty where that has none."""
        pod, process, (promise, reason) = self.pod, self.process, self.promise
        if pod.deleting:
            promise, reason = Promise.NONE, "its pod is being deleted"
        elif process is Process.ENDED:
            gone = pod.running and self.driver == "gone"
            reason = reason or ("its processes are gone" if gone else "its container is not running")
        waits = self.forgotten and not self.alive
        return Facts(
            owner=Owner.LEAVING if pod.deleting else Owner.POD,
            process=Process.NONE if waits else process,
            ticket=Ticket.OPEN if waits else self.ticket,
            residence=self.residence,
            promise=promise,
            unlisted=self.alive and self.driver in (*reports.ON_GPUS, "parked") and not (pod.running or pod.deleting),
        ), reason


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
        if container_id := _present(pod, entry):
            known = node.unowned_seat(seat.id, seat.home)
            node.own(known, pod)
            known.durable.container_id = container_id
            known.durable.vram_bytes = entry.durable.vram_bytes if entry else 0
            target = known.target(view.group_with_gpus(node, seat, entry.on) if entry else None)
            kept = max(sum(_kept_on(gpu, one) for one in begun.ledger.seats) for gpu in target.gpus)
            targets.append(target.model_copy(update={"kept_bytes": kept}))
    gpus = sorted({uuid for group in node.setup.groups for uuid in group.uuids})
    epoch = node.next_epoch(now)
    ops = tuple(sorted({op for entry in begun.ledger.seats if (op := _op_of(node, entry))}))
    question = AskJobs(cause="recovery", node=node.name, epoch=epoch, ops=ops, targets=tuple(targets), gpus=tuple(gpus))
    node.effects.append(question)


def _op_of(node: NodeState, entry: LedgerEntry) -> str:
    """The switch that had the seat in a job, as ``switch.begin`` names it; empty: none had."""
    uuids = {*(entry.on or entry.gpus)} if entry.state in (S.PARKING, *COMING) else None
    name = next((group.name for group in node.setup.groups if {*group.uuids} == uuids), "")
    return name and f"{name}-{entry.epoch}"


def _present(pod: SeatPod, entry: LedgerEntry | None) -> str:
    """The container that the pods show running, with the start inside it that the ledger has; else the ledger's."""
    known = entry.durable.container_id if entry is not None else ""
    shown = (pod.container_id or "") if pod.running else ""
    return known if container_of(known) == shown or not shown else shown


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
    """The owned seats. A pod that only the ledger knows is gone from kubelet, and its processes may not be; one that is
    listed without its seat is still its owner, as in ``allocations.on_pods``: kubelet may be starting."""
    pods = {pod.seat: pod for pod in owners.pods}
    found = []
    for seat in node.seats.values():
        pod, entry = pods.get(seat.id), entries.get(seat.id)
        if entry is not None and (pod is None or pod.uid != entry.pod_uid):
            pod = _remembered(entry, gone=pod is not None or entry.pod_uid not in owners.listed)
        if pod is not None:
            found.append((seat, _not_before(pod, entry), entry))
    return found


def _not_before(pod: SeatPod, entry: LedgerEntry | None) -> SeatPod:
    """The pod; one from before the container that the ledger has seen running (the API server's store went back) says
    nothing about containers."""
    if entry is None or entry.pod_uid != pod.uid or not entry.seen_running or pod.restarts >= entry.durable.restarts:
        return pod
    return replace(pod, container_id=entry.durable.container_id, restarts=entry.durable.restarts, running=True)


def _remembered(entry: LedgerEntry, *, gone: bool) -> SeatPod:
    """The pod that the ledger knows and kubelet does not show with its seat. Its address is not known."""
    namespace, _, name = entry.pod.rpartition("/")
    return SeatPod(
        seat=entry.seat,
        namespace=namespace,
        name=name,
        uid=entry.pod_uid,
        container="",
        container_id=entry.durable.container_id or None,
        running=entry.seen_running and not gone,
        restarts=entry.durable.restarts,
        deleting=gone,
        annotations=entry.annotations,
    )


# --- recovery ---------------------------------------------------------------------------------------------------------


def open_tickets(ledger: Ledger, tickets: tuple[SeatTicket, ...]) -> tuple[SeatTicket, ...]:
    """The tickets that are younger than the ledger and may still lead to a process: it, or its last record, was lost.

    An older one that the ledger has no start for is over: its seat was freed.
    """
    return tuple(one for one in tickets if one.epoch > ledger.epoch and one.age_seconds <= starts.KUBELET_SECONDS)


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
    owners: Owners, evidence: dict[tuple[str, str], SeatProgress], tickets: tuple[SeatTicket, ...]
) -> tuple[SeatTicket, ...]:
    """Open tickets without those that a container has used: the pods show one, and the driver does not find it
    gone (then it may be the one before, and the list stale)."""
    running = {pod.seat: pod.uid for pod in owners.pods if pod.running}
    gone = {key for key, seen in evidence.items() if seen.outcome == "gone"}
    return tuple(one for one in tickets if one.seat not in running or (one.seat, running[one.seat]) in gone)


def with_tickets(
    ledger: Ledger, tickets: tuple[SeatTicket, ...], owners: Owners, groups: Sequence[Group] = ()
) -> Ledger:
    """The ledger with an entry for each of these tickets, in the place of an older one. A container that the pods show
    there has ended before. Where its start was on a group that is none of these any more, its place is not known."""
    gpus = {group.name: group.uuids for group in groups} | {"": ()}
    entries = {entry.seat: entry for entry in ledger.seats}
    ended = {(pod.seat, pod.uid): pod.container_id or "" for pod in owners.pods}
    for ticket in tickets:
        known = entries.get(ticket.seat)
        if known is None or known.pod_uid != ticket.pod_uid:
            known = LedgerEntry(seat=ticket.seat, state=S.STARTING, epoch=0, lease=True, pod="", pod_uid=ticket.pod_uid)
        container = ticket.container or ended.get((ticket.seat, ticket.pod_uid), known.durable.container_id)
        durable = replace(known.durable, ticket=ticket.call, container_id=container)
        durable.vram_bytes = durable.vram_bytes or ticket.vram_bytes
        now = {"state": S.STARTING, "lease": True, "seen_running": False, "epoch": ticket.epoch, "durable": durable}
        entries[ticket.seat] = known.model_copy(update=now | {"on": gpus.get(ticket.group, (ticket.group,))})
    epoch = max((ledger.epoch, *(ticket.epoch for ticket in tickets)))
    return ledger.model_copy(update={"seats": tuple(entries.values()), "epoch": epoch})


def recover(node: NodeState, known: RecoveryBegun, reply: JobReply, now: Now) -> None:
    """Fill the state, by what was ``known`` before the checkpointer was asked, and its answer; then the board decides.

    (1) What the ledger remembers, with the tickets that are younger. Without its last record a seat may have moved
    since. (2) The facts of each owned seat. (3) Unfinished jobs, as on every day; of two about one seat the later
    counts; and what failed in those that have ended. (4) What follows from the states: residues, and what riders keep.
    (5) Holds that contradict each other: after (3), since both seats of a switch seem to live while it is under way.
    (6) What is not as the ledger has it is published once.
    """
    evidence = evidence_by_seat(reply)
    tickets = _unused(known.owners, evidence, open_tickets(known.ledger, known.tickets))
    ledger = with_tickets(known.ledger, tickets, known.owners, node.setup.groups)  # (1)
    published = _above(ledger.epoch, known.published.epoch, _ROWS_LATE)
    node.epoch = max(node.epoch, ledger.epoch, reply.highest_epoch, published)
    node.seq = max(node.seq, ledger.seq, _above(ledger.seq, known.published.seq, 1000 * _ROWS_LATE))
    node.move_seconds = ledger.move_seconds
    operations.restore(node, ledger)
    doubt = {"unlocated": True} if ledger.lost else {}
    entries = {entry.seat: entry.model_copy(update=doubt) for entry in ledger.seats}
    listed = {(pod.seat, pod.uid) for pod in known.owners.pods}
    groups = node.groups
    last, folders = {(one.seat, one.pod_uid): one for one in known.tickets}, {one.seat for one in known.tickets}
    for seat, pod, entry in _owned(node, known.owners, entries):  # (2)
        node.own(seat, pod)
        ticket = last.get((seat.id, pod.uid))
        if ticket is not None and ticket.group in groups:
            seat.memory_on = groups[ticket.group].group
        seat.pod_misses = 2 if pod.deleting and (seat.id, pod.uid) not in listed else 0
        lost = ledger.lost and seat.id not in folders
        seen, end = evidence.get((seat.id, pod.uid)), WallTime(inf) if ticket is None else ticket.expires
        seen = seen if seen is not None and seen.container_id == _present(pod, entry) else None
        _recover_seat(node, seat, Evidence(pod, entry, seen, end > now.wall, lost), now)
        starts.recovered(seat, end, now)
    for ticket in tickets:
        seat = node.seats[ticket.seat]
        seat.entered_wall = now.wall + -ticket.age_seconds
        away = seat.group is not seat.home
        seat.durable.way, seat.durable.came_from = ("restart", seat.home.name) if away else ("", "")
    for status in sorted(reply.jobs, key=lambda status: status.epoch):  # (3)
        if not status.done and not status.op.startswith(REHEARSAL):
            _adopt(node, status, entries, now)
        elif not status.done:
            _starts_on(node, status, now)
        else:
            _judge(node, status, entries)
    node.effects.clear()  # (6) publishes what came of it
    for seat in node.seats.values():  # (4)
        if seat.acts_as is S.PARKED or seat.state in COMING:
            seat.assume_residue()
        for rider in node.riders[Rider.found]:
            rider.found(node, seat, now, remembered=seat.id in entries)
    serving = {seat.seat for seat in reply.seats if seat.outcome == "active" and seat.gpus}
    behind = ledger.lost or tickets or published
    _settle_conflicts(node, serving, set() if behind else _granted(node, entries, reply))  # (5)
    _publish(node, entries, now, behind=published > 0)  # (6)
    node.routers.remember((*ledger.routers.items(), *ledger.more_routers), now)
    node.routers.unsettle(now)
    node.recovered = True


def _recover_seat(node: NodeState, seat: ManagedSeat, evidence: Evidence, now: Now) -> None:
    """One owned seat.

    (1) Its facts. (2) Where it is. A container
    starts, and gets its first context, at home; the ledger tells nothing about the place of a younger one, and of one
    that was being moved. (3) What the ledger has learned of it; of the container before nothing about memory. (4) A
    restart has parked it; some releases wrote that it waits.
    """
    pod, entry, fresh = evidence.pod, evidence.entry, evidence.fresh
    facts, reason = evidence.facts()  # (1)
    begins = not facts.alive or facts.state is S.STARTING
    was = None
    if entry is not None and (evidence.unused if fresh else facts.alive or facts.waits):
        seat.group = was = view.group_with_gpus(node, seat, entry.on) or seat.home
    known = entry is not None and not entry.unlocated and (begins or not (fresh or entry.state is S.MIGRATING))
    if not facts.alive:
        known = not (facts.waits and entry is not None and entry.on and seat.group is seat.home)
    place = view.place(node, seat, evidence.seen if facts.alive else None, known=known)  # (2)
    unlocated = place is None or evidence.condemned
    if unlocated:
        facts, reason = _unlocated(facts, reason, evidence.seen)
    if entry is not None:  # (3)
        seat.epoch, seat.durable, seat.records = entry.epoch, entry.durable.copy(), deepcopy(entry.riders)
    elif pod.running:
        seat.durable.started = True
        seat.durable.vram_bytes = evidence.seen.vram_bytes if evidence.seen is not None else 0
    if pod.running and (entry is None or fresh):
        seat.durable.container_id, seat.durable.restarts = pod.container_id or "", pod.restarts
        seat.durable.residue_bytes, seat.durable.measured = 0, False
    parked = entry is None or entry.state in (S.PARKED, S.PARKING, S.WAITING, S.BACKOFF)
    if parked and seat.starts_cold and seat.durable.started and facts.state in (S.WAITING, S.BACKOFF):  # (4)
        facts, reason = replace(facts, process=Process.NONE, residence=Residence.NOTHING), seat.starts_cold
    conflict = entry is not None and entry.conflict and facts.state in (S.QUARANTINED, S.RELEASING)
    seat.know(replace(facts, unlocated=unlocated, conflict=conflict and not unlocated))
    seat.reason, seat.group = reason, seat.home if facts.at_home else place or seat.group
    if not unlocated:
        seat.memory_on = seat.group
    if seat.group is not was:
        seat.durable.way = seat.durable.came_from = ""
    seat.entered, seat.entered_wall = now.unix, now.wall
    if seat.state is S.ACTIVE:
        seat.usage.active_since = seat.usage.busy = now.model


def _unlocated(facts: Facts, reason: str, seen: SeatProgress | None) -> tuple[Facts, str]:
    """What a seat is that may be on any group of its pool: it holds all of them, until evidence names its GPUs."""
    match facts.state:
        case S.PARKED:
            return replace(facts, promise=Promise.ENDS), PARKED_NOWHERE
        case S.ACTIVE | S.STARTING | S.QUARANTINED:
            why = f" ({seen.reason})" if seen is not None and seen.reason else ""
            text = f"neither the ledger nor the driver tells on which GPU of its pool it is{why}"
            return replace(facts, promise=Promise.HANDS_OFF), f"{text}; if that lasts, delete its pod"
    return facts, reason


def _adopt(node: NodeState, status: JobStatus, entries: dict[str, LedgerEntry], now: Now) -> None:
    """Go on with a switch that the checkpointer has not finished: the seats are what they were when its job was sent,
    and its status is taken in as any other.

    All seats that it parks are leaving, though the switch names one victim. A seat whose pod is another one now has
    processes that the job does not touch: it stays as its evidence has it.
    """
    parks = [(node.seats[p.seat], p) for p in status.park if p.seat in node.seats]
    victim = parks[0][0] if parks else None
    incoming = node.seats.get(status.activate.seat) if status.activate else None
    concerned = victim or incoming
    if concerned is None:
        return
    state = node.groups.get(status.group)
    group = state.group if state is not None else concerned.group
    under_way = switch.begin(node, group, victim, incoming, status.epoch, now)
    under_way.op, under_way.phase, under_way.job.journaled = status.op, SwitchPhase.JOB, True
    for seat, progress in parks:
        if _concerns(progress, seat):
            _promise(seat, Promise.PARKS, **_MOVING, residence=Residence.VRAM)
            seat.epoch, seat.op, seat.reason = status.epoch, status.op, ""
            seat.group = seat.memory_on = group
    if incoming is not None and status.activate is not None and _concerns(status.activate, incoming):
        _comes_to(node, incoming, group, entries.get(incoming.id))
        incoming.epoch, incoming.op = status.epoch, status.op
    reports.on_job_status(node, status, now)


def _judge(node: NodeState, status: JobStatus, entries: dict[str, LedgerEntry]) -> None:
    """A job that ended while no manager ran: what became of it counts, and what its parks left."""
    for progress in (*status.park, *((status.activate,) if status.activate is not None else ())):
        seat, entry = node.seats.get(progress.seat), entries.get(progress.seat)
        if seat is not None and entry is not None and _op_of(node, entry) == status.op and _concerns(progress, seat):
            if progress in status.park and progress.outcome == "parked":
                seat.learn_park(progress)
            for rider in node.riders[Rider.reported]:
                rider.reported(node, seat, entry.state, progress)


def _starts_on(node: NodeState, status: JobStatus, now: Now) -> None:
    """The seat of a rehearsal starts, and follows it, on the group of that job; where the ledger was lost its processes
    seem to serve."""
    for progress in status.park:
        seat = node.seats.get(progress.seat)
        if seat is None or not (seat.lease and _concerns(progress, seat)):
            continue
        if seat.state is S.ACTIVE or (seat.state is S.QUARANTINED and seat.facts.unlocated):
            seat.know(replace(seat.facts, process=Process.LOADS, promise=Promise.NONE, unlocated=False))
            seat.reason = ""
            seat.group = seat.memory_on = node.groups[status.group].group if status.group in node.groups else seat.group
        if seat.state is S.STARTING:
            seat.rehearsal = Rehearsal(status.op, status.epoch, progress.container_id, now.wall, begun=now.wall)


def _promise(seat: ManagedSeat, promise: Promise, **facts: Any) -> None:
    """What was ordered for the seat; a seat whose pod leaves is only waited for."""
    leaves = seat.facts.owner is Owner.LEAVING
    seat.know(changed(seat.facts, promise=Promise.NONE if leaves else promise, **facts))


_MOVING: dict[str, Any] = {"process": Process.RUNS, "unlocated": False}


def _concerns(progress: SeatProgress, seat: ManagedSeat) -> bool:
    """True if the seat has a process, and it is the one that the job names, not one that comes of a later ticket."""
    return reports.about(seat, progress) and seat.facts.alive and not seat.facts.waits


def _comes_to(node: NodeState, seat: ManagedSeat, group: Group, entry: LedgerEntry | None) -> None:
    """The seat that an unfinished job brings to a group was parked where it was before. Where nothing tells where that
    was, it is left alone until evidence tells where it is."""
    if seat.facts.unlocated and (entry is None or entry.unlocated):
        return
    if seat.group.name == group.name and entry is not None and entry.state is S.MIGRATING:
        seat.group = view.group_with_gpus(node, seat, entry.copied) or seat.home
    _promise(seat, Promise.NONE, **_MOVING, residence=Residence.RAM)
    seat.reason, seat.memory_on = "", seat.group


def _granted(node: NodeState, entries: dict[str, LedgerEntry], reply: JobReply) -> set[str]:
    """The seats that were let onto their group: the ledger has a granted hold there, or a job brings them."""
    found = {status.activate.seat for status in reply.jobs if status.activate is not None}
    for seat in node.seats.values():
        entry = entries.get(seat.id)
        if entry is None or not entry.lease or entry.conflict:
            continue
        if {*(entry.on or entry.gpus)} <= {*seat.group.uuids}:
            found.add(seat.id)
    return found


def _settle_conflicts(node: NodeState, listed: set[str], granted: set[str]) -> None:
    """More seats on a group than may hold it, or seats of two groups on one GPU.

    (1) Those that were ``granted`` it, and are no conflict alone, serve on. (2) Beside them, what nothing let in is
    ended. (3) Else the evidence contradicts itself. ``listed``: seats whose processes the driver lists there. Where
    those alone are no conflict, they serve on, and only the others are quarantined.
    """
    for seat in node.seats.values():
        if not seat.lease or seat.facts.unlocated or not view.rivals(node, seat):
            continue
        if seat.id in granted and not view.rivals(node, seat, among=granted):  # (1)
            seat.learn(conflict=False)
        elif seat.facts.alive and seat.id not in granted and view.rivals(node, seat, among=granted):  # (2)
            _promise(seat, Promise.ENDS, conflict=True)
            seat.reason = view.contested(node, seat, "nothing let it in", "it is ended")
        elif seat.id in listed and not view.rivals(node, seat, among=listed):  # (3)
            seat.learn(conflict=False)
        else:
            _promise(seat, Promise.HANDS_OFF, conflict=True)
            seat.reason = view.contested(node, seat, "it seems to hold its GPUs")


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
        if seat.state in (S.LOST, S.RELEASING) and seat.facts.alive:
            node.end_processes(seat, by=KillJob if seat.state is S.LOST else ReleaseJob)


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
        orders=tuple(replace(order) for order in (*node.drains.values(), *node.moves.values())),
        drains=tuple(drain.op for drain in node.drains.values()),
    )
    return last if last is not None and found == last else found


def _entry(seat: ManagedSeat, pod: SeatPod, known: LedgerEntry | None) -> LedgerEntry:
    """The seat's entry; ``known`` itself, if that is still true."""
    facts: dict[str, Any] = {
        "seat": seat.id,
        "state": seat.state,
        "epoch": seat.epoch,
        "lease": seat.lease,
        "seen_running": seat.facts.alive,
        "inherited": seat.facts.ticket is Ticket.FORMER,
        "unlocated": seat.facts.unlocated,
        "conflict": seat.facts.conflict,
        "pod": pod.pod,
        "pod_uid": pod.uid,
        "annotations": pod.annotations,
        "gpus": seat.home.uuids,
        "on": seat.group.uuids if seat.group.name != seat.home.name else (),
        "copied": seat.memory_on.uuids if seat.state is S.MIGRATING else (),
        "riders": seat.records,
        "durable": seat.durable,
    }
    if known is not None and vars(known) == facts:
        return known
    riders = {name: copy(one) for name, one in seat.records.items()}
    return LedgerEntry(**facts | {"durable": seat.durable.copy(), "riders": riders})
