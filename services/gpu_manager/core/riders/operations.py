"""Operations of operators: a move, a drain and its end. Each has a name, and answers for it also after a restart. Pure.

An operation is data (``OperatorOrder`` in the ledger) beside the seats' own states: what is left to do follows from
both, so a manager that is killed in the middle goes on where it was. Ordered seats leave their groups; the policy of
the target group brings a moved seat in, by its ordinary rules.
"""

from collections.abc import Iterable

from kybernate.messages import (
    CommandReply,
    DrainNode,
    MigrateSeat,
    OrderChanged,
    OrderCommand,
    OrderOutcome,
    OrderStatus,
    ResumeNode,
)
from kybernate.seat import COMING, SeatState
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.core.obstacles import IMMOVABLE, Ask, first, lasting, no, obstacles, row, seat_refused, stage
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import NodeState, Rider
from services.gpu_manager.ledger import Ledger, OperatorOrder

S = SeatState

MOVE_SECONDS = 600.0
"""Wall: a move that could not be carried out fails after this; the seat is then parked where it was."""
MOST_ORDERS = 32
"""Operations that are over and still answer for their names; beyond it the oldest are forgotten."""

_MOVABLE = (S.ACTIVE, S.PARKED, S.WAITING)
_EMPTY = (S.WAITING, S.PARKED, S.BACKOFF, S.FREE)
"""States without VRAM on the group."""


class Operations(Rider):
    """What keeps seats off drained groups, takes them off, and ends."""

    def expels(self, node: NodeState, holder: ManagedSeat) -> str:
        """A drain is in force there, or the seat is being moved."""
        drain, group = drain_on(node, holder.group), holder.group
        if drain is not None and (drain.purpose == "upgrade" or not holder.pinned):
            return drained(node, group)
        return "" if (to := node.moves.get(holder.id, group.name)) == group.name else f"it moves to group {to}"

    def step(self, node: NodeState, now: Now) -> None:
        """End the operations that are over, and report each change of phase."""
        _advance(node, now)


@row(100, "drained", "group", "operator", code="drained", drives_out=True)
def DRAINED(ask: Ask) -> Stage | None:
    """A drain is in force on one of its GPUs; their holders leave. Data: ``op``, ``scope``, ``for``, ``actor``."""
    drain = drain_on(ask.node, ask.group)
    if drain is None:
        return None
    data = {"op": drain.op, "scope": drain.target or ask.node.name, "for": drain.purpose, "actor": drain.actor}
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


# --- the command ------------------------------------------------------------------------------------------------------


def answer(node: NodeState, command: OrderCommand, now: Now) -> CommandReply:
    """Begin an operation, or refuse it with a reason; its name again answers the same operation."""
    name = command.op or command.id
    known, order = node.orders.get(name), _order(node, command, name, now)
    if known is not None:
        same = (known.verb, known.target, known.to, known.purpose)
        if same != (order.verb, order.target, order.to, order.purpose):
            return no(
                "op-conflict", f"operation {name} is another one: {_title(node, known)}; give this one another name"
            )
        return CommandReply(accepted=True, op=name, order=status(node, known, now), repeated=True)
    match command:
        case MigrateSeat():
            refusal = _migrate_refused(node, order, now)
        case DrainNode():
            refusal = _drain_refused(node, order)
        case _:
            refusal = _resume_refused(node, order)
    if refusal is not None:
        return refusal
    if command.dry_run:
        return CommandReply(accepted=True, op=name, plan=tuple(_plan(node, order, now)))
    _begin(node, order)
    _advance(node, now)
    return CommandReply(accepted=True, op=name, order=status(node, order, now))


def _order(node: NodeState, command: OrderCommand, name: str, now: Now) -> OperatorOrder:
    """The operation that a command describes."""
    order = OperatorOrder(name, "resume", actor=command.actor, cause=command.cause, begun=float(now.unix))
    match command:
        case MigrateSeat(seat=seat, to=to):
            order.verb, order.target, order.to = "migrate", seat, to
        case DrainNode(group=group, purpose=purpose):
            order.verb, order.target, order.purpose = "drain", group, purpose
            if (state := node.groups.get(group)) is not None:
                order.gpus = state.group.uuids
        case ResumeNode(group=group):
            order.target = group
        case _:
            raise TypeError(f"{type(command).__name__} is no operation")
    return order


# --- refusals ---------------------------------------------------------------------------------------------------------


def _migrate_refused(node: NodeState, order: OperatorOrder, now: Now) -> CommandReply | None:
    """(1) The seat. (2) The group. (3) The pair. (4) What keeps the group from taking it."""
    if (refused := seat_refused(node, order.target)) is not None:  # (1)
        return refused
    seat, state = node.seats[order.target], node.groups.get(order.to)
    if seat.pinned:
        return no("pinned", f"{seat.name} is pinned; unpin it first", epoch=seat.epoch)
    if seat.id in node.moves:
        return no("busy", f"{seat.name} is being moved to group {node.moves[seat.id]} already", retry=5.0)
    if state is None:  # (2)
        return no("unknown-group", f"node {node.name} has no group {order.to}; it has {', '.join(node.groups)}")
    if seat.group.name == order.to:  # (3)
        return None
    found = first(obstacles(node, seat, state.group, now, act="command"))
    if found is not None and found.row is IMMOVABLE:
        return found.refusal(seat, found.text)
    if seat.state not in _MOVABLE:
        text = f"{seat.name} is {seat.state}; only an active or parked seat can be moved"
        return no("not-active", text, epoch=seat.epoch, retry=2.0)
    return found.refusal(seat, f"{seat.name} on group {order.to}: {found.text}") if found is not None else None  # (4)


def _drain_refused(node: NodeState, order: OperatorOrder) -> CommandReply | None:
    if order.target and order.target not in node.groups:
        return no("unknown-group", f"node {node.name} has no group {order.target}; it has {', '.join(node.groups)}")
    pinned = [seat.name for seat in _concerned(node, order) if seat.pinned and seat.state not in _EMPTY]
    if pinned and order.purpose != "upgrade":
        text = (
            f"pinned {', '.join(pinned)} would stay; unpin it first, or drain for upgrade, which parks pinned seats too"
        )
        return no("pinned", text)
    return None


def _resume_refused(node: NodeState, order: OperatorOrder) -> CommandReply | None:
    if order.target in node.drains or not order.target:
        return None
    if order.target not in node.groups:
        return no("unknown-group", f"node {node.name} has no group {order.target}; it has {', '.join(node.groups)}")
    if text := drained(node, node.groups[order.target].group):
        return no("drained", f"group {order.target} is drained by another operation: {text}")
    return None


def _concerned(node: NodeState, order: OperatorOrder) -> list[ManagedSeat]:
    """The owned seats that are on the GPUs of a drain."""
    gpus = {*order.gpus}
    return [
        seat
        for seat in node.seats.values()
        if seat.pod is not None and (not order.target or not gpus.isdisjoint(node.gpus_of(seat)))
    ]


def _plan(node: NodeState, order: OperatorOrder, now: Now) -> Iterable[str]:
    """What a command would do, in order."""
    if order.verb == "resume":
        known = order.target in node.drains
        yield f"{order.scope} starts and activates seats again" if known else f"{order.scope} is not drained"
        return
    if order.verb == "drain":
        yield f"no seat is started or activated on {order.scope} any more"
        for seat in _concerned(node, order):
            yield from _leaves(node, seat, now)
        return
    seat = node.seats[order.target]
    if seat.group.name == order.to:
        yield f"{seat.name} is on group {order.to} already"
        return
    yield from _leaves(node, seat, now)
    holders = ", ".join(one.name for one in view.holders(node, node.groups[order.to].group))
    turn = f"once the policy lets {holders} yield" if holders else "at once: it is free"
    yield f"activate {seat.name} on group {order.to}, {turn}; about {seat.durable.costs.activate_seconds:.0f} s"


def _leaves(node: NodeState, seat: ManagedSeat, now: Now) -> Iterable[str]:
    in_flight, park = view.demand(node, seat).in_flight, seat.durable.costs.park_seconds
    if seat.state is S.ACTIVE:
        ends = f"end its {in_flight} requests in flight (at most {node.setup.drain_seconds:.0f} s), " * bool(in_flight)
        yield f"{ends}park {seat.name} on group {seat.group.name}; about {park:.0f} s"
    elif seat.state not in _EMPTY:
        yield f"wait for {seat.name}: {stage(node, seat, now).text or seat.state}; then park it"


# --- begin and end ----------------------------------------------------------------------------------------------------


def _begin(node: NodeState, order: OperatorOrder) -> None:
    """Keep the operation, and what it changes at once."""
    over = [name for name, one in node.orders.items() if one.outcome and one.op not in _in_force(node)]
    for name in over[: max(0, len(over) + 1 - MOST_ORDERS)]:
        del node.orders[name]
    node.orders[order.op] = order
    match order.verb:
        case "migrate":
            seat = node.seats[order.target]
            if seat.group.name != order.to:
                node.moves[seat.id] = order.to
                seat.backoff.move, seat.backoff.activation = Backoff(), Backoff()
                seat.cause = order.cause
        case "drain":
            if (before := node.drains.get(order.target)) is not None:
                _cancel(node, before, f"replaced by {order.op}")
            node.drains[order.target] = order
            _unbind(node)
        case "resume":
            drain = node.drains.pop(order.target, None)
            if drain is not None:
                _cancel(node, drain, f"resumed by {order.op}")
            left = [one.scope for one in node.drains.values()]
            text = "seats are started and activated again" if drain is not None else "it was not drained"
            order.reason = f"{order.scope}: {text}" + (f"; still drained: {', '.join(left)}" if left else "")


def _unbind(node: NodeState) -> None:
    """Drains under way on drained groups go on, without the seat that they made room for."""
    for switch in node.switches.values():
        if switch.victim is None or switch.holds_group:
            continue
        if drain_on(node, node.seats[switch.victim].group) is not None:
            switch.ordered, switch.incoming, switch.room_for = True, None, None


def _cancel(node: NodeState, drain: OperatorOrder, reason: str) -> None:
    """The drain is not in force any more."""
    if drain.outcome:
        drain.reason += f"; {reason}"
    else:
        _end(node, drain, "cancelled", reason)


def _end(node: NodeState, order: OperatorOrder, outcome: OrderOutcome, reason: str) -> None:
    order.outcome, order.reason = outcome, reason
    if order.verb == "migrate" and node.moves.pop(order.target, None) is not None:
        node.seats[order.target].usage.wanted_since = None


def _in_force(node: NodeState) -> set[str]:
    return {drain.op for drain in node.drains.values()}


def restore(node: NodeState, ledger: Ledger) -> None:
    """Operations as the ledger has them."""
    node.orders = {order.op: order for order in ledger.orders}
    node.phases = {order.op: order.outcome for order in ledger.orders if order.outcome}
    node.drains = {node.orders[op].target: node.orders[op] for op in ledger.drains if op in node.orders}
    for order in node.orders.values():
        if order.verb != "migrate" or order.outcome:
            continue
        if order.target in node.seats and order.to in node.groups:
            node.moves[order.target] = order.to
        else:
            order.outcome, order.reason = "failed", "the configuration has no such seat or group any more"


# --- progress ---------------------------------------------------------------------------------------------------------


def _advance(node: NodeState, now: Now) -> None:
    for order in node.orders.values():
        if order.outcome and node.phases.get(order.op) == order.outcome:
            continue
        if order.verb == "migrate" and order.target in node.moves:
            usage = node.seats[order.target].usage  # its request to be active lasts as long as the operation
            usage.wanted_since, usage.wanted_until = usage.wanted_since or now.model, now.wall + MOVE_SECONDS
        if not order.outcome:
            outcome, reason = _result(node, order, now)
            if outcome:
                _end(node, order, outcome, reason)
        seen = status(node, order, now)
        if node.phases.get(order.op) != seen.phase:
            node.phases[order.op] = seen.phase
            cause = order.cause or order.op
            node.effects.append(OrderChanged(cause=cause, node=node.name, op=order.op, order=seen))


def _result(node: NodeState, order: OperatorOrder, now: Now) -> tuple[OrderOutcome, str]:
    """How an operation ends now; an empty outcome: it goes on."""
    if order.verb == "resume":
        return "done", order.reason
    if order.verb == "drain":
        busy = _busy(node, order)
        return ("", "") if busy else ("done", f"no seat holds a GPU of {order.scope}")
    seat = node.seats.get(order.target)
    if seat is None or seat.state in (S.FREE, S.RELEASING):
        return "failed", "its pod is gone"
    if seat.group.name == order.to and seat.state not in (*COMING, S.STARTING) and not seat.heads_to:
        return "done", f"{seat.name} is {seat.state} on group {order.to}"
    if seat.state in (S.LOST, S.QUARANTINED):
        return "failed", f"{seat.name} is {seat.state}: {seat.reason}"
    if seat.state not in (S.ACTIVE, *_EMPTY):
        return "", ""
    if seat.pinned and not seat.heads_to:
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
    return [seat for seat in _concerned(node, order) if seat.lease or (seat.id in coming and seat.state is S.PARKED)]


def status(node: NodeState, order: OperatorOrder, now: Now) -> OrderStatus:
    """How far an operation is."""
    phase, text = str(order.outcome), order.reason
    if not phase:
        seats = _busy(node, order) if order.verb == "drain" else [node.seats[order.target]]
        phases = [(_phase(order, seat), seat) for seat in seats]
        phase = min((found for found, _ in phases), key=_PHASES.index, default="queued")
        text = "; ".join(_text(node, seat, now) for _, seat in phases)
    elif order.outcome == "done" and order.op in _in_force(node):
        text += _left_over(node, order)
    return OrderStatus(
        op=order.op,
        verb=order.verb,
        target=order.target,
        model=_model(node, order),
        to=order.to,
        purpose=order.purpose,
        actor=order.actor,
        begun_at=order.begun,
        phase=phase,
        text=text,
        outcome=order.outcome,
    )


_PHASES = ("queued", "draining", "parking", "waiting", "activating", "starting", "held")
"""Of a drain with several seats, the first that one of them is in."""


def _phase(order: OperatorOrder, seat: ManagedSeat) -> str:
    match seat.state:
        case S.ACTIVE:
            return "held" if seat.pinned and order.purpose != "upgrade" else "queued"
        case S.DRAINING:
            return "draining"
        case S.PARKING | S.RELEASING | S.LOST:
            return "parking"
        case S.PARKED:
            return "waiting"
        case S.ACTIVATING | S.MIGRATING:
            return "activating"
        case S.STARTING:
            return "starting"
    return "held"


def _text(node: NodeState, seat: ManagedSeat, now: Now) -> str:
    if seat.state is S.ACTIVE:
        return f"{seat.name} is pinned" if seat.pinned else f"{seat.name} is to be parked"
    return stage(node, seat, now).text or f"{seat.name} is {seat.state}"


def _left_over(node: NodeState, order: OperatorOrder) -> str:
    """Parked engines keep the driver loaded: their pods have to leave before it can be replaced."""
    pods = sorted(seat.pod.pod for seat in _concerned(node, order) if seat.pod is not None and seat.facts.alive)
    if not pods or order.purpose != "upgrade":
        return ""
    return (
        f"; the parked engines of {len(pods)} pods still use the driver, end them with kubectl drain: {', '.join(pods)}"
    )


def _model(node: NodeState, order: OperatorOrder) -> str:
    """Of the seat that an operation moves."""
    return node.seats[order.target].name if order.verb == "migrate" and order.target in node.seats else ""


def _title(node: NodeState, order: OperatorOrder) -> str:
    to = f" to {order.to}" if order.to else ""
    what = _model(node, order) or order.scope
    return f"{order.verb} {what}{to}" + (f" for {order.purpose}" if order.purpose else "")
