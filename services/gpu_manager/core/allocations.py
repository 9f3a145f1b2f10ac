"""Which pod owns which seat, its calls at the start gate, and the life of its processes. Pure."""

from collections.abc import Collection

from kybernate.messages import JobReply, KillJob, ReleaseJob, SeatActivated, SeatProgress
from kybernate.seat import SeatState, container_of
from services.gpu_manager.core import arbiter, reports, resting, starts, switch, view
from services.gpu_manager.core.facts import Process, Promise, Residence, Ticket, Trigger
from services.gpu_manager.core.inputs import ForeignProcessesSeen, JobsReported, Now, StartCall, UnixTime, WallTime
from services.gpu_manager.core.managed_seat import PARKED_NOWHERE, ManagedSeat
from services.gpu_manager.core.obstacles import FOREIGN, Ask, first, obstacles
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from services.gpu_manager.core.state import NodeState, Rider

S, T = SeatState, Trigger

HAS_PROCESS = (S.STARTING, S.ACTIVE, S.DRAINING, S.PARKING, S.PARKED, S.ACTIVATING, S.MIGRATING, S.QUARANTINED)


# --- pods -------------------------------------------------------------------------------------------------------------


def on_pods(node: NodeState, owners: Owners, now: Now) -> None:
    """Take in which pods own the seats.

    (1) The owner is missing: twice in a row, and not listed any more, means gone. (2) Another pod has the seat. (3) The
    owner is as before: follow its container. (4) A free seat has an owner.
    """
    pods, gap, node.pods_read = {pod.seat: pod for pod in owners.pods}, now.wall - node.pods_read, now.wall
    for seat in list(node.seats.values()):
        pod, owner = pods.get(seat.id), seat.pod
        if pod is None or (owner is not None and pod.uid != owner.uid):
            if pod is not None or owner is None or owner.uid not in owners.listed:  # (1)
                _missed(node, seat, gap, now)
            if pod is not None and not pod.deleting:  # (2)
                _inherit(node, seat, pod, now)
            continue
        seat.pod_misses, seat.pod_seen = 0, now.wall
        starts.answered(seat, gap, now)
        seat.gate.confirmed += seat.id not in owners.unproven
        if seat.state is not S.FREE:  # (3)
            _follow_pod(node, seat, pod, now)
        elif not pod.deleting:  # (4)
            node.own(seat, pod)
            seat.durable.started = False
            node.transition(seat, T.ALLOCATED, now)
            if pod.running:
                _runs(node, seat, pod, now)
        _at_gate(node, seat, now)


def _missed(node: NodeState, seat: ManagedSeat, gap: float, now: Now) -> None:
    seat.pod_misses += 1
    if seat.pod_misses < 2:
        return
    starts.answered(seat, gap, now)
    if seat.state not in (S.FREE, S.RELEASING):
        _delete(node, seat, now)


def _inherit(node: NodeState, seat: ManagedSeat, pod: SeatPod, now: Now) -> None:
    """Kubelet gave the seat to another pod while a ticket of the previous owner is open.

    The gate does not know which pod calls: the new pod's call may have taken the ticket, then the lease is its. Not so
    when the new pod waits at the gate for another ticket, or calls there later: it gets none before the open one is
    over.
    """
    if seat.state is not S.RELEASING or seat.pod_misses < 2:
        return
    if seat.gate.call is not None or not seat.facts.waits or starts.over(seat):
        return
    before = seat.durable.reserved_bytes or 0
    fresh = _free(node, seat, now)
    node.own(fresh, pod)
    fresh.pod_misses = 0
    node.transition(fresh, T.ALLOCATED, now)
    fresh.durable.ticket = seat.durable.ticket
    starts.inherited(fresh, seat)
    reason = "its call took the ticket of the pod that had its seat before"
    node.transition(fresh, T.TICKET, now, reason=reason, to=seat.group if seat.group.name != seat.home.name else None)
    fresh.learn(ticket=Ticket.FORMER)
    reserved = (before, fresh.durable.reserved_bytes or 0)
    fresh.durable.reserved_bytes = max(reserved) if all(reserved) else 0  # the container may be the other pod's
    if not view.room(node, fresh):
        other = "" if seat.pod is None else seat.pod.pod if seat.pod.name else seat.pod.uid
        within = f"within {starts.KUBELET_SECONDS:.0f} s its container may start by the ticket of pod {other}"
        _contest(node, fresh, within, now)
    if pod.running:
        _runs(node, fresh, pod, now)


def _follow_pod(node: NodeState, seat: ManagedSeat, pod: SeatPod, now: Now) -> None:
    """The owner of a seat as it is now: in deletion, running, or exited."""
    moved = seat.pod is not None and seat.pod.endpoint != pod.endpoint
    node.own(seat, pod)
    before = seat.facts.alive and pod.restarts < seat.durable.restarts  # the API server's store went back: ask
    if before:
        seat.learn(unlisted=True)
    if pod.deleting:
        seat.pod_ends = True
        if pod.running and not before and (seat.state is not S.RELEASING or seat.facts.waits):
            _runs(node, seat, pod, now)  # it started since the last read
        if seat.state is not S.RELEASING:
            _delete(node, seat, now)
    elif before:
        pass
    elif pod.running:
        _runs(node, seat, pod, now)
    elif seat.facts.alive and seat.state in HAS_PROCESS and not seat.facts.unlisted:
        _processes_gone(node, seat, f"its container {pod.ended}", now)
    elif seat.state is S.STARTING and _came_and_exited(seat, pod, now):
        _exit(node, seat, f"its container {pod.ended}", now)
    if moved and seat.state is S.ACTIVE:
        node.emit(seat, SeatActivated, now, previous=S.ACTIVE)


def _came_and_exited(seat: ManagedSeat, pod: SeatPod, now: Now) -> bool:
    """True if the container of the open ticket started and exited between two reads of the pods.

    Kubelet calls the gate once the container before has exited. So an exit after the call is that of the ticket's
    container; where the ticket is inherited or from before a restart of this process, its call is not known. An exit in
    the future was written before the clock was set back.
    """
    if not seat.facts.waits or pod.exited is None:
        return False
    return seat.gate.given_call < UnixTime(pod.exited) <= now.unix


def _runs(node: NodeState, seat: ManagedSeat, pod: SeatPod, now: Now) -> None:
    """A container runs. A new one had a ticket, or went past the gate: a kubelet that just restarted may skip it.

    (1) It is the known container. (2) The seat is being released: the ticket is used, and a process holds VRAM. (3) The
    seat had a process, or kyb-run's ticket for another group: the container of that has exited. (4) It waits: the
    container started without a ticket. (5) A container without a ticket, while others hold the group: quarantine.
    """
    container_id = pod.container_id or ""
    if seat.facts.unlisted:
        seat.learn(unlisted=False)
    if container_id == container_of(seat.durable.container_id) or (
        seat.state is S.LOST and not seat.facts.waits
    ):  # (1)
        return
    if seat.state is S.LOST:
        _end_late(node, seat, container_id, pod.restarts)
        return
    away = seat.group.name != seat.home.name
    ungated = away or not seat.facts.waits
    if seat.state in HAS_PROCESS and seat.acts_as is not S.WAITING and (away or seat.state is not S.STARTING):  # (3)
        _exit(node, seat, "its container was started again", now)
    if seat.state is S.BACKOFF:
        node.transition(seat, T.CALLED, now)
    if seat.acts_as is S.WAITING:  # (4)
        ungated = True
        node.transition(seat, T.TICKET, now, reason="its container started without a ticket")
    seat.begins(container_id, pod.restarts)  # (2)
    if ungated and not view.room(node, seat):  # (5)
        _contest(node, seat, "its container started without a ticket", now)


def _end_late(node: NodeState, seat: ManagedSeat, container_id: str, restarts: int) -> None:
    """A process came by a ticket that nothing remembers: it is ended."""
    seat.begins(container_id, restarts)
    node.end_processes(seat)


def _contest(node: NodeState, seat: ManagedSeat, why: str, now: Now) -> None:
    """Evidence shows a hold that nothing granted, and that has no room: it is left alone, if it does not end anyway."""
    seat.learn(conflict=True)
    reason = view.contested(node, seat, why)
    if seat.state is S.QUARANTINED:
        seat.reason = reason
    elif seat.state is S.STARTING:
        node.transition(seat, T.QUARANTINE, now, reason=reason)


def _delete(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """Its pod is going: the checkpointer ends what is parked; its GPUs stay with it until its processes are gone."""
    switch.leave(node, seat)
    seat.ended_here = None
    node.transition(seat, T.DELETED, now)
    if seat.facts.alive:
        node.end_processes(seat, by=ReleaseJob)


def _exit(node: NodeState, seat: ManagedSeat, reason: str, now: Now) -> None:
    """The container is gone, and with it the VRAM it held; a failure where it had not served. Kubelet may have ended it
    by its startupProbe, and a restart that parks it ends it here."""
    switch.leave(node, seat)
    pod = seat.pod
    if seat.starts_cold and seat.state in (S.PARKING, S.PARKED):
        node.transition(seat, T.EMPTIED, now, reason=seat.starts_cold)
        return
    if seat.state is S.STARTING and pod is not None and 0 < pod.probe_seconds <= now.wall - seat.entered_wall:
        reason = f"{reason}: {switch.failed_start(seat, now)}"
    elif seat.state is S.STARTING or (seat.state in (S.ACTIVE, S.DRAINING) and not seat.usage.proven):
        seat.failed(reason if pod is None or pod.running else pod.ended or reason, now)
    node.transition(seat, T.EXITED, now, reason=reason)


# --- the start gate ---------------------------------------------------------------------------------------------------


def on_start_calls(node: NodeState, calls: dict[str, StartCall], now: Now) -> None:
    """Kubelet waits at the gate for these seats."""
    for seat in node.seats.values():
        call, gate = calls.get(seat.id), seat.gate
        if call is not None and (gate.call is None or gate.call.call != call.call):
            gate.confirmed = 0
        gate.call = call if call is not None and call.call != seat.durable.ticket else None
        _at_gate(node, seat, now)


def _at_gate(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """A call for a seat that has its lease means that its container exited or never started, unless kubelet gave the
    seat to another pod while the previous one may still run. The second read of the pods began after the call, and
    shows which it is. A call from inside says nothing about the seat's processes."""
    if not view.calls(seat, now):
        return
    if seat.gate.called is None:
        seat.gate.called = now.wall
    call = seat.gate.call
    inside = call is not None and call.inside
    if inside and not (seat.pod is not None and seat.pod.running and seat.pod.container_id):
        return  # the pods lag behind
    if seat.state is S.LOST and seat.gate.confirmed >= 2 and not inside:
        seat.learn(ticket=Ticket.NONE)  # an earlier start of its container is over
    ran = seat.facts.alive and seat.state in HAS_PROCESS
    if (ran or seat.state is S.STARTING) and seat.gate.confirmed < 2:
        return
    if ran and (seat.facts.unlisted or inside):  # the word of a container ends nothing: the checkpointer is asked
        return
    if ran:
        _exit(node, seat, "its container is started again", now)
    if seat.state is S.BACKOFF and seat.pod_seen >= seat.entered_wall:  # else the call may be the next owner's
        node.transition(seat, T.CALLED, now)
    elif seat.state is S.STARTING and inside and not view.calls(seat, now, seat.group):
        return  # it waits for the end of its ticket, by evidence
    elif seat.state is S.STARTING and not view.calls(seat, now, seat.group):
        reason = f"it is started again, which cannot be on group {seat.group.name}"
        node.transition(seat, T.EXITED, now, reason=reason)
    elif seat.state is S.STARTING and not (
        seat.facts.ticket is Ticket.FORMER or first(obstacles(node, seat, seat.group, now, act="send"))
    ):
        arbiter.give_ticket(node, seat, seat.group, now)


# --- processes --------------------------------------------------------------------------------------------------------


def on_gpu_processes(node: NodeState, seen: ForeignProcessesSeen, now: Now) -> None:
    """A group with a foreign process on one of its GPUs is quarantined until the process is gone."""
    for seat in node.seats.values():
        seat.used_bytes = seen.used.get(seat.durable.container_id, 0)
        _end_stray(node, seat, seen, now)
    asks = [Ask(node, group, now) for group in node.setup.groups]
    before = [FOREIGN.holds(ask) is not None for ask in asks]
    node.foreign = seen.processes
    for ask, blocked in zip(asks, before, strict=True):
        found = FOREIGN.holds(ask)
        if (found is not None) != blocked:
            text = "no foreign process uses its GPUs any more" if found is None else found.text
            switch.decided(node, ask.group, "block", text, now)
    if node.recovered:
        resting.look(node, seen, now)


def _end_stray(node: NodeState, seat: ManagedSeat, seen: ForeignProcessesSeen, now: Now) -> None:
    """A seat whose processes hold memory on another group's GPU is ended: no engine may be where no one expects it."""
    container = seat.durable.container_id
    place = view.places(node).get(container) if seen.strays else None
    astray = sorted(gpu for one, gpu in seen.strays if place and one == container and gpu not in place)
    if astray:
        known = {gpu.uuid: f"GPU {gpu.index}" for group in node.setup.groups for gpu in group.gpus}
        on = " and ".join(known.get(gpu, gpu) for gpu in astray)
        why = f"its processes hold memory on {on}, which group {seat.group.name} does not have; it is ended: remove "
        why += "CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES from its pod and its image"
        seat.failed(why, now)
        node.transition(seat, T.UNRECOVERABLE, now, reason=why)


def on_jobs_report(node: NodeState, report: JobsReported, now: Now) -> None:
    """The checkpointer's answer to a question about jobs and processes."""
    for status in report.reply.jobs:
        reports.on_job_status(node, status, now)
    reports.on_jobs_forgotten(node, set(report.asked) - {status.op for status in report.reply.jobs})
    _on_processes(node, report.reply, report.asked_at, now)


def on_ending_answer(node: NodeState, job: ReleaseJob | KillJob, reply: JobReply | None, now: Now) -> None:
    """The checkpointer's answer to a ReleaseJob or KillJob.

    (1) It has the job, and may report how it ended: the answer to a kill that it knows is its status. (2) The seat has
    moved on meanwhile. (3) A switch of its group overtook the job: send it again under a new epoch. (4) No answer: send
    it again.
    """
    seat = node.seats.get(job.target.seat)
    if reply is not None and reply.code != "stale-epoch":  # (1)
        if isinstance(job, ReleaseJob) and seat is not None and seat.state is S.RELEASING:
            seat.ended_here = reply.ends
        on_jobs_report(node, JobsReported(reply), now)
        return
    ends = S.RELEASING if isinstance(job, ReleaseJob) else S.LOST
    awaits = seat is not None and (seat.state is ends or seat.facts.promise is Promise.DROPS)
    if seat is None or not awaits or seat.target().pod_uid != job.target.pod_uid:  # (2)
        return
    if reply is not None:  # (3)
        node.epoch = max(node.epoch, reply.highest_epoch)
        job = job.model_copy(update={"epoch": node.next_epoch(now)})
    node.effects.append(job)  # (4)


def _on_processes(node: NodeState, reply: JobReply, asked_at: WallTime, now: Now) -> None:
    """The checkpointer read processes: some are gone, some quarantined seats are what they should be again. What it has
    read of a pod or container before tells nothing."""
    for progress in reply.seats:
        seat, gone = node.seats.get(progress.seat), progress.outcome == "gone"
        if seat is None or not reports.about(seat, progress):
            continue
        if gone and not starts.shows_none(seat, progress, asked_at):
            continue
        if progress.outcome in ("active", "parked", "lost"):
            starts.used(seat)
        if seat.facts.unlocated:
            _locate(node, seat, progress, now)
        if seat.state is S.LOST and seat.facts.waits and not gone:
            _end_late(node, seat, seat.durable.container_id, seat.durable.restarts)
        elif seat.starts_inside:
            _on_start_inside(node, seat, progress, now)
        elif seat.state in (S.RELEASING, S.LOST):
            if gone:
                seat.learn(process=Process.NONE, residence=Residence.NOWHERE)
            elif seat.state is S.RELEASING and progress.outcome == "parked":
                node.end_processes(seat, by=ReleaseJob)  # one that died right after it took the first has forgotten it
        elif gone and (seat.facts.alive or seat.state is S.QUARANTINED):
            _processes_gone(node, seat, "its processes are gone", now)
        elif seat.state is S.STARTING and seat.facts.alive:
            _on_late_start(node, seat, progress, now)
        elif seat.state is S.QUARANTINED and progress.outcome in _clears(node, seat):
            _clear_quarantine(node, seat, progress, now)


def _on_start_inside(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    """What the checkpointer has of a start by kyb-run: its ticket is used once a process lives."""
    if progress.outcome not in ("gone", "started"):
        seat.begins(seat.durable.container_id, seat.durable.restarts)
    elif progress.outcome == "gone":
        why = "kyb-run did not start its engine" if progress.keeper else "its container ended before its engine started"
        if seat.state is S.STARTING:
            node.transition(seat, T.NO_PROCESS, now, reason=why)
        elif seat.state is S.QUARANTINED:
            _exit(node, seat, why, now)
        else:
            seat.learn(ticket=Ticket.NONE)


def _on_late_start(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    """What the driver has of an engine that does not become healthy: the ledger may be older than its last start.

    (1) Parked before this manager came: a park by this one is its rehearsal's. (2) Where in its pool, nothing may tell.
    """
    match progress.outcome:
        case "parked" if seat.rehearsal is None and not seat.durable.measured:  # (1)
            group = view.place(node, seat, progress)
            if group is None:  # (2)
                node.transition(seat, T.UNRECOVERABLE, now, reason=PARKED_NOWHERE)
                return
            seat.group = group
            node.transition(seat, T.EVIDENCE, now, reason="the driver reports it as parked")
            seat.assume_residue()
            for rider in node.riders[Rider.found]:
                rider.found(node, seat, now, remembered=False)
        case "lost":
            node.transition(seat, T.UNRECOVERABLE, now, reason=progress.reason)
        case "quarantined":
            node.transition(seat, T.QUARANTINE, now, reason=progress.reason)


def _clears(node: NodeState, seat: ManagedSeat) -> Collection[str]:
    """The driver's reports that end its quarantine; without a process it ends in any case."""
    if seat.facts.unlocated or not seat.facts.alive:
        return ()
    return ("parked",) if seat.facts.conflict and not view.room(node, seat) else ("active", "parked")


def _locate(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    """Evidence tells the group of a seat of which the ledger does not.

    (1) It is a copy: what was reserved for it, perhaps on another group, is free. (2) Others hold that group: the
    evidence contradicts itself. (3) A copy whose GPUs nothing names cannot be restored; one that a kill could not end
    stays quarantined.
    """
    group = view.place(node, seat, progress)
    if group is not None:
        seat.group = seat.memory_on = group
        seat.learn(unlocated=False)
        if progress.outcome == "parked" and not seat.facts.waits:  # (1)
            seat.learn(residence=Residence.RAM)
            seat.assume_residue()
        if seat.lease and view.rivals(node, seat):  # (2)
            _contest(node, seat, "it seems to hold its GPUs", now)
    elif seat.state is S.QUARANTINED and progress.outcome == "parked" and seat.unkilled != progress.container_id:  # (3)
        node.transition(seat, T.UNRECOVERABLE, now, reason=PARKED_NOWHERE)


def _processes_gone(node: NodeState, seat: ManagedSeat, reason: str, now: Now) -> None:
    """None of its processes is left. A ticket that is still open keeps its lease for as long as a start may take."""
    if seat.facts.waits and (seat.state is S.STARTING or (seat.state is S.QUARANTINED and not starts.over(seat))):
        seat.learn(process=Process.NONE, residence=Residence.NOWHERE, unlisted=False)
    elif seat.state in HAS_PROCESS:
        _exit(node, seat, reason, now)


def _clear_quarantine(node: NodeState, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    seat.group = view.place(node, seat, progress, known=True) or seat.group
    seat.durable.vram_bytes = seat.durable.vram_bytes or progress.vram_bytes
    runs = T.CLEARED_LOADING if seat.facts.process is Process.LOADS else T.CLEARED_ACTIVE
    trigger = runs if progress.outcome == "active" else T.CLEARED_PARKED
    node.transition(seat, trigger, now, reason="the driver reports it as it should be")
    if seat.state is S.PARKED:
        seat.assume_residue()
    for rider in node.riders[Rider.found]:
        rider.found(node, seat, now, remembered=False)


def end_of_life(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """What time and evidence end.

    (1) A start without a process, as a read of the pods after the deadline shows it: while they cannot be read, a
    container may run unseen. (2) A lost seat whose processes are gone, and of which none comes. (3) A deleted pod whose
    processes are gone: it holds nothing any more, and once the pod is gone the seat is free.
    """
    if seat.state is S.STARTING and not seat.facts.alive:  # (1)
        if starts.over(seat):
            reason = f"no process came within {starts.KUBELET_SECONDS:.0f} s of the ticket"
            seat.failed(reason, now)
            node.transition(seat, T.NO_PROCESS, now, reason=reason)
    elif seat.state is S.LOST and not seat.facts.alive and (not seat.facts.waits or starts.over(seat)):  # (2)
        node.transition(seat, T.GONE, now, reason="its processes ended; it starts cold")
    elif seat.state is S.RELEASING and not seat.facts.alive:  # (3)
        if seat.facts.waits and starts.over(seat):
            seat.learn(ticket=Ticket.NONE)
        if seat.pod_misses >= 2 and not seat.lease:
            _free(node, seat, now)


def _free(node: NodeState, seat: ManagedSeat, now: Now) -> ManagedSeat:
    """No pod owns the seat any more; a call at the gate stays."""
    node.transition(seat, T.FREED, now)
    fresh = node.unowned_seat(seat.id, seat.home)
    fresh.epoch, fresh.entered, fresh.entered_wall = seat.epoch, now.unix, now.wall
    fresh.gate.call, fresh.pod_misses = seat.gate.call, seat.pod_misses
    node.seats[seat.id] = fresh
    return fresh
