"""What each seat waits for: one stage with a stable name, its data, and a text for people. Pure reads.

``docs/operate.md`` lists the stages; ``GET /v1/why`` and ``kyb why`` show them.
"""

from dataclasses import dataclass, field
from typing import Any

from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager import view
from services.gpu_manager.group_switch import GroupSwitch, SwitchPhase
from services.gpu_manager.inputs import Now
from services.gpu_manager.ledger import OperatorOrder
from services.gpu_manager.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.state import NodeState

S = SeatState

_LEAVING_UNPROVEN = (S.RELEASING, S.LOST)
"""Holders whose processes end; evidence ends their lease."""


@dataclass(frozen=True, slots=True)
class SeatStage:
    """What a seat waits for. Times in ``data`` are wall seconds from now."""

    stage: str
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"stage": self.stage, "text": self.text, "data": self.data}


def seat_stage(node: NodeState, seat: ManagedSeat, now: Now) -> SeatStage:
    """The stage of an owned seat: what it does, else what it waits for."""
    match seat.state:
        case S.ACTIVE:
            return SeatStage("active")
        case S.QUARANTINED:
            return SeatStage("quarantined", seat.reason, {"conflict": seat.durable.conflict})
        case S.RELEASING | S.LOST:
            return _unproven(seat)
        case S.BACKOFF:
            return SeatStage("container", f"kubelet starts its container again: {seat.reason}")
        case S.STARTING:
            return _starts(node, seat)
        case S.DRAINING | S.PARKING | S.ACTIVATING | S.MIGRATING:
            switch = node.switches.get(seat.group.name)
            return SeatStage("switch", "its switch is over in a moment") if switch is None else _of(node, switch, now)
    return _waits(node, seat, now)


def _waits(node: NodeState, seat: ManagedSeat, now: Now) -> SeatStage:
    """A seat that is parked or at the start gate.

    (1) It can never start. (2) An operator drained its GPUs. (3) Foreign processes, a seat of which nothing tells where
    it is, a broken invariant. (4) It is not wanted. (5) A faulty GPU. (6) It, or its group, backs off. (7) The bus or
    the routers. (8) Its group, or the one to which an operator moves it.
    """
    group = node.groups[node.moves.get(seat.id, seat.group.name)].group
    if refused := seat.refused():  # (1)
        return SeatStage("refused", refused)
    if drained := node.shut_out(seat) or (node.drained_on(group) if seat.id in node.moves else ""):  # (2)
        return _drained(node, node.drain_on(group) or node.drain_on(seat.group), drained)
    movable = node.may_move(seat) and seat.id not in node.moves
    if not movable and (foreign := node.foreign_on(group)):  # (3)
        return _foreign(node, group, foreign)
    if unlocated := node.unlocated_on(group):
        return SeatStage("unlocated-seat", unlocated)
    if not movable and (broken := node.broken_on(group)):
        return SeatStage("invariant-broken" if broken in node.broken.values() else "lost-ticket", broken)
    if seat.copy_ends:
        return SeatStage("container", f"its container ends and is started again: {seat.durable.spilled}")
    if not view.wanted(node, seat, now):  # (4)
        return _unwanted(node, seat)
    if not movable and (faulty := _faulty(node, group)):  # (5)
        return faulty
    if seat.yields_group(now):  # (6)
        return _backoff("seat", seat.id, seat.backoff.activation, seat.backoff.activation.reason, now)
    state = node.groups[group.name]
    if state.backoff.active(now):
        return _backoff("group", group.name, state.backoff, f"group {group.name} pauses after a failed switch", now)
    if not node.bus_up or not node.routers.settled(now):  # (7)
        text = "the bus is away" if not node.bus_up else "routers publish their presence after a restart or outage"
        return SeatStage("routers", f"nothing is evicted: {text}", {"bus": node.bus_up})
    return _group_stage(node, seat, group, now)  # (8)


def _group_stage(node: NodeState, seat: ManagedSeat, group: Group, now: Now) -> SeatStage:
    """What keeps a group from activating a seat.

    (1) A switch of this group, or of one that shares its GPUs. (2) A barrier: its GPUs are cleared for another group.
    (3) Pinned holders. (4) Holders whose end is not proven, that are quarantined, start, or could not be parked. (5)
    The minimum active time of a holder. (6) The policy.
    """
    state = node.groups[group.name]
    switch = node.switches.get(group.name) or view.switch_in_the_way(node, group)
    switch = switch or next((s for o in state.neighbours if (s := node.switches.get(o.name)) is not None), None)
    if switch is not None:  # (1)
        return _of(node, switch, now)
    if (claimant := view.claimed_for(node, group, now)) is not None:  # (2)
        larger = node.seats[claimant].group
        text = f"the GPUs of group {group.name} are being cleared for {claimant} of group {larger.name}"
        return SeatStage("barrier", text, {"group": larger.name, "seat": claimant})
    own, others = view.holders(node, group), view.in_the_way(node, group)
    pinned = [other for other in (*own, *others) if other.pinned]
    full = len(pinned) >= group.slots or not view.fit_together(node, group, [*(o for o in own if o.pinned), seat])
    if any(other in pinned for other in others) or (own and full):  # (3)
        names = ", ".join(f"{other.id} ({other.model})" for other in pinned)
        text = f"group {group.name} is kept by pinned {names}; kyb unpin it"
        return SeatStage("pinned-neighbour", text, {"seats": [other.id for other in pinned]})
    for other in (*own, *others):  # (4)
        if found := _held(node, other, now):
            return found
    if state.settles and state.wake is not None:  # (5)
        left = max(0.0, (state.wake - now.model) / now.pace)
        return SeatStage("minimum-active-time", state.why, {"seats": [o.id for o in own + others], "seconds": left})
    if seat.state is S.WAITING and not seat.calls(now):
        return SeatStage("start-gate", "kubelet calls the start gate again in a moment")
    return SeatStage("policy", state.why)  # (6)


def _held(node: NodeState, holder: ManagedSeat, now: Now) -> SeatStage | None:
    """Why a holder cannot leave now; None: it could."""
    if holder.state in _LEAVING_UNPROVEN:
        return _unproven(holder)
    if holder.state is S.QUARANTINED:
        text = f"{holder.id} holds group {holder.group.name} and is quarantined: {holder.reason}"
        return SeatStage("quarantined", text, {"seat": holder.id})
    if holder.state is S.STARTING:
        return _starts(node, holder)
    if holder.backoff.park.active(now):
        text = f"{holder.id} of group {holder.group.name} could not be parked"
        return _backoff("park", holder.id, holder.backoff.park, text, now)
    return None


# --- the stages -------------------------------------------------------------------------------------------------------


def _of(node: NodeState, switch: GroupSwitch, now: Now) -> SeatStage:
    """A switch under way: it drains, the park is not proven yet, or a seat is brought back."""
    if switch.phase in (SwitchPhase.DRAINING, SwitchPhase.CUTTING):
        return _drains(node, switch, now)
    victim = node.seats[switch.victim] if switch.victim is not None else None
    data = {"op": switch.op, "group": switch.group, "victim": switch.victim, "incoming": switch.incoming}
    if victim is not None and victim.state in (S.PARKING, *_LEAVING_UNPROVEN) and victim.group.name == switch.group:
        taken = "parks it" if switch.job.journaled else "has not confirmed the job"
        text = f"{victim.id} is being parked; its VRAM counts as free on evidence only; the checkpointer {taken}"
        since = now.wall - switch.times.drained
        return SeatStage("vram-evidence", text, {**data, "journaled": switch.job.journaled, "drained_seconds": since})
    incoming = node.seats[switch.incoming] if switch.incoming is not None else None
    if incoming is not None and incoming.state in COMING:
        return SeatStage("activating", f"the checkpointer activates {incoming.id} on group {switch.group}", data)
    return SeatStage("switch", f"the switch {switch.op} ends in a moment", data)


def _drains(node: NodeState, switch: GroupSwitch, now: Now) -> SeatStage:
    """Which router, or the engine, the drain of the victim waits for."""
    victim, drain = node.seats[switch.victim or ""], switch.drain
    left = max(0.0, (drain.deadline - now.model) / now.pace)
    if not drain.announced:  # its time begins then
        left = node.setup.drain_seconds / now.pace
    elif switch.phase is SwitchPhase.CUTTING:
        left = max(0.0, drain.cut + view.CUT_GRACE_SECONDS - now.wall)
    routers = node.routers.busy(victim.id, switch.epoch, frozen=drain.freeze)
    waits: list[str] = []
    if switch.phase is SwitchPhase.CUTTING:
        waits.append("its streams are being cut; the engine notices")
    elif not node.bus_up:
        waits.append("the bus is away")
    elif not drain.announced:
        waits.append("the roster does not say yet that it drains")
    elif now.wall < node.routers.permitted_until:
        waits.append("a router without NATS may forward by an answer over HTTP")
    for name, in_flight in routers.items():
        waits.append(f"router {name} " + ("has not answered" if in_flight is None else f"has {in_flight} in flight"))
    endpoint = victim.pod.endpoint if victim.pod is not None else None
    asked = not waits
    if asked:
        waits.append(f"its engine {endpoint} still computes, or does not answer")
    text = f"{victim.id} ({victim.model}) drains, for {left:.0f} s more at most: {'; '.join(waits)}"
    data = {"op": switch.op, "victim": victim.id, "incoming": switch.incoming, "seconds": left, "routers": routers}
    return SeatStage("drain", text, {**data, "engine": endpoint if asked else None})


def _unproven(seat: ManagedSeat) -> SeatStage:
    what = "its pod is deleted" if seat.state is S.RELEASING else "its processes are being killed"
    text = f"{seat.id}: {what}; group {seat.group.name} is held until the checkpointer finds none of its processes"
    return SeatStage("vram-evidence", text, {"seat": seat.id, "processes_gone": seat.processes_gone})


def _starts(node: NodeState, seat: ManagedSeat) -> SeatStage:
    what = "its engine loads and is not healthy yet" if seat.durable.seen_running else "no process came yet"
    if not seat.durable.seen_running and not view.room(node, seat):
        beside = (*view.holders(node, seat.group), *view.in_the_way(node, seat.group))
        names = ", ".join(f"{other.id} ({other.state.value})" for other in beside if other is not seat) or "a switch"
        what += f"; it gets no other ticket: {node.broken_on(seat.group) or f'no room beside {names}'}"
    return SeatStage("starting", f"{seat.id} starts on group {seat.group.name}: {what}", {"seat": seat.id})


def _unwanted(node: NodeState, seat: ManagedSeat) -> SeatStage:
    if seat.state is S.PARKED:
        return SeatStage("idle")
    if seat.gate.called is None:
        return SeatStage("start-gate", "kubelet has not called the start gate for it yet", {"called": False})
    text = f"without requests it starts {node.setup.start_within_seconds:.0f} s after the first call (warmup is off)"
    return SeatStage("start-gate", text)


def _drained(node: NodeState, drain: OperatorOrder | None, text: str) -> SeatStage:
    assert drain is not None, text
    scope = drain.target or node.name
    return SeatStage("drained", text, {"op": drain.op, "scope": scope, "for": drain.purpose, "actor": drain.actor})


def _foreign(node: NodeState, group: Group, text: str) -> SeatStage:
    found = [{"gpu": one.gpu, "pid": one.pid, "name": one.name} for one in node.foreign if one.gpu in group.physical]
    return SeatStage("foreign-process", text, {"processes": found})


def _faulty(node: NodeState, group: Group) -> SeatStage | None:
    found = {gpu.index: reason for gpu in group.gpus if (reason := node.faulty.get(gpu.uuid))}
    if not found:
        return None
    names = "; ".join(f"GPU {index}: {reason}" for index, reason in found.items())
    text = f"a GPU of group {group.name} is faulty, activations on it may fail: {names}"
    return SeatStage("faulty-gpu", text, {"gpus": [{"index": i, "reason": why} for i, why in found.items()]})


def _backoff(of: str, name: str, backoff: Backoff, why: str, now: Now) -> SeatStage:
    left = max(0.0, backoff.until - now.wall)
    data = {"of": of, "name": name, "seconds": left, "until": float(now.unix) + left, "failures": backoff.count}
    return SeatStage("backoff", f"{why}; tried again in {left:.0f} s", data)
