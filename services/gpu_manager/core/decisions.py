"""Events about decisions: what was decided for a group, why, and the numbers that were seen. Pure."""

from kybernate.messages import DecidedBy, DecisionKind, GroupDecided, SeatLoad
from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.group_switch import GroupSwitch
from services.gpu_manager.core.inputs import Now, WallTime
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.state import NodeState

S = SeatState

MOST_LOADS = 8
STAY_SECONDS = 15.0
"""Wall: how often an event repeats that requests wait while a group stays as it is."""
LOOK_SECONDS = 1.0
"""Wall: how often such requests are looked for."""


def of_switch(node: NodeState, switch: GroupSwitch, reason: str, now: Now) -> None:
    """A switch begins, or its incoming seat is another one now."""
    group, incoming = node.groups[switch.group], node.seats.get(switch.beneficiary or "")
    group.stay_due = WallTime(0.0)
    decided(node, group.group, "switch" if switch.incoming else "park", reason, now, incoming=incoming, switch=switch)


def stays(node: NodeState, group: Group, now: Now) -> None:
    """Report that requests wait for seats of a group that begins no switch, from time to time."""
    state = node.groups[group.name]
    if now.wall < state.stay_due:
        return
    waiting = [
        seat
        for seat in node.seats_on(group)
        if seat.state in (S.PARKED, S.WAITING) and view.demand(node, seat).waiting > 0
    ]
    state.stay_due = now.wall + (STAY_SECONDS if waiting else LOOK_SECONDS)
    if waiting:
        pause = "it pauses after a switch that failed" if state.backoff.active(now) else state.why
        longest = max(waiting, key=lambda seat: view.demand(node, seat).oldest_wait(now))
        decided(node, group, "stay", pause, now, incoming=longest)


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
    others = [_load(node, seat, now) for seat in node.seats_on(group) if seat.id not in first]
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
