"""What the checkpointer and engines report about switches and starts, and what became of both seats of a switch. Pure.

A job status is always the whole truth about a job, so receiving it twice or late changes nothing.
"""

from kybernate.deadlines import is_late
from kybernate.engines import RESTART
from kybernate.messages import JobReply, JobStatus, SeatParked, SeatProgress, SwitchJob
from kybernate.policy.estimators import COST_WEIGHT
from kybernate.seat import COMING, SeatState
from services.gpu_manager.core import moves, view
from services.gpu_manager.core.facts import Process, Promise, Residence, Trigger
from services.gpu_manager.core.inputs import EngineSeen, InputRefused, Now, WallTime
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.core.state import GroupSwitch, NodeState, Rider, SwitchPhase, SwitchTrigger
from services.gpu_manager.core.switch import end, failed_start, lease, rename, set_incoming

S, T = SeatState, Trigger

LONGEST_PAUSE_SECONDS = 30.0
"""Wall: longest pause of a group after failed switches."""
LONGEST_REST_SECONDS = 300.0
"""Wall: how long a seat whose activation fails backs off, at most."""
UNPARKED_SECONDS = 60.0
"""Wall: how long a seat that cannot be parked is no victim, about at most; seats that wait for its GPUs wait as
long."""

HALF_FAILED = {"active": T.ROLLED_BACK, "lost": T.UNRECOVERABLE, "gone": T.EXITED, "quarantined": T.QUARANTINE}
"""What follows for a victim that is not parked, by the reported outcome, and for an incoming seat that is not active;
or ``parked``: see _not_activated."""
ON_GPUS = ("active", "started", "lost", "quarantined")
"""Reports of processes that hold VRAM, or may."""


# --- engines ----------------------------------------------------------------------------------------------------------


def on_engine_answer(node: NodeState, answer: EngineSeen, now: Now) -> None:
    """An engine is healthy for the first time, or not yet, or not in time, or computes nothing any more."""
    seat = node.seats.get(answer.seat)
    if seat is None or not answer.container_id or seat.durable.container_id != answer.container_id:
        return
    seat.answered = answer.said
    healthy = seat.state is S.STARTING and answer.healthy
    if healthy and all(rider.before_serving(node, seat, now) for rider in node.riders[Rider.before_serving]):
        found, usage = view.demand(node, seat), seat.usage
        costs, took = seat.durable.costs, (now.wall - seat.entered_wall) * now.pace
        costs.cold_seconds = _mean(costs.cold_seconds or took, took)
        if seat.backend == RESTART:
            costs.activations += 1
            costs.activate_seconds = _mean(costs.activate_seconds, took, costs.activations)
        usage.unclaimed = not (found.waiting or found.in_flight or usage.wanted_since is not None or seat.pinned)
        _serves(node, seat, now)
        node.transition(seat, T.HEALTHY, now, epoch=seat.epoch)
    late = seat.state is S.STARTING and not (answer.healthy or seat.rehearses)
    if late and answer.asked_at > view.start_deadline(node, seat):
        reason = failed_start(seat, now)
        node.transition(seat, T.UNRECOVERABLE, now, reason=f"{reason}; it is ended, and starts again when others rest")
    switch = node.switch_leaving(seat)
    # An engine that answers and does not count its requests is taken for idle; one that does not answer is not.
    idle = answer.running == 0 or (answer.healthy and answer.running is None)
    if switch is not None and idle and switch.drain.quiet is not None and answer.asked_at >= switch.drain.quiet:
        switch.drain.idle = True


def _serves(node: NodeState, seat: ManagedSeat, now: Now) -> None:
    """The seat serves: what failed before does not count any more."""
    seat.durable.started, seat.usage.yielded = True, False
    seat.usage.active_since = seat.usage.busy = now.model
    seat.backoff.activation, seat.backoff.move = Backoff(), Backoff()
    node.groups[seat.group.name].backoff.count = 0


# --- answers to a job -------------------------------------------------------------------------------------------------


def on_job_answer(node: NodeState, job: SwitchJob, reply: JobReply | None, now: Now) -> None:
    """The checkpointer's answer to the job.

    (1) None, or about no open question: it is sent again. (2) Accepted: it is journaled. (3) A stale epoch: it is sent
    again under a new one. (4) Busy: it is sent again. (5) Refused: everything stays as it was before.
    """
    switch = node.switch_of_op(job.op)
    if reply is not None and switch is None:
        for rider in node.riders[Rider.on_answer]:
            rider.on_answer(node, job.op, reply, now)
    if switch is None or switch.job.journaled or reply is None or _unsent(node, switch, "answer"):  # (1)
        return
    if reply.accepted:  # (2)
        for status in reply.jobs:
            on_job_status(node, status, now)
        _journaled(switch, 0.0, now)
    elif reply.code == "stale-epoch":  # (3)
        node.epoch = max(node.epoch, reply.highest_epoch)
        rename(node, switch, now)
        switch.job.sent = None
    elif reply.code != "busy":  # (4), (5)
        _refused(node, switch, reply.reason or reply.code, now)


def _unsent(node: NodeState, switch: GroupSwitch, what: str) -> bool:
    """True, and the input refused, for a report about a job that was never sent: its switch still drains."""
    if switch.phase is SwitchPhase.JOB:
        return False
    node.refused += 1
    node.effects.append(InputRefused(f"a {what} of job {switch.op}, which was not sent: its switch is {switch.phase}"))
    return True


def _journaled(switch: GroupSwitch, at: float, now: Now) -> None:
    """The checkpointer has the job; it began when it was journaled ``at`` (0: not known), before this was received."""
    if not switch.job.journaled:
        switch.job.journaled = True
        since = max(0.0, float(now.unix) - at) if at else 0.0
        switch.times.control_seconds = max(0.0, now.wall - switch.times.drained - since)


def _refused(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    end(node, switch, SwitchTrigger.REFUSED)
    pause = _back_off_group(node, switch.group, f"its job was refused: {reason}", now)
    victim = node.seats[switch.victim] if switch.victim else None
    incoming = node.seats[switch.incoming] if switch.incoming else None
    if victim is not None and victim.state is S.PARKING:
        _back_off_park(victim, pause, now)
        node.transition(victim, T.ROLLED_BACK, now, reason=reason)
    _drop_claim(node, switch, now)
    if incoming is not None:
        _back_off_activation(incoming, pause, reason, now)
        if _arrives(incoming, switch):
            node.transition(incoming, T.NOT_RESTORED, now, reason=reason)


def on_jobs_forgotten(node: NodeState, ops: set[str]) -> None:
    """The checkpointer lost its journal: it gets these jobs again, and the processes show what is left to do. A frozen
    engine that has rehearsed is parked, then."""
    for switch in node.switches.values():
        if switch.op in ops:
            switch.job.journaled, switch.job.sent = False, None
    for seat in node.seats.values():
        if seat.rehearsal is not None and seat.rehearsal.op in ops:
            seat.rehearsal = None


# --- the status of a job ----------------------------------------------------------------------------------------------


def on_job_status(node: NodeState, status: JobStatus, now: Now) -> None:
    """Take in the whole truth about a job; receiving it twice changes nothing.

    (1) It belongs to no switch: it may be a kill. Or the switch has sent no job yet: it is refused. (2) The
    checkpointer has journaled it, and the status tells which seat arrives. (3) The victim: only while it is on this
    group. (4) The incoming seat: once all victims are off the GPUs, or its activation has begun, whatever is known of
    them. (5) The job is done: so is the switch.
    """
    switch = node.switch_of_op(status.op)
    if switch is None:  # (1)
        _on_kill_status(node, status, now)
        for rider in node.riders[Rider.on_status]:
            rider.on_status(node, status, now)
        return
    if _unsent(node, switch, "status"):
        return
    _journaled(switch, status.journaled_at, now)  # (2)
    _follow(node, switch, status, now)
    for progress in status.park:  # (3)
        seat = node.seats.get(progress.seat)
        if seat is not None and seat.group.name == switch.group and _same_pod(seat, progress):
            _on_victim_progress(node, switch, seat, progress, now)
    comes = status.activate
    if comes is not None and comes.seat == switch.incoming and (comes.outcome in ON_GPUS or victims_off(node, status)):
        _on_incoming_progress(node, switch, node.seats[comes.seat], comes, now, done=status.done)  # (4)
    if status.done:  # (5)
        end(node, switch, SwitchTrigger.FINISHED)


def _follow(node: NodeState, switch: GroupSwitch, status: JobStatus, now: Now) -> None:
    """The job's status is the truth about the incoming seat.

    (1) It names another seat, as a manager of the release before could make it do. (2) It ended without an incoming
    seat.
    """
    named = status.activate
    if named is not None and named.seat != switch.incoming and named.seat in node.seats:  # (1)
        _give_back(node, switch, f"{node.seats[named.seat].name} is activated instead", now)
        set_incoming(node, switch, node.seats[named.seat], now)
    elif status.done and (named is None or named.outcome == "pending"):  # (2)
        _give_back(node, switch, "the switch ended without it", now)


def _give_back(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """The seat may have the lease already. It was not touched, and returns the GPUs."""
    before = node.seats[switch.incoming] if switch.incoming is not None else None
    if before is not None and before.op == switch.op and before.state in COMING:
        node.transition(before, T.NOT_RESTORED, now, reason=reason)


def _on_kill_status(node: NodeState, status: JobStatus, now: Now) -> None:
    """What follows from a kill that failed; one that succeeded shows when the processes are read.

    (1) It needs an operator. (2) The copy is left: the seat is parked as before, and if it was to start elsewhere it
    stays.
    """
    for progress in status.park:
        seat = node.seats.get(progress.seat)
        if seat is None or not _same_pod(seat, progress) or progress.outcome != "quarantined":
            continue
        if seat.state is S.LOST:  # (1)
            seat.unkilled = progress.container_id
            node.transition(seat, T.QUARANTINE, now, reason=progress.reason)
        elif seat.facts.promise is Promise.DROPS:  # (2)
            if any(state.kept.pop(seat.id, None) for state in node.groups.values()):
                seat.stay(now)
            seat.durable.spilled = ""
            seat.learn(promise=Promise.NONE)
            seat.reason = f"its copy was not dropped, it keeps its host memory: {progress.reason}"
            node.emit(seat, SeatParked, now, previous=seat.state)


# --- the victim -------------------------------------------------------------------------------------------------------


def _on_victim_progress(
    node: NodeState, switch: GroupSwitch, seat: ManagedSeat, progress: SeatProgress, now: Now
) -> None:
    """What the checkpointer reports about the victim.

    (1) Its pod was deleted: evidence ends its lease. (2) It is parked. (3) The park failed: the group and the seat back
    off, and a claim that it stands in the way of is dropped.
    """
    if seat.state is S.RELEASING:  # (1)
        if seat.facts.alive and progress.outcome in ("parked", "gone"):
            seat.learn(process=Process.RUNS, residence=Residence.RAM)
    elif seat.state is not S.PARKING:
        return
    elif progress.outcome == "parked":  # (2)
        _parked(node, switch, seat, progress, now)
    elif progress.outcome in HALF_FAILED:  # (3)
        pause = _back_off_group(node, switch.group, f"{seat.name} was not parked: {progress.reason}", now)
        _back_off_park(seat, pause, now)
        trigger = HALF_FAILED[progress.outcome]
        node.transition(seat, trigger, now, switch=switch, reason=progress.reason, progress=progress)
        if seat.lease:
            _drop_claim(node, switch, now)


def _parked(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    times, costs, cold = switch.times, seat.durable.costs, seat.starts_cold
    seat.learn_park(progress)
    took, verify = sum(progress.seconds.values()), progress.seconds.get("verify", 0.0)
    leaves = times.drained if times.leaves is None else times.leaves
    costs.parks += 1
    costs.park_seconds = _mean(costs.park_seconds, _expected(took, leaves, now), costs.parks)
    seat.backoff.park = Backoff()
    node.groups[switch.group].backoff.count = 0
    times.parked, times.park_seconds, times.verify_seconds = now.wall, took - verify, verify
    trigger = T.EMPTIED if cold and not progress.no_context else T.EVIDENCE  # with none it lives on
    node.transition(seat, trigger, now, epoch=switch.epoch, switch=switch, reason=cold, progress=progress)


# --- the incoming seat ------------------------------------------------------------------------------------------------


def _on_incoming_progress(
    node: NodeState, switch: GroupSwitch, seat: ManagedSeat, progress: SeatProgress, now: Now, *, done: bool
) -> None:
    """What the checkpointer reports about the incoming seat, now that the GPUs are free.

    (1) It is still parked, and the job does bring it: it gets the lease. (2) It serves. (3) It was not activated; one
    that is parked again counts once, with the end of the job. (4) Its pod was deleted while the job goes on: it holds
    the GPUs of the job until that lets them go.
    """
    dropped = done and progress.outcome == "pending"
    if seat.acts_as is S.PARKED and not dropped and about(seat, progress):  # (1)
        lease(node, switch, seat, now)
    if not _same_pod(seat, progress):
        return
    if _arrives(seat, switch) and progress.outcome not in ("pending", "started", *(() if done else ("parked",))):
        then = _activated if progress.outcome == "active" else _not_activated  # (2), (3)
        then(node, switch, seat, progress, now)
    elif seat.state is S.RELEASING and seat.facts.alive:  # (4)
        free = dropped or progress.outcome in ("parked", "gone")
        seat.learn(process=Process.RUNS, residence=Residence.RAM if free else Residence.VRAM)
        if seat.lease and not seat.facts.unlocated:  # also one that was deleted before it left its group
            seat.group = node.groups[switch.group].group


def _activated(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    """The seat serves: learn its costs, and report how long each phase of the switch took, in wall seconds."""
    times, costs = switch.times, seat.durable.costs
    took, verify = sum(progress.seconds.values()), progress.seconds.get("verify", 0.0)
    total = now.wall - times.decided
    began = times.parked if switch.victim is not None else times.decided
    activating = _expected(took, began, now)
    moving = seat.state is S.MIGRATING
    if moving:
        node.move_seconds = _mean(node.move_seconds, max(0.0, activating - costs.activate_seconds))
    else:
        costs.activations += 1
        costs.activate_seconds = _mean(costs.activate_seconds, activating, costs.activations)
    costs.switch_seconds = _mean(costs.switch_seconds, total * now.pace)
    costs.verify_seconds = _mean(costs.verify_seconds, (verify + times.verify_seconds) * now.pace, costs.activations)
    last = progress.last_call_at
    seconds = {
        "drain": max(0.0, times.drained - times.decided),
        "park": times.park_seconds,
        "activate": took - verify,
        "verify": verify + times.verify_seconds,
        "release": max(0.0, float(now.unix) - last) if last is not None else 0.0,
        "control": times.control_seconds,
        "total": total,
    }
    seat.usage.unclaimed = False
    _serves(node, seat, now)
    epoch = max(switch.epoch, seat.epoch)
    node.transition(seat, T.VERIFIED, now, epoch=epoch, switch=switch, seconds=seconds, progress=progress)


def _not_activated(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, progress: SeatProgress, now: Now) -> None:
    """The incoming seat stays parked, or is beyond use.

    Unless it was a move that was refused, group and seat back off.
    """
    if not (seat.state is S.MIGRATING and moves.failed(node, seat, progress, now)):
        pause = _back_off_group(node, switch.group, f"{seat.name} was not activated: {progress.reason}", now)
        _back_off_activation(seat, pause, progress.reason, now)
    trigger = T.NOT_RESTORED if progress.outcome == "parked" else HALF_FAILED[progress.outcome]
    node.transition(seat, trigger, now, switch=switch, reason=progress.reason, progress=progress)


def _arrives(seat: ManagedSeat, switch: GroupSwitch) -> bool:
    """True while this seat is being brought to the group of this switch."""
    return seat.state in COMING and seat.group.name == switch.group


def victims_off(node: NodeState, status: JobStatus) -> bool:
    """True when the seats that a job parks hold no GPUs of its group any more. Of a seat that has another pod or
    container by now its lease on these GPUs tells, and not what became of the one before: a guest that a restart has
    parked may start on its own group meanwhile."""
    there = node.groups.get(status.group)
    holding = [
        (seat, progress)
        for progress in status.park
        if (seat := node.seats.get(progress.seat)) is not None
        and seat.lease
        and (there is None or {*seat.group.uuids} & {*there.group.uuids})
    ]
    off = all(progress.outcome in ("parked", "gone") for progress in status.park)
    return off and all(about(seat, progress) for seat, progress in holding)


def about(seat: ManagedSeat, progress: SeatProgress) -> bool:
    """True for a report about the present container of a seat's present pod."""
    target = seat.target()
    return (target.pod_uid, target.container_id) == (progress.pod_uid, progress.container_id)


def _same_pod(seat: ManagedSeat, progress: SeatProgress) -> bool:
    return seat.pod is not None and progress.pod_uid == seat.pod.uid


# --- what is learned, and pauses after failures -----------------------------------------------------------------------


def _expected(took: float, since: WallTime | None, now: Now) -> float:
    """What a half that is over says about the next one, model seconds: all since then; where that is far more than the
    checkpointer measured, its part alone. A service that was down makes no later switch longer."""
    whole = took if since is None else max(took, now.wall - since)
    return (took if is_late(whole, took, None) else whole) * now.pace


def _mean(known: float, value: float, count: int = 0) -> float:
    """The mean after one more value; the first ones weigh as in a plain mean, the assumed one nothing."""
    return known + max(COST_WEIGHT, 1.0 / count if count else 0.0) * (value - known)


def _back_off_group(node: NodeState, group: str, why: str, now: Now) -> float:
    """A switch failed: pause the group, longer each time; returns its wall seconds. ``why``: which seat failed, and
    how."""
    node.groups[group].backoff.reason = why
    return node.groups[group].backoff.fail(now, first=0.25, longest=LONGEST_PAUSE_SECONDS)


def _back_off_activation(seat: ManagedSeat, pause: float, reason: str, now: Now) -> None:
    """Exponential back-off for a seat whose activation failed, longer than the group's own pause; otherwise a pinned or
    long-waiting seat is retried at once and starves the rest."""
    backoff = seat.backoff.activation
    seconds = backoff.fail(now, first=0.5, longest=LONGEST_REST_SECONDS, least=2 * pause)
    times = "once" if backoff.count == 1 else f"{backoff.count} times in a row"
    backoff.reason = f"did not come back {times}; others go first for {seconds:.0f} s: {reason}"


def _back_off_park(seat: ManagedSeat, pause: float, now: Now) -> None:
    """The same where its park failed: another victim goes first."""
    seat.backoff.park.fail(now, first=0.5, longest=UNPARKED_SECONDS, least=2 * pause)


def _drop_claim(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """A seat in the way of a claim stays: drop the claim, so that the others may have their GPUs back first."""
    if group := view.claiming(node, switch):
        del node.claims[group]
        _back_off_group(node, group, node.groups[switch.group].backoff.reason, now)
