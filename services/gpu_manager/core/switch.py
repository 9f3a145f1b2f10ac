"""One switch of a group, from the decision until its job is sent: which seat leaves, which one arrives. Pure.

The phases are the table ``state.SWITCH_TRANSITIONS``; this file reads in the order in which they happen. What became of
both seats is in ``reports.py``. The incoming seat is chosen again when the victim is drained, and riders are asked
(``core/riders``). Each decision is published, with the numbers that were seen.
"""

from kybernate.deadlines import span
from kybernate.messages import DecidedBy, DecisionKind, GroupDecided, SeatLoad, SeatTarget, SwitchJob
from kybernate.policy import Switch
from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager.core import moves, view
from services.gpu_manager.core.demand import SILENT_SECONDS
from services.gpu_manager.core.facts import Trigger
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.moves import full_view
from services.gpu_manager.core.obstacles import QUARANTINED, first, obstacles, unready
from services.gpu_manager.core.state import (
    CUT_GRACE_SECONDS,
    RESEND_SECONDS,
    Drain,
    GroupSwitch,
    NodeState,
    Rider,
    SwitchPhase,
    SwitchTimes,
    SwitchTrigger,
)

S, T = SeatState, Trigger

MOST_LOADS = 8


# --- begin ------------------------------------------------------------------------------------------------------------


def drain(
    node: NodeState,
    victim: ManagedSeat,
    incoming: ManagedSeat | None,
    reason: str,
    now: Now,
    *,
    ordered: bool = False,
    clears_for: ManagedSeat | None = None,
    room_for: ManagedSeat | None = None,
) -> None:
    """Begin the switch that takes ``victim``, also one that starts, off its GPUs. The others: see GroupSwitch."""
    switch = begin(node, victim.group, victim, incoming, node.next_epoch(now), now)
    switch.ordered = ordered
    switch.room_for = room_for.id if room_for is not None else None
    if clears_for is not None:
        switch.clears_for, switch.cause = clears_for.id, clears_for.cause or switch.cause
    _publish(node, switch, reason, now)
    if victim.state is S.STARTING:
        _give_way(node, switch, victim, reason, now)
        return
    switch.times.leaves = None if view.demand(node, victim).in_flight else now.wall
    node.transition(victim, T.EVICT, now, epoch=switch.epoch, switch=switch, reason=reason)


def _give_way(node: NodeState, switch: GroupSwitch, victim: ManagedSeat, reason: str, now: Now) -> None:
    """A start gives way: a restart parks it. No router sends to it, so nothing drains."""
    usage, since = victim.usage, now.wall - victim.entered_wall
    usage.yielded = usage.yielded or (now.model - usage.busy) / now.pace <= since
    if view.overdue(victim, now):
        failed_start(victim, now)
    victim.durable.failed = victim.durable.failed.yielded(float(now.unix))
    victim.durable.spilled = f"its start gave way: {reason}"
    switch.advance(SwitchTrigger.IDLE)
    node.transition(victim, T.YIELDS, now, epoch=switch.epoch, switch=switch, reason=reason)
    step(node, switch, now)


def activate(node: NodeState, group: Group, incoming: ManagedSeat, reason: str, now: Now) -> None:
    """Begin the switch that brings a parked seat to a free slot: its job is sent at once."""
    switch = begin(node, group, None, incoming, node.next_epoch(now), now)
    _publish(node, switch, reason, now)
    lease(node, switch, incoming, now)
    step(node, switch, now)


def begin(
    node: NodeState, group: Group, victim: ManagedSeat | None, incoming: ManagedSeat | None, epoch: int, now: Now
) -> GroupSwitch:
    """A new switch."""
    concerned = incoming or victim
    switch = GroupSwitch(
        op=f"{group.name}-{epoch}",
        epoch=epoch,
        group=group.name,
        victim=victim.id if victim else None,
        incoming=incoming.id if incoming else None,
        cause=(concerned.cause if concerned else "") or f"policy-{group.name}-{epoch}",
        phase=SwitchPhase.DRAINING if victim else SwitchPhase.JOB,
        drain=Drain(deadline=now.model + node.setup.drain_seconds),
        times=SwitchTimes(decided=now.wall, drained=now.wall),
    )
    node.switches[group.name] = switch
    node.moved_views.clear()
    return switch


def lease(node: NodeState, switch: GroupSwitch, incoming: ManagedSeat, now: Now) -> None:
    """The group's GPUs are the incoming seat's from now on; on another group than it was parked on, it moves there."""
    group = node.groups[switch.group].group
    trigger, to = (T.LEASE, None) if incoming.group.name == group.name else (T.REMAP, group)
    epoch = max(switch.epoch, incoming.epoch)  # another seat may have been bound meanwhile
    incoming.durable.waited += view.demand(node, incoming).oldest_wait(now)
    reason = "" if to is None else f"from group {incoming.group.name}, restored here: {node.groups[group.name].why}"
    node.transition(incoming, trigger, now, epoch=epoch, switch=switch, to=to, reason=reason)


# --- draining and cutting ---------------------------------------------------------------------------------------------


def step(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Do what time and the state allow: drain, cut, send the job, bind the incoming seat late."""
    if switch.phase is SwitchPhase.DRAINING:
        _drain(node, switch, now)
    if switch.phase is SwitchPhase.CUTTING:
        _cut(node, switch, now)
    if switch.phase is SwitchPhase.JOB:
        sent = switch.job.sent
        due = not switch.job.journaled and (sent is None or now.wall >= sent + RESEND_SECONDS)
        if due and not any(rider.waits(node, switch, now) for rider in node.riders[Rider.waits]):
            _send(node, switch, now)


def _drain(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Wait for the routers and then for the engine.

    (1) The eviction is not justified any more, and no other seat waits for the place: the victim serves on. (2) The
    seat for which it leaves has room without it: the victim serves on. (3) That seat is not ready to take the place
    any more (evidence may end a quarantine), and no other waits for it: the victim serves on. (4) Without the bus
    nothing moves on. (5) Not all routers are quiet. (6) They are: from now on the engine is asked. (7) At the deadline
    streams are cut, but not before the roster says that the seat is closed, since a router that starts later would send
    to it while it is parked, and not while a router has not acknowledged that, until it counts as dead. (8) A router
    that lives and has not acknowledged it for long loses its lease; one that comes later has none. Then nothing waits
    for it. (9) The engine computes nothing.
    """
    victim, group = node.seats[switch.victim or ""], node.groups[switch.group].group
    if not _justified(node, switch, now) and not bind_another(node, switch, now):  # (1)
        again = switch.beneficiary is None
        _turn_back(node, switch, "it is wanted again" if again else "no seat waits for its place any more", now)
        return
    needs = node.seats.get(switch.incoming or switch.room_for or "")
    if needs is not None and not switch.ordered:
        if view.room(node, needs, on=group):  # (2)
            _turn_back(node, switch, f"there is room for {needs.name} without it", now)
            return
        found = unready(node, needs, group, now, without=victim)
        if found and found.row is not QUARANTINED and not bind_another(node, switch, now):  # (3)
            _turn_back(node, switch, found.text, now)
            return
    if not node.bus_up:  # (4)
        return
    drain = switch.drain
    settled = node.routers.settled(now)
    if drain.announced and settled and now.handled >= drain.announced + SILENT_SECONDS:  # (8)
        drain.overdue = drain.overdue or now.wall
        node.routers.set_aside(victim.id, switch.epoch, drain.overdue)
    _note_quiet(drain, bool(drain.announced) and node.routers.quiet(victim.id, switch.epoch, now), now)  # (5), (6)
    if drain.idle:  # (9)
        _drained(node, switch, SwitchTrigger.IDLE, "", now)
        return
    late = now.model >= drain.deadline and drain.announced and settled
    if late and not node.routers.unheard(victim.id, switch.epoch, now):  # (7)
        drain.cut = now.wall
        _drained(node, switch, SwitchTrigger.DEADLINE, "drain deadline passed; streams that still run are cut", now)


def _cut(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Wait until the routers have cut the streams and then for the engine, which notices it; not for long.

    Before the routers have, an engine may compute nothing and yet have requests to read, which it would begin while it
    is being parked.
    """
    quiet = node.routers.quiet(switch.victim or "", switch.epoch, now)
    _note_quiet(switch.drain, quiet, now)
    if switch.drain.idle:
        switch.advance(SwitchTrigger.IDLE)
    elif now.wall >= switch.drain.cut + CUT_GRACE_SECONDS:
        switch.advance(SwitchTrigger.GRACE_OVER)


def _note_quiet(drain: Drain, quiet: bool, now: Now) -> None:
    """Keep since when all routers are quiet."""
    if not quiet:
        drain.quiet, drain.idle = None, False
    elif drain.quiet is None:
        drain.quiet = now.wall


def _justified(node: NodeState, switch: GroupSwitch, now: Now) -> bool:
    """True while the eviction is justified: the seat that it is for has demand, or, without one, the victim has
    none."""
    if switch.ordered:
        return True
    if switch.beneficiary is None:
        return not view.requested(view.seat_view(node, node.seats[switch.victim or ""], now))
    unclaimed = switch.clears_for is not None and not view.claiming(node, switch)
    return not unclaimed and view.wanted(node, node.seats[switch.beneficiary], now)


def _drained(node: NodeState, switch: GroupSwitch, trigger: SwitchTrigger, reason: str, now: Now) -> None:
    """The victim gets nothing new, and is parked in any case."""
    switch.advance(trigger)
    switch.times.drained = now.wall
    victim = node.seats[switch.victim or ""]
    if silent := node.routers.silent(now):
        without = f"without {', '.join(sorted(silent))}, which acknowledges nothing and has no lease"
        reason = f"{reason}; {without}" if reason else without
    node.transition(victim, T.DRAINED, now, epoch=switch.epoch, switch=switch, reason=reason)


def _turn_back(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """Call a drain off: the victim serves on."""
    end(node, switch, SwitchTrigger.CALLED_OFF)
    node.transition(node.seats[switch.victim or ""], T.DEMAND, now, reason=reason)


def on_drain_announced(node: NodeState, seat: str, epoch: int, now: Now) -> None:
    """Every router that reads the roster from now on knows that this seat is closed; from now on requests in flight
    have the whole time of a drain."""
    found = node.seats.get(seat)
    switch = node.switch_leaving(found) if found is not None else None
    if switch is not None and switch.epoch == epoch and not switch.drain.announced:
        switch.drain.deadline = now.model + node.setup.drain_seconds
        switch.drain.announced = now.wall


# --- the incoming seat is chosen again --------------------------------------------------------------------------------


def bind(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Choose the incoming seat once more before the job is sent. Without another choice it stays while it is wanted."""
    if not _may_bind(switch) or (switch.incoming and node.seats[switch.incoming].state in COMING):
        return  # the job is sent again, to a checkpointer that lost its journal half way
    seat = _choice(node, switch, now)
    if seat is not None:
        set_incoming(node, switch, seat, now)
    elif switch.incoming and not view.wanted(node, node.seats[switch.incoming], now):
        switch.incoming = None


def bind_another(node: NodeState, switch: GroupSwitch, now: Now) -> bool:
    """The drain has lost its reason: bind another seat that waits for the victim's place, if there is one."""
    seat = _choice(node, switch, now) if _may_bind(switch) else None
    if seat is None or not view.wanted(node, seat, now):
        return False
    set_incoming(node, switch, seat, now)
    return True


def _choice(node: NodeState, switch: GroupSwitch, now: Now) -> ManagedSeat | None:
    """The seat that the policy would activate now; None if it picks none or the pick cannot be activated."""
    group, victim = node.groups[switch.group], node.seats[switch.victim or ""]
    decision = node.setup.policy.decide(full_view(node, group.group, now))
    if not isinstance(decision, Switch) or decision.evict is not None:
        return None
    seat = node.seats[decision.activate]
    ready = seat.acts_as is S.PARKED or (seat.acts_as is S.WAITING and view.calls(seat, now, group.group))
    if not ready or seat is victim:
        return None
    if first(obstacles(node, seat, group.group, now, act="send", without=victim)) is not None:
        return None
    if seat.id != switch.incoming:
        group.why = decision.reason
    return seat


def _may_bind(switch: GroupSwitch) -> bool:
    """True for a switch whose incoming seat the policy chooses."""
    return switch.clears_for is None and switch.victim is not None


def set_incoming(node: NodeState, switch: GroupSwitch, seat: ManagedSeat, now: Now) -> None:
    """Bind a seat: the switch brings it."""
    if seat.id != switch.incoming:
        switch.incoming, switch.cause = seat.id, seat.cause or switch.cause
        _publish(node, switch, node.groups[switch.group].why, now)


# --- the job ----------------------------------------------------------------------------------------------------------


def _send(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """Send the job; sending the same operation again is harmless, the checkpointer knows it by its name."""
    if switch.job.sent is None:
        bind(node, switch, now)
    group = node.groups[switch.group].group
    victim = node.seats[switch.victim] if switch.victim else None
    if victim is not None and not _is_parked_by(victim, switch):
        victim = None
    incoming = node.seats[switch.incoming] if switch.incoming else None
    if switch.job.sent is None and incoming is not None and incoming.state not in COMING:
        if switch.victim is None:
            end(node, switch, SwitchTrigger.REFUSED)  # the checkpointer lost the job, and its only seat comes no more
            return
        if first(obstacles(node, incoming, group, now, act="send", without=victim)) is not None:
            switch.incoming = incoming = None  # the victim may leave
    switch.job.sent = now.wall
    if incoming is not None:
        restarts = moves.starts_on(node, incoming, group)
        comes = incoming.state in COMING and incoming.group.name == switch.group
        if restarts or (incoming.acts_as is not S.PARKED and not comes):
            incoming = None  # it starts with a ticket once the group is free, or it is gone
    if incoming is not None and incoming.epoch > switch.epoch:
        rename(node, switch, now)  # it was parked after this switch began; its epoch must not fall
    park: tuple[SeatTarget, ...] = ()
    if victim is not None:
        usual = node.learning.learned(victim.model, victim.backend, S.PARKING)
        park = (victim.target().model_copy(update={"usual_seconds": usual}),)
        for rider in node.riders[Rider.parks]:
            park = (rider.parks(node, victim, park[0]),)
    node.effects.append(
        SwitchJob(
            cause=switch.cause,
            node=node.name,
            epoch=switch.epoch,
            op=switch.op,
            group=switch.group,
            park=park,
            activate=view.target(node, incoming, group) if incoming is not None else None,
        )
    )


def _is_parked_by(victim: ManagedSeat, switch: GroupSwitch) -> bool:
    """False once the victim left in another way, while the job was on its way or its journal was lost: its next
    container is not this job's to park, wherever it starts."""
    return victim.group.name == switch.group and victim.state in (S.PARKING, S.RELEASING, S.LOST, S.QUARANTINED)


def rename(node: NodeState, switch: GroupSwitch, now: Now) -> None:
    """A new epoch and name, also of the seats that it moves: by these a next manager asks for the job."""
    moved = [seat for one in (switch.victim, switch.incoming) if one and (seat := node.seats[one]).op == switch.op]
    switch.epoch = node.next_epoch(now)
    switch.op = f"{switch.group}-{switch.epoch}"
    for seat in moved:
        seat.epoch, seat.op = switch.epoch, switch.op
    _publish(node, switch, node.groups[switch.group].why, now)


# --- the end ----------------------------------------------------------------------------------------------------------


def end(node: NodeState, switch: GroupSwitch, trigger: SwitchTrigger) -> None:
    """The switch is over."""
    switch.advance(trigger)
    node.switches.pop(switch.group, None)
    node.moved_views.clear()
    if switch.victim is not None:
        node.routers.forget(switch.victim)


def leave(node: NodeState, seat: ManagedSeat) -> None:
    """A victim that exits by itself need not be parked, unless the checkpointer may have the job already."""
    switch = node.switch_leaving(seat)
    if switch is not None and not switch.job.journaled and switch.job.sent is None:
        end(node, switch, SwitchTrigger.VICTIM_LEFT)


def failed_start(seat: ManagedSeat, now: Now) -> str:
    """Count a start in which the engine was not healthy in time, and return that as a reason."""
    reason = f"its engine was not healthy within {span(now.wall - seat.entered_wall)}"
    reason += f": {seat.answered}" if seat.answered else ""
    seat.failed(reason, now)
    return reason


# --- what was decided -------------------------------------------------------------------------------------------------


def _publish(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """A switch begins, or its incoming seat is another one now."""
    group, incoming = node.groups[switch.group], node.seats.get(switch.beneficiary or "")
    group.stay_due = WallTime(0.0)
    decided(node, group.group, "switch" if switch.incoming else "park", reason, now, incoming=incoming, switch=switch)


def decided(
    node: NodeState,
    group: Group,
    kind: DecisionKind,
    reason: str,
    now: Now,
    *,
    incoming: ManagedSeat | None = None,
    switch: GroupSwitch | None = None,
) -> None:
    """Publish a decision about a group."""
    victim = node.seats.get(switch.victim or "") if switch is not None else None
    by: DecidedBy = "operator" if switch and switch.ordered else "claim" if switch and switch.clears_for else "policy"
    concerned = incoming or victim
    cause = concerned.default_cause if switch is None and concerned is not None else f"group-{group.name}"
    node.effects.append(
        GroupDecided(
            id=f"{node.name}:{group.name}:decided:{node.next_seq(now)}",
            cause=switch.cause if switch is not None else cause,
            at=float(now.unix),
            node=node.name,
            group=group.name,
            decision=kind,
            by=by,
            op=switch.op if switch is not None else "",
            victim=victim.id if victim is not None else "",
            victim_model=victim.model if victim is not None else "",
            incoming=incoming.id if incoming is not None else "",
            model=concerned.model if concerned is not None else "",
            reason=reason,
            loads=tuple(_loads(node, group, victim, incoming, now)),
        )
    )


def _loads(
    node: NodeState, group: Group, victim: ManagedSeat | None, incoming: ManagedSeat | None, now: Now
) -> list[SeatLoad]:
    """The seats concerned, then the others that hold the group or have demand, by waiting requests."""
    first = {seat.id: seat for seat in (incoming, victim) if seat is not None}
    others = [_load(node, seat, now) for seat in view.seats_on(node, group) if seat.id not in first]
    busy = [load for load in others if load.active_seconds is not None or load.waiting or load.in_flight]
    busy.sort(key=lambda load: (-load.waiting, -load.in_flight, load.seat))
    return [*(_load(node, seat, now) for seat in first.values()), *busy][:MOST_LOADS]


def _load(node: NodeState, seat: ManagedSeat, now: Now) -> SeatLoad:
    seen = view.seat_view(node, seat, now)
    return SeatLoad(
        seat=seat.id,
        model=seat.model,
        state=seat.state,
        waiting=seen.waiting,
        in_flight=seen.in_flight,
        oldest_wait_seconds=round(seen.oldest_wait_seconds, 3),
        active_seconds=round(seen.active_seconds, 3) if seat.state is S.ACTIVE else None,
        slo_seconds=seen.slo_seconds,
    )
