"""What a seat or a switch is doing, for people: a stage with a stable name, its data, a text and its clock. Pure reads.

A phase is a state of a seat that ends by itself (``demand.PHASES``). What it usually takes is the median of the last
nine durations of its model, else of all seats of the node with the same backend. ``clock`` is what everybody reads.
"""

from typing import Any

from kybernate import deadlines
from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.demand import PHASES
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.core.stage import Clock, Stage
from services.gpu_manager.core.state import CUT_GRACE_SECONDS, GroupSwitch, NodeState, Rider, SwitchPhase

S = SeatState


def clock(node: NodeState, seat: ManagedSeat, now: Now) -> Clock:
    """The clock of a seat's present state; of one that does not end by itself: only since when, and why."""
    if seat.state not in PHASES:
        why = "evidence or an operator ends it" if seat.state is S.QUARANTINED else ""
        return Clock(seat.entered_wall, ends=why)
    usual = node.learning.usual(seat.model, seat.backend, seat.state)
    deadline, ends = _end(node, seat, now)
    return Clock(seat.entered_wall, usual, deadline, ends)


_ENDLESS = {
    S.RELEASING: "its container ends",
    S.BACKOFF: "its container starts again",
    S.DRAINING: "its switch is not known",
    S.PARKING: "its job is not known",
}
"""Of phases without a deadline: why they have none."""


def _end(node: NodeState, seat: ManagedSeat, now: Now) -> tuple[WallTime | None, str]:
    """When a phase ends at the latest and what happens then; or why nothing ends it, and who can."""
    switch, entered = node.switch_leaving(seat), seat.entered_wall
    if switch is not None and seat.state in (S.DRAINING, S.PARKING):
        return _leaves(node, seat, switch, now)
    match seat.state:
        case S.STARTING | S.RELEASING if seat.facts.waits and not seat.facts.alive:
            return seat.gate.expires, "given up"
        case S.STARTING if seat.rehearses and seat.rehearsal is not None:
            both = 2 * seat.half_seconds(0.0, now.pace) + deadlines.verify(0.0, now.pace)
            return seat.rehearsal.begun + both, "given up"
        case S.STARTING:
            return view.start_deadline(node, seat), "ended"
        case S.ACTIVATING | S.MIGRATING:
            known = node.learning.learned(seat.model, seat.backend, seat.state)
            return entered + seat.half_seconds(known, now.pace) + deadlines.verify(known, now.pace), "given up"
        case S.LOST:
            kill = 2 * deadlines.BASE_SECONDS / now.pace
            return entered + seat.half_seconds(0.0, now.pace) + kill, "quarantined"
    return None, _ENDLESS[seat.state]


def _leaves(node: NodeState, seat: ManagedSeat, switch: GroupSwitch, now: Now) -> tuple[WallTime | None, str]:
    """The same of a seat that a switch takes off its GPUs."""
    if seat.state is S.PARKING:
        if not switch.job.journaled:
            return None, "the checkpointer has to take the job"
        known = node.learning.learned(seat.model, seat.backend, S.PARKING)
        kill = 2 * deadlines.BASE_SECONDS / now.pace
        most = kill if seat.starts_cold else seat.half_seconds(known, now.pace)
        return switch.times.drained + switch.times.control_seconds + most, "given up"
    if not node.bus_up:
        return None, "it goes on once the bus is back"
    if switch.phase is SwitchPhase.CUTTING:
        return switch.drain.cut + CUT_GRACE_SECONDS, "parked"
    if not switch.drain.announced:
        return None, "its time begins with the roster"
    return now.wall + (switch.drain.deadline - now.model) / now.pace, "cut"


def going_on(node: NodeState, group: Group, now: Now) -> list[dict[str, Any]]:
    """Each seat of a group in a phase, in a sentence: ``G0: parking qwen3-32b, for 92 s (usually 1.7 s; given up at 2
    min 10 s); 29 requests wait``; whether that is late, and how many requests wait on the group."""
    seats = view.seats_on(node, group)
    waiting = sum(view.demand(node, seat).waiting for seat in seats if seat.state != S.ACTIVE)
    asks = f"; {waiting} request{'s wait' if waiting > 1 else ' waits'}" if waiting else ""
    found = []
    for seat in (one for one in seats if one.state in PHASES):
        said = f" ({seat.answered})" if seat.state is S.STARTING and seat.answered else ""
        time = clock(node, seat, now)
        text = f"{group.name}: {seat.state} {seat.model}{said}{time.text(now)}{asks}"
        found.append({"seat": seat.id, "text": text, "late": time.late(now), "waiting": waiting})
    return found


def of_switch(node: NodeState, switch: GroupSwitch, now: Now) -> Stage:
    """A switch under way: it drains, a rider keeps its job back, the park is not proven yet, or a seat is brought
    back."""
    if switch.phase in (SwitchPhase.DRAINING, SwitchPhase.CUTTING):
        return _drains(node, switch, now)
    victim = node.seats[switch.victim] if switch.victim is not None else None
    data: dict[str, Any] = {
        "op": switch.op,
        "group": switch.group,
        "victim": switch.victim,
        "incoming": switch.incoming,
    }
    leaves = victim is not None and victim.state in (S.PARKING, S.RELEASING, S.LOST)
    if victim is not None and leaves and victim.group.name == switch.group:
        since = now.wall - switch.times.drained
        kept_back = (rider.waits(node, switch, now) for rider in node.riders[Rider.waits] if switch.job.sent is None)
        if found := next((stage for stage in kept_back if stage is not None), None):
            return Stage(found.stage, found.text, {**data, **found.data, "drained_seconds": since}, found.clock)
        taken = "parks it" if switch.job.journaled else "has not confirmed the job"
        text = f"{victim.name} is being parked; its VRAM counts as free on evidence only; the checkpointer {taken}"
        data |= {"journaled": switch.job.journaled, "drained_seconds": since}
        return Stage("vram-evidence", text, data, clock(node, victim, now))
    incoming = node.seats[switch.incoming] if switch.incoming is not None else None
    if incoming is not None and incoming.state in COMING:
        text = f"the checkpointer activates {incoming.name} on group {switch.group}"
        return Stage("activating", text, data, clock(node, incoming, now))
    return Stage("switch", f"the switch of group {switch.group} ends in a moment", data)


def _drains(node: NodeState, switch: GroupSwitch, now: Now) -> Stage:
    """Which router, or the engine, the drain of the victim waits for."""
    victim, drain = node.seats[switch.victim or ""], switch.drain
    time = clock(node, victim, now)
    left = node.setup.drain_seconds / now.pace  # its time begins when it is announced
    if time.deadline is not None:
        left = max(0.0, time.deadline - now.wall)
    routers = node.routers.busy(victim.id, switch.epoch, now)
    waits: list[str] = []
    if switch.phase is SwitchPhase.CUTTING:
        waits.append("its streams are being cut; the engine notices")
    elif not node.bus_up:
        waits.append("the bus is away")
    elif not drain.announced:
        waits.append("the roster does not say yet that it drains")
    elif now.wall < node.routers.permitted_until:
        waits.append("a router without NATS may forward by an answer over HTTP")
    silent = node.routers.silent(now)
    for name, in_flight in routers.items():
        unheard = "acknowledges nothing, so it is not listed; its lease ends" if name in silent else "has not answered"
        waits.append(f"router {name} {unheard if in_flight is None else f'has {in_flight} in flight'}")
    endpoint = victim.pod.endpoint if victim.pod is not None else None
    asked = not waits
    if asked:
        waits.append(f"its engine {endpoint} still computes, or does not answer")
    text = f"{victim.name} drains: {'; '.join(waits)}"
    data = {"op": switch.op, "victim": victim.id, "incoming": switch.incoming, "seconds": left, "routers": routers}
    return Stage("drain", text, {**data, "engine": endpoint if asked else None}, time)


def unproven(node: NodeState, seat: ManagedSeat, now: Now) -> Stage:
    """A deleted or lost seat: evidence ends its hold."""
    what = "its pod is deleted"
    if seat.state is not S.RELEASING:
        what = f"its processes are being killed{f' ({seat.reason})' if seat.reason else ''}"
    ends = "the checkpointer finds none of its processes"
    if seat.starts_inside:
        ends = "the checkpointer finds that kyb-run has not started its engine by its ticket"
    elif seat.facts.waits and not seat.facts.alive:
        ends = "its ticket is over, by which its container may still start"
    text = f"{seat.name}: {what}; group {seat.group.name} is held until {ends}"
    data = {"seat": seat.id, "processes_gone": not (seat.facts.alive or seat.facts.waits)}
    return Stage("vram-evidence", text, data, clock(node, seat, now))


def starts(node: NodeState, seat: ManagedSeat, now: Now, no_ticket: str = "") -> Stage:
    """A start. ``no_ticket``: why a new call of it would get none."""
    at = f" at {seat.pod.endpoint}" if seat.pod is not None and seat.pod.endpoint else ""
    said = f": {seat.answered}" if seat.answered else ""
    stage, what = "starting", f"its engine loads and is not healthy yet{at}{said}"
    if not seat.facts.alive:
        what = "no process came yet" + (f"; it gets no other ticket: {no_ticket}" if no_ticket else "")
    elif seat.rehearses:
        stage, what = "rehearsing", "its engine is parked and activated once before it serves"
    text = f"{seat.name} starts on group {seat.group.name}: {what}"
    return Stage(stage, text, {"seat": seat.id}, clock(node, seat, now))


def backs_off(of: str, name: str, backoff: Backoff, why: str, now: Now) -> Stage:
    """A pause after a failure ``of`` a seat, a group, a park or a move."""
    left = max(0.0, backoff.until - now.wall)
    data = {"of": of, "name": name, "seconds": left, "until": float(now.unix) + left, "failures": backoff.count}
    return Stage("backoff", f"{why}; tried again", data, Clock(deadline=backoff.until))
