"""What operators order: that GPUs are empty (a drain), and that a seat is on another group (a move). Pure.

An order is a level: ``OperatorOrder`` in the ledger, set and taken away. What is left to do follows from it and from
the seats' own states, so a command that is repeated changes nothing, and a manager that is killed in the middle goes on
where it was. Ordered seats leave their groups; the policy of the target group brings a moved seat in, by its ordinary
rules. A move ends when its seat is there; why it failed is kept for ``KEPT_SECONDS``, or until another one is ordered.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from kybernate.messages import (
    EVENT_OF_STATE,
    Command,
    CommandReply,
    DrainNode,
    MigrateSeat,
    OrderCommand,
    OrderStatus,
    ResumeNode,
)
from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.core.obstacles import (
    IMMOVABLE,
    Ask,
    first,
    heads_to,
    lasting,
    no,
    obstacles,
    ordered_to,
    row,
    seat_refused,
    stage,
)
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import NodeState, Rider, Sample
from services.gpu_manager.ledger import Ledger, OperatorOrder

S = SeatState

MOVE_SECONDS = 600.0
"""Wall: a move that could not be carried out fails after this; the seat is then parked where it was."""
KEPT_SECONDS = 3600.0
"""Wall: how long it is shown why a move failed."""

_MOVABLE = (S.ACTIVE, S.PARKED, S.WAITING)
_EMPTY = (S.WAITING, S.PARKED, S.BACKOFF, S.FREE)
"""States without VRAM on the group."""


class Operations(Rider):
    """What keeps seats off drained groups, takes them off, and moves them."""

    name = "operations"

    def row(self, node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
        """Which drain keeps it off its group."""
        return {"drained": drained(node, seat.group)}

    def metrics(self, node: NodeState, now: Now) -> Iterable[Sample]:
        """Which groups are drained."""
        for group in node.setup.groups:
            value = float(drain_on(node, group) is not None)
            text = "1 while a drain keeps seats off the group"
            yield Sample("kybernate_group_drained", text, value, {"group": group.name})

    def why(self, node: NodeState, of: Group | ManagedSeat | None, now: Now) -> Any:
        """What is ordered, and why moves failed lately; of a group which drain empties it."""
        if of is None:
            return [one.model_dump(mode="json") for one in statuses(node, now)]
        return {"drained": drained(node, of)} if isinstance(of, Group) else None

    def answers(self, node: NodeState, command: Command, now: Now) -> CommandReply | None:
        """Set or take away an order, or refuse it with a reason; a command that is repeated answers what is true."""
        if isinstance(command, OrderCommand) and command.dry_run:
            return no("unsupported", "a dry run is not known any more: kyb why shows the seats and what they wait for")
        who: dict[str, Any] = {"actor": command.actor, "cause": command.cause, "begun": float(now.unix)}
        match command:
            case MigrateSeat(seat=seat, to=to):
                return _migrate(node, OperatorOrder(f"migrate {seat}", "migrate", seat, to, **who), now)
            case DrainNode(group=group, purpose=purpose):
                return _drain(node, OperatorOrder(f"drain {group}", "drain", group, purpose=purpose, **who), now)
            case ResumeNode(group=group):
                return _resume(node, OperatorOrder(f"resume {group}", "resume", group))
        return None

    def expels(self, node: NodeState, holder: ManagedSeat) -> str:
        """A drain is in force there, or the seat is being moved."""
        drain, to = drain_on(node, holder.group), ordered_to(node, holder)
        if drain is not None and (drain.purpose == "upgrade" or not holder.pinned):
            return drained(node, holder.group)
        return f"it moves to group {to}" if to not in ("", holder.group.name) else ""

    def step(self, node: NodeState, now: Now) -> None:
        """A move asks for its seat until it is there, or has failed."""
        for name, move in [*node.moves.items()]:
            _advance(node, name, move, now)


@row(100, "drained", "group", "operator", code="drained", drives_out=True)
def DRAINED(ask: Ask) -> Stage | None:
    """A drain is in force on one of its GPUs; their holders leave. Data: ``scope``, ``for``, ``actor``."""
    drain = drain_on(ask.node, ask.group)
    if drain is None:
        return None
    data = {"scope": drain.target or ask.node.name, "for": drain.purpose, "actor": drain.actor}
    return Stage("drained", drained(ask.node, ask.group), data)


def drain_on(node: NodeState, group: Group) -> OperatorOrder | None:
    """The drain that empties GPUs of this group, also that of a group that shares one with it."""
    if not node.drains or "" in node.drains:
        return node.drains.get("")
    mine = {*group.uuids}
    return next((drain for drain in node.drains.values() if not mine.isdisjoint(drain.gpus)), None)


def drained(node: NodeState, group: Group) -> str:
    """Which drain keeps seats off a group, and how it ends; empty: none does."""
    drain = drain_on(node, group)
    if drain is None:
        return ""
    command = f"kyb resume group {drain.target}" if drain.target else f"kyb resume node {node.name}"
    scope = drain.scope if drain.target else f"node {node.name}"
    return f"{scope} is drained for {drain.purpose} by {drain.actor}; it ends with: {command}"


# --- commands ---------------------------------------------------------------------------------------------------------


def _migrate(node: NodeState, order: OperatorOrder, now: Now) -> CommandReply:
    """(1) It is ordered already. (2) It is where it shall be, and not on its way: a move elsewhere is called off."""
    known = node.moves.get(order.target)
    if known is not None and not known.outcome and known.to == order.to:  # (1)
        return _yes(node, known, now)
    refused = _migrate_refused(node, order, now)
    if refused is not None:
        return refused
    seat = node.seats[order.target]
    if _result(node, order, now)[0] == "done":  # (2)
        _forget(node, order.target)
    else:
        node.moves[seat.id], seat.cause = order, order.cause
        seat.backoff.move, seat.backoff.activation = Backoff(), Backoff()
        _advance(node, seat.id, order, now)
    return _yes(node, order, now)


def _drain(node: NodeState, order: OperatorOrder, now: Now) -> CommandReply:
    """It is known if it is for the same, on the same GPUs: groups change. Drains under way on the group go on, without
    the seat that they made room for."""
    known = node.drains.get(order.target)
    if order.target:
        state = node.groups.get(order.target)
        if state is None:
            return _unknown(node, order.target)
        order.gpus = state.group.uuids
    if known is None or (known.purpose, known.gpus) != (order.purpose, order.gpus):
        pinned = [seat.name for seat in _concerned(node, order) if seat.pinned and seat.state not in _EMPTY]
        if pinned and order.purpose != "upgrade":
            names, cure = ", ".join(pinned), "unpin it first, or drain for upgrade, which parks pinned seats too"
            return no("pinned", f"pinned {names} would stay; {cure}")
        node.drains[order.target] = known = order
        for switch in node.switches.values():
            if switch.victim is None or switch.holds_group:
                continue
            if drain_on(node, node.seats[switch.victim].group) is not None:
                switch.ordered, switch.incoming, switch.room_for = True, None, None
    return _yes(node, known, now)


def _resume(node: NodeState, order: OperatorOrder) -> CommandReply:
    known, state = node.drains.pop(order.target, None), node.groups.get(order.target)
    if known is None and order.target:
        if state is None:
            return _unknown(node, order.target)
        if text := drained(node, state.group):
            return no("drained", f"group {order.target} is drained by another order: {text}")
    left = ", ".join(one.scope for one in node.drains.values())
    text = "seats are started and activated again" if known is not None else "it was not drained"
    text = f"{order.scope}: {text}" + (f"; still drained: {left}" if left else "")
    return CommandReply(accepted=True, order=OrderStatus(verb="resume", target=order.target, text=text, outcome="done"))


def _yes(node: NodeState, order: OperatorOrder, now: Now) -> CommandReply:
    return CommandReply(accepted=True, order=status(node, order, now))


def _unknown(node: NodeState, group: str) -> CommandReply:
    return no("unknown-group", f"node {node.name} has no group {group}; it has {', '.join(node.groups)}")


def _migrate_refused(node: NodeState, order: OperatorOrder, now: Now) -> CommandReply | None:
    """(1) The seat. (2) The group. (3) The pair. (4) What keeps the group from taking it."""
    if (refused := seat_refused(node, order.target)) is not None:  # (1)
        return refused
    seat, state = node.seats[order.target], node.groups.get(order.to)
    if seat.pinned:
        return no("pinned", f"{seat.name} is pinned; unpin it first", epoch=seat.epoch)
    if state is None:  # (2)
        return _unknown(node, order.to)
    if seat.group.name == order.to:  # (3)
        return None
    if to := ordered_to(node, seat):
        return no("busy", f"{seat.name} is being moved to group {to} already", retry=5.0)
    found = first(obstacles(node, seat, state.group, now, act="command"))
    if found is not None and found.row is IMMOVABLE:
        return found.refusal(seat, found.text)
    if seat.state not in _MOVABLE:
        text = f"{seat.name} is {seat.state}; only an active or parked seat can be moved"
        return no("not-active", text, epoch=seat.epoch, retry=2.0)
    return found.refusal(seat, f"{seat.name} on group {order.to}: {found.text}") if found is not None else None  # (4)


def _concerned(node: NodeState, order: OperatorOrder) -> list[ManagedSeat]:
    """The owned seats that are on the GPUs of a drain."""
    gpus = {*order.gpus}
    return [
        seat
        for seat in node.seats.values()
        if seat.pod is not None and (not order.target or not gpus.isdisjoint(node.gpus_of(seat)))
    ]


def restore(node: NodeState, ledger: Ledger) -> None:
    """Orders as the ledger has them. Older releases also kept those that are over."""
    for order in ledger.orders:
        if order.verb == "drain" and order.op in ledger.drains:
            node.drains[order.target] = replace(order, outcome="", reason="")
        elif order.verb == "migrate" and order.outcome in ("", "failed"):
            node.moves[order.target] = move = replace(order)
            if not move.outcome and (move.target not in node.seats or move.to not in node.groups):
                move.outcome, move.reason = "failed", "the configuration has no such seat or group any more"


# --- how far they are -------------------------------------------------------------------------------------------------


def statuses(node: NodeState, now: Now) -> list[OrderStatus]:
    """What is ordered, and why moves failed lately."""
    return [status(node, order, now) for order in (*node.drains.values(), *node.moves.values())]


def status(node: NodeState, order: OperatorOrder, now: Now) -> OrderStatus:
    """How far an order is."""
    (outcome, text), model = _result(node, order, now), ""
    if order.verb == "migrate" and (seat := node.seats.get(order.target)) is not None:
        model, text = seat.name, text if outcome else _text(node, seat, now)
    return OrderStatus(
        verb=order.verb,
        target=order.target,
        model=model,
        to=order.to,
        purpose=order.purpose,
        actor=order.actor,
        begun_at=order.begun,
        text=text,
        outcome=outcome,
    )


def _advance(node: NodeState, name: str, move: OperatorOrder, now: Now) -> None:
    """(1) Its request to be active lasts as long as the move."""
    outcome, text = _result(node, move, now)
    if move.outcome:
        if float(now.unix) > move.begun + KEPT_SECONDS:
            del node.moves[name]
        return
    seat = node.seats[name]
    if not outcome:
        usage = seat.usage
        usage.wanted_since, usage.wanted_until = usage.wanted_since or now.model, now.wall + MOVE_SECONDS  # (1)
        return
    _forget(node, name)
    if outcome == "failed":
        move.outcome, move.reason, node.moves[name] = outcome, text, move
        if seat.state in _MOVABLE:
            seat.reason = f"not moved to group {move.to}: {text}"
            node.emit(seat, EVENT_OF_STATE[seat.state], now, cause=move.cause, previous=seat.state)


def _forget(node: NodeState, name: str) -> None:
    if node.moves.pop(name, None) is not None:
        node.seats[name].usage.wanted_since = None


def _result(node: NodeState, order: OperatorOrder, now: Now) -> tuple[Literal["", "done", "failed"], str]:
    """The outcome of an order, empty while it goes on, with what is true then, or what a drain waits for."""
    if order.outcome:
        return "failed", order.reason
    if order.verb == "drain":
        busy = "; ".join(_text(node, seat, now) for seat in _busy(node, order))
        return ("", busy) if busy else ("done", f"no seat holds a GPU of {order.scope}{_left_over(node, order)}")
    seat = node.seats[order.target]
    if seat.state in (S.FREE, S.RELEASING):
        return "failed", "its pod is gone"
    if seat.group.name == order.to and seat.state not in (*COMING, S.STARTING) and not heads_to(node, seat):
        return "done", f"{seat.name} is {seat.state} on group {order.to}"
    if seat.state in (S.LOST, S.QUARANTINED):
        return "failed", f"{seat.name} is {seat.state}: {seat.reason}"
    if seat.state in (S.ACTIVE, *_EMPTY):
        if seat.pinned and not heads_to(node, seat):
            return "failed", f"{seat.name} is pinned"
        if (stops := lasting(node, seat, now)) is not None:
            return "failed", stops.text  # patience does not help, and at home it may serve
        if seat.state is not S.ACTIVE and seat.backoff.move.active(now):
            return "failed", f"{seat.name} could not be activated there: {seat.reason}"
        if float(now.unix) > order.begun + MOVE_SECONDS:
            return "failed", f"not moved within {MOVE_SECONDS:.0f} s; at last: {stage(node, seat, now).text}"
    return "", ""


def _busy(node: NodeState, order: OperatorOrder) -> list[ManagedSeat]:
    """The seats for which a drain waits: holders of its GPUs, and those that a switch brings there."""
    coming = {switch.incoming for switch in node.switches.values() if switch.holds_group}
    return [seat for seat in _concerned(node, order) if seat.lease or (seat.id in coming and seat.acts_as is S.PARKED)]


def _text(node: NodeState, seat: ManagedSeat, now: Now) -> str:
    if seat.state is S.ACTIVE:
        return f"{seat.name} is pinned" if seat.pinned else f"{seat.name} is to be parked"
    return stage(node, seat, now).text or f"{seat.name} is {seat.state}"


def _left_over(node: NodeState, order: OperatorOrder) -> str:
    """Parked engines keep the driver loaded: their pods have to leave before it can be replaced."""
    pods = sorted(seat.pod.pod for seat in _concerned(node, order) if seat.pod is not None and seat.facts.alive)
    if not pods or order.purpose != "upgrade":
        return ""
    return f"; the parked engines of {len(pods)} pods still use the driver until they are removed: {', '.join(pods)}"
