"""Why a seat does not run on a group now: one ordered list decides, refuses and explains. Pure reads.

An *obstacle* is one reason: a *stop* needs an act of a person, a *wait* ends by itself. A seat is granted a group
exactly when its list there is empty. Commands refuse by the first entry, and ``kyb why``, the roster's ``blocked`` and
the start gate show it. ``docs/dev/obstacles.md`` is made from the rows below.

The numbers are the order. 1xx: what needs a person, since patience does not help. 2xx: what the node does not know, and
whether the seat itself asks. 3xx: what passes by itself, then whose turn it is. In each block from wide to narrow.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import Any, Literal

from kybernate.messages import CommandReply
from kybernate.seat import SeatState
from kybernate.sizes import format_bytes
from kybernate.topology import Group, mig_refusal
from services.gpu_manager.core import phases, view
from services.gpu_manager.core.facts import Promise
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import Backoff, ManagedSeat
from services.gpu_manager.core.stage import NO_CLOCK, Clock, Stage
from services.gpu_manager.core.state import NodeState, SwitchPhase

S = SeatState

_LAST_NAME = chr(0x10FFFF)
_NO_TURN = (2.0, 0.0, _LAST_NAME)


# --- what the list is made of -----------------------------------------------------------------------------------------

Act = Literal["run", "send", "command"]
"""What is asked: may it take a free slot (``run``); may what was decided be carried out, a drain, a job or a second
ticket of a start (``send``); may a command want it there (``command``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One line of the list. The docstring of ``holds`` says when it holds."""

    holds: "Callable[[Ask], Stage | None]"
    nr: int
    stage: str
    subject: Literal["group", "seat", "pair", "holder"]
    who: str
    """Who can end it; ``-``: time."""
    ends: str = ""
    """How it ends by itself; empty: it does not."""
    code: str = "blocked"
    """Of the commands that it refuses."""
    retry: float | None = None
    """Wall: when such a command is worth repeating."""
    drives_out: bool = False
    """Seats that serve there have to leave."""
    turn: bool = False
    """Whether the seat asks, whose turn it is, or when a switch may begin: what is decided need not ask it again."""

    @property
    def kind(self) -> Literal["stop", "wait"]:
        """A ``stop`` needs an act of a person, a ``wait`` ends by itself."""
        return "stop" if self.nr < 200 else "wait"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A row that holds now."""

    row: Row
    stage: Stage

    @property
    def text(self) -> str:
        """For people."""
        return self.stage.text

    def refusal(self, seat: ManagedSeat, text: str = "") -> CommandReply:
        """The answer to a command about a seat, which it names; ``text``: in place of the row's."""
        return no(self.row.code, text or f"{seat.name}: {self.text}", epoch=seat.epoch, retry=self.row.retry)


@dataclass
class Ask:
    """May this seat run on this group now? ``without``: a holder that counts as gone, with its switch."""

    node: NodeState
    group: Group
    now: Now
    of: ManagedSeat | None = None
    without: ManagedSeat | None = None
    act: Act = "run"

    @property
    def seat(self) -> ManagedSeat:
        """The seat; rows about a group alone do not read it."""
        assert self.of is not None
        return self.of

    @cached_property
    def fits(self) -> bool:
        """The seat has room there: slots, GPUs, VRAM."""
        return view.room(self.node, self.seat, without=self.without, on=self.group)

    @cached_property
    def stuck(self) -> dict[Row, ManagedSeat]:
        """Holders that cannot leave now, the first of each row; empty where the seat fits beside all of them.

        A command counts every pinned seat of the group, parked or not: it will want its place back.
        """
        node, group = self.node, self.group
        holders = [*view.holders(node, group), *view.overlapping(node, group)]
        if self.act == "command":
            holders += [one for one in view.seats_on(node, group) if one.pinned and not one.lease]
        others = [one for one in holders if one is not self.of and one is not self.without]
        found = [(row, one) for one in others if (row := self.keeps(one)) is not None]
        if not self._lacks_room(found):
            return {}
        if not self._lacks_room(stops := [(row, one) for row, one in found if row.kind == "stop"]):
            found = [one for one in found if one not in stops]
        return dict(reversed(found))

    def _lacks_room(self, found: list[tuple[Row, ManagedSeat]]) -> bool:
        """True when the seat does not fit beside these holders alone."""
        holders, group = [one for _, one in found], self.group
        if len(holders) >= group.slots or any(one.group.name != group.name for one in holders):
            return True
        return bool(holders) and not view.fit_together(self.node, group, [*holders, self.seat])

    def keeps(self, holder: ManagedSeat) -> Row | None:
        """The row by which a holder does not leave; None: it could."""
        command = self.act == "command"
        if holder.state in (S.RELEASING, S.LOST):
            return None if command else UNPROVEN
        if holder.state is S.QUARANTINED or holder.pinned:
            return QUARANTINED if holder.state is S.QUARANTINED else PINNED
        if command or holder.state is S.STARTING:
            return None if command else STARTING
        other = holder.group.name != self.group.name and holder.backoff.park.active(self.now)
        return UNPARKED if other or holder.id in view.spared(view.holders(self.node, self.group), self.now) else None


ROWS: list[Row] = []
"""The list, in order."""


def row(*columns: Any, **more: Any) -> Callable[[Callable[[Ask], Stage | None]], Row]:
    """Make a row of a function: the core's, or that of a rider."""

    def add(holds: Callable[[Ask], Stage | None]) -> Row:
        made = Row(holds, *columns, **more)
        insort(ROWS, made, key=lambda one: one.nr)
        return made

    return add


# --- 1xx: a person has to act -----------------------------------------------------------------------------------------


@row(110, "foreign-process", "group", "administrator")
def FOREIGN(ask: Ask) -> Stage | None:
    """A process that belongs to no seat uses one of its GPUs. Data: ``processes`` (``gpu``, ``pid``, ``name``)."""
    if not ask.node.foreign:
        return None
    gpus = ask.group.gpus
    index = {uuid: gpu.index for gpu in gpus for uuid in (gpu.uuid, gpu.physical)}
    found = [one for one in ask.node.foreign if one.gpu in index]
    if not found:
        return None
    names = ", ".join(f"{one.name} (pid {one.pid}) on GPU {index[one.gpu]}" for one in found)
    text = (
        f"group {ask.group.name} is quarantined: {names} belongs to no seat; end it, or take these GPUs out of the "
        f"configuration"
    )
    data = [{"gpu": one.gpu, "pid": one.pid, "name": one.name} for one in found]
    return Stage("foreign-process", text, {"processes": data})


@row(120, "invariant-broken", "group", "administrator")
def BROKEN(ask: Ask) -> Stage | None:
    """Invariant 1, 2 or 8 does not hold on one of its GPUs."""
    broken = ask.node.broken
    text = next((broken[gpu.uuid] for gpu in ask.group.gpus if gpu.uuid in broken), "") if broken else ""
    return Stage("invariant-broken", text) if text else None


@row(130, "refused", "seat", "pod owner", code="refused")
def REFUSED(ask: Ask) -> Stage | None:
    """Its container can never run on its group."""
    seat, pod = ask.seat, ask.seat.pod
    text = seat.terms.refused
    if not text and pod is not None and len(pod.resources) > 1:
        text = (
            f"container {pod.container} of pod {pod.pod} asks for {' and '.join(pod.resources)}: a container runs on "
            f"one group of GPUs; keep one of them in resources.limits and make the pod anew"
        )
    elif not text and pod is not None:
        text = mig_refusal(seat.group, pod.notes.backend) or ""
    return Stage("refused", text) if text else None


@row(140, "quarantined", "holder", "operator", "evidence may end it", code="quarantined")
def QUARANTINED(ask: Ask) -> Stage | None:
    """It is quarantined (data ``conflict``), or a holder that leaves it no room is (data ``seat``)."""
    if ask.seat.state is S.QUARANTINED:
        return Stage("quarantined", ask.seat.reason, {"conflict": ask.seat.facts.conflict})
    if (holder := ask.stuck.get(QUARANTINED)) is None:
        return None
    text = f"{holder.name} holds group {holder.group.name} and is quarantined: {holder.reason}"
    return Stage("quarantined", text, {"seat": holder.id})


@row(150, "immovable", "pair", "pod owner", code="cannot-use")
def IMMOVABLE(ask: Ask) -> Stage | None:
    """The group is not its own, and is in no pool with it, or is faulty, or the pod, its backend or the driver forbids
    moves."""
    node, seat, group = ask.node, ask.seat, ask.group
    if group.name == seat.group.name:
        return None
    why = next((f"GPU {gpu.index} is faulty: {fault}" for gpu in group.gpus if (fault := gpu.fault(node.faulty))), "")
    if not why and any(peer.name == group.name for peer in node.groups[seat.group.name].peers):
        lacks = not seat.facts.at_home and group.name in seat.durable.closed
        why = view.why_immovable(node, seat) or "its container was made without a GPU of it; a new pod has it" * lacks
    elif not why and len(group.gpus) != len(seat.home.gpus):
        why = f"GPUs: it has {len(group.gpus)}, the seat needs {len(seat.home.gpus)}"
    elif not why:
        alike = "MIG instances of the same profile" if seat.home.is_mig else "as many GPUs of the same model and memory"
        why = seat.home.why_bound or f"seats move between groups of one profile with {alike}"
    return Stage("immovable", f"{seat.name} cannot use group {group.name}: {why}") if why else None


@row(170, "pinned-neighbour", "holder", "operator", code="pinned", retry=30.0)
def PINNED(ask: Ask) -> Stage | None:
    """Pinned holders leave the seat no slot, GPU or VRAM. Data: ``seats``."""
    if PINNED not in ask.stuck:
        return None
    node, group = ask.node, ask.group
    seats = {one.id: one for one in (*view.seats_on(node, group), *view.overlapping(node, group)) if one.pinned}
    pinned = [one for one in seats.values() if one is not ask.seat and (one.lease or ask.act == "command")]
    names = ", ".join(one.name for one in pinned)
    text = f"group {group.name} is kept by pinned {names}; kyb unpin it"
    return Stage("pinned-neighbour", text, {"seats": [one.id for one in pinned]})


# --- 2xx: what the node does not know, and whether the seat asks ------------------------------------------------------


@row(220, "unlocated-seat", "group", "pod owner", "the driver's answer")
def UNLOCATED(ask: Ask) -> Stage | None:
    """Nothing tells on which GPU of its pool a seat is. Data: ``seat``."""
    node, gpus = ask.node, ask.group.uuids
    for seat in node.seats.values():
        if seat.facts.unlocated and not seat.facts.at_home and not node.gpus_of(seat).isdisjoint(gpus):
            text = (
                f"neither the ledger nor the driver tells on which GPU of its pool {seat.name} is; "
                f"the driver is asked again; if it stays silent, delete the pod {seat.pod.pod if seat.pod else ''}"
            )
            if seat.state is S.LOST:
                text = f"of {seat.name}, {seat.reason}, once none of its processes is left or comes"
            return Stage("unlocated-seat", text, {"seat": seat.id})
    return None


@row(225, "failed", "seat", "operator", "its pause, then a request")
def FAILED(ask: Ask) -> Stage | None:
    """Its engine has ended twice in a row or more without having served: it is in its pause, or no request asks for it.
    Data: ``failures``, ``code``, ``why``, ``line``, ``since``, ``until`` (unix)."""
    seat, failed = ask.seat, ask.seat.durable.failed
    if not failed.failing or not seat.facts.at_home:
        return None
    if seat.acts_as is S.WAITING and view.may_start(ask.node, seat, view.demand(ask.node, seat), ask.now):
        return None
    left = failed.until - float(ask.now.unix)
    time = Clock(deadline=ask.now.wall + left) if failed.pausing(float(ask.now.unix)) else NO_CLOCK
    data: dict[str, Any] = {"failures": failed.count}
    data |= {one: getattr(failed, one) for one in ("code", "why", "line", "since", "until")}
    return Stage("failed", f"{failed.text(seat.name)}; a request may start it again", data, time)


@row(230, "container", "seat", "-", "kubelet's call")
def CONTAINER(ask: Ask) -> Stage | None:
    """Its container ends and starts again."""
    seat = ask.seat
    if seat.state is S.BACKOFF:
        return Stage("container", f"its container starts again: {seat.reason}")
    if seat.facts.promise is Promise.DROPS:
        return Stage("container", f"its container ends and is started again: {seat.reason}")
    return None


@row(235, "container", "seat", "pod owner", "kubelet tries again")
def UNMADE(ask: Ask) -> Stage | None:
    """Kubelet cannot make its container: a port is taken, an image cannot be pulled. Data: ``called``."""
    seat = ask.seat
    if seat.acts_as is not S.WAITING or seat.gate.called is not None or seat.pod is None or not seat.pod.waits:
        return None
    return Stage("container", f"its container does not start: {seat.pod.waits}", {"called": False})


@row(240, "start-gate", "seat", "-", "kubelet's call, a request, startWithin", turn=True)
def START_GATE(ask: Ask) -> Stage | None:
    """Kubelet has not called the start gate for it (data ``called``), or no request asks for it."""
    node, seat = ask.node, ask.seat
    if seat.acts_as is not S.WAITING or view.wanted(node, seat, ask.now):
        return None
    if seat.gate.called is None:
        return Stage("start-gate", "its container has not come to the start gate yet", {"called": False})
    failed, pauses = seat.durable.failed, ""
    if failed.gave_way and failed.unasked(float(ask.now.unix)):
        pauses = f"; {failed.gave_way} of its starts gave way to requests for others, and it pauses"
    return Stage("start-gate", f"a request starts it, or kyb activate{pauses}{_goes_first(ask)}", {"called": True})


def _goes_first(ask: Ask) -> str:
    """When a start needs no request any more, if it has waited at the gate for as long."""
    if ask.seat.acts_as is not S.WAITING or not 0.0 < view.first_in(ask.node, ask.seat, ask.now) < inf:
        return ""
    return f"; {ask.node.setup.start_within_seconds:.0f} s after its first call it goes before requests"


@row(250, "idle", "seat", "callers", "a request", turn=True)
def IDLE(ask: Ask) -> Stage | None:
    """It is parked, no request asks for it, and the policy does not fetch it ahead of requests."""
    if ask.seat.acts_as is not S.PARKED or ask.node.groups[ask.group.name].picked == ask.seat.id:
        return None
    return None if view.wanted(ask.node, ask.seat, ask.now) else Stage("idle")


# --- 3xx: what passes by itself ---------------------------------------------------------------------------------------


@row(260, "routers", "group", "administrator", "the bus, and 3 s", code="not-ready", retry=3.0, turn=True)
def ROUTERS(ask: Ask) -> Stage | None:
    """The bus is away; where a seat has to leave: not every router has published its presence. Data: ``bus``."""
    node = ask.node
    if node.bus_up and node.routers.settled(ask.now):
        return None
    if ask.of is not None and (node.bus_up or ask.of.acts_as is not S.PARKED) and ask.fits:
        return None  # no seat has to leave for it
    text = "the bus is away" if not node.bus_up else "routers publish their presence after a restart or outage"
    return Stage("routers", f"nothing is evicted: {text}", {"bus": node.bus_up})


@row(270, "backoff", "group", "operator", "30 s at most", turn=True)
def PAUSE(ask: Ask) -> Stage | None:
    """The last switch of the group failed. Data: ``of``, ``name``, ``seconds``, ``until`` (unix), ``failures``."""
    backoff, name = ask.node.groups[ask.group.name].backoff, ask.group.name
    if not backoff.active(ask.now):
        return None
    return phases.backs_off("group", name, backoff, f"group {name} pauses: {backoff.reason}", ask.now)


@row(280, "barrier", "group", "policy", "the claim ends", turn=True)
def BARRIER(ask: Ask) -> Stage | None:
    """Its GPUs are cleared for a seat of another group that goes first. Data: ``group``, ``seat``."""
    node, name = ask.node, ask.group.name
    others = node.groups[name].neighbours if node.claims else ()
    claims = [node.claims[other.name] for other in others if other.name in node.claims]
    if not claims:
        return None
    # The longer wait goes first. Else claims of small groups that follow each other, here and there, would leave no
    # moment for a group that needs all of their GPUs, and the other way round. Two claims never wait for each other.
    own = turn(node, ask.group, ask.now)
    own = own if name in node.claims else (*own[:2], _LAST_NAME)
    seats = (node.seats[claim.seat] for claim in claims)
    seat = next((one for one in seats if view.seat_view(node, one, ask.now).turn <= own), None)
    if seat is None:
        return None
    text = f"the GPUs of group {name} are being cleared for {seat.name} of group {seat.group.name}"
    return Stage("barrier", text, {"group": seat.group.name, "seat": seat.id})


@row(290, "switch", "group", "-", "the switch ends", code="busy", retry=2.0, turn=True)
def SWITCH(ask: Ask) -> Stage | None:
    """The group is in a switch (the stage is that of the switch), one of another group with its job sent holds its
    GPUs, or one clears them for the seat."""
    node = ask.node
    if not node.switches:
        return None
    found = node.switches.get(ask.group.name) or view.overlapping_switch(node, ask.group)
    claim = node.claims.get(ask.group.name)
    if found is None and ask.of is not None and claim is not None and claim.seat == ask.of.id:
        found = next((one for one in node.switches.values() if one.clears_for == claim.seat), None)
    return None if found is None else phases.of_switch(node, found, ask.now)


@row(300, "backoff", "seat", "operator", "300 s at most")
def RESTS(ask: Ask) -> Stage | None:
    """Its activation or its start failed, and another seat of the group serves or is asked for."""
    node, seat, now = ask.node, ask.seat, ask.now
    if not _yields(seat, now):
        return None
    others = (one for one in view.seats_for(node, ask.group) if one is not seat)
    if not any(_is_asked(node, one, ask.group, now) for one in others if not _yields(one, now)):
        return None
    backoff = rest(seat, now)
    return phases.backs_off("seat", seat.id, backoff, f"{seat.name} {backoff.reason}", now)


def _yields(seat: ManagedSeat, now: Now) -> bool:
    """True while its failed activations or starts keep a seat from taking the group again before others."""
    return seat.state in (S.PARKED, S.WAITING) and rest(seat, now).active(now)


def rest(seat: ManagedSeat, now: Now) -> Backoff:
    """For how long others go first, and why."""
    failed, unix = seat.durable.failed, float(now.unix)
    if failed.failing or not (failed.count and failed.pausing(unix)):
        return seat.backoff.activation
    return Backoff(failed.count, now.wall + (failed.until - unix), f"has failed once: {failed.why}")


def _is_asked(node: NodeState, seat: ManagedSeat, group: Group, now: Now) -> bool:
    """True for a seat that serves requests, or could come for those that wait for it."""
    if seat.state in (S.PARKED, S.WAITING):
        return view.wanted(node, seat, now) and unready(node, seat, group, now) is None
    found = view.demand(node, seat)
    return bool(found.waiting or found.in_flight)


@row(310, "backoff", "pair", "operator", "600 s at most")
def STAYS(ask: Ask) -> Stage | None:
    """Its last move failed."""
    seat = ask.seat
    if ask.group.name == seat.group.name or not seat.backoff.move.active(ask.now):
        return None
    text = f"{seat.name} could not be moved to another group: {seat.reason}"
    return phases.backs_off("move", seat.id, seat.backoff.move, text, ask.now)


@row(320, "moving", "pair", "operator", "the operation or the switch ends")
def MOVING(ask: Ask) -> Stage | None:
    """An operator moves it elsewhere, or a switch brings it to another group, or clears the GPUs of one for it."""
    node, seat, here = ask.node, ask.seat, ask.group.name
    if (to := ordered_to(node, seat)) not in ("", here):
        return Stage("moving", f"{seat.name} is being moved to group {to}")
    if (to := heads_to(node, seat)) not in ("", here):
        return Stage("moving", f"{seat.name} is to start on group {to}")
    for switch in node.switches.values():
        to = switch.group if switch.incoming == seat.id else ""
        if switch.clears_for == seat.id:
            to = view.claiming(node, switch)
        if to not in ("", here) and not (switch.phase is SwitchPhase.DRAINING and view.room(node, seat, on=ask.group)):
            return Stage("moving", f"a switch brings {seat.name} to group {to}")  # else its drain there is called off
    return None


def ordered_to(node: NodeState, seat: ManagedSeat) -> str:
    """The group to which an operator moves a seat, so that no other one brings it back; empty: none does."""
    move = node.moves.get(seat.id)
    return move.to if move is not None and not move.outcome else ""


def heads_to(node: NodeState, seat: ManagedSeat) -> str:
    """The group on which a seat that ends its engine is to start; empty: none."""
    return next((name for name, state in node.groups.items() if seat.id in state.kept), "")


@row(330, "vram-evidence", "holder", "administrator", "evidence", turn=True)
def UNPROVEN(ask: Ask) -> Stage | None:
    """A deleted or lost holder: its processes are not proven gone, or its ticket is open. Data: ``seat``,
    ``processes_gone``."""
    holder = ask.seat if ask.seat.state in (S.RELEASING, S.LOST) else ask.stuck.get(UNPROVEN)
    return None if holder is None else phases.unproven(ask.node, holder, ask.now)


@row(340, "starting", "holder", "-", "health, the end of its ticket, or its time", turn=True)
def STARTING(ask: Ask) -> Stage | None:
    """The engine of a holder starts (stage ``rehearsing``: is parked and activated once). Data: ``seat``."""
    if ask.seat.state is not S.STARTING:
        holder = ask.stuck.get(STARTING)
        return None if holder is None else phases.starts(ask.node, holder, ask.now)
    no_ticket = first(obstacles(ask.node, ask.seat, ask.group, ask.now, act="send"))
    return phases.starts(ask.node, ask.seat, ask.now, no_ticket.text if no_ticket is not None else "")


@row(350, "backoff", "holder", "-", "60 s at most", turn=True)
def UNPARKED(ask: Ask) -> Stage | None:
    """The park of a holder failed, and another holder can leave, or it is in the way of a larger group."""
    if (holder := ask.stuck.get(UNPARKED)) is None:
        return None
    text = f"{holder.name} of group {holder.group.name} could not be parked"
    return phases.backs_off("park", holder.id, holder.backoff.park, text, ask.now)


@row(355, "start-gate", "seat", "-", "kubelet's next call", turn=True)
def NO_CALL(ask: Ask) -> Stage | None:
    """No start waits at the gate at this moment, or none that can be on this group."""
    if ask.seat.acts_as is not S.WAITING or view.calls(ask.seat, ask.now, ask.group):
        return None
    if view.calls(ask.seat, ask.now):
        call = ask.seat.gate.call
        closed = call is not None and ask.group.name in call.closed
        why = "a GPU of it is gone, or not in its container" if closed else "its container has other GPUs"
        return Stage("start-gate", f"the start that waits cannot be on group {ask.group.name}: {why}")
    return Stage("start-gate", "its container comes to the start gate again in a moment")


@row(360, "policy", "pair", "policy", "its next decision", turn=True)
def POLICY(ask: Ask) -> Stage | None:
    """The policy's last decision does not name this seat (stage ``minimum-active-time``: a holder has not been active
    for long enough; data ``seats``, ``seconds``)."""
    state = ask.node.groups[ask.group.name]
    if state.picked == ask.seat.id:
        return None
    if not state.settles or state.wake is None:
        return Stage("policy", state.why + _goes_first(ask))
    left = max(0.0, (state.wake - ask.now.model) / ask.now.pace)
    holders = [one.id for one in (*view.holders(ask.node, ask.group), *view.overlapping(ask.node, ask.group))]
    return Stage("minimum-active-time", state.why, {"seats": holders, "seconds": left})


@row(370, "room", "pair", "policy", "a holder leaves", turn=True)
def ROOM(ask: Ask) -> Stage | None:
    """Slots, GPUs or VRAM do not suffice beside the seats that hold them or were promised them."""
    if ask.fits:
        return None
    node, group = ask.node, ask.group
    others = [one for one in view.holders(node, group) if one is not ask.seat and one is not ask.without]
    names = [f"{one.name} ({one.state.value}) on {one.group.name}" for one in (*others, *view.overlapping(node, group))]
    text = f"no room beside {', '.join(names) or 'a switch'}"
    needs, free = max(view.taken_bytes(node, ask.seat, group).values(), default=0), view.free_bytes(node, group) or 0
    if needs > free and len(others) < group.slots:
        text += f": it needs {format_bytes(needs)} of each GPU, {format_bytes(max(0, free))} are free"
    return Stage("room", text)


@cache
def counted(act: Act | None) -> tuple[Row, ...]:
    """The rows that count for an act; None: those about a group alone, without the routers, which only evictions and
    switches need."""
    if act in ("run", "command"):
        return tuple(one for one in ROWS if act == "run" or one.nr < 230)
    if act == "send":
        return tuple(one for one in ROWS if one is ROOM or not one.turn)
    return tuple(one for one in ROWS if one.subject == "group" and one is not ROUTERS)


# --- the lists --------------------------------------------------------------------------------------------------------


def of_group(node: NodeState, group: Group, now: Now) -> Iterator[Obstacle]:
    """What keeps every seat from a group, in order."""
    return holding(counted(None), Ask(node, group, now))


def obstacles(
    node: NodeState, seat: ManagedSeat, group: Group, now: Now, *, act: Act = "run", without: ManagedSeat | None = None
) -> Iterator[Obstacle]:
    """Why a seat does not run on a group now, in order. ``without``: a victim that counts as gone."""
    return holding(counted(act), Ask(node, group, now, seat, without, act))


def unready(
    node: NodeState, seat: ManagedSeat, group: Group, now: Now, *, without: ManagedSeat | None = None
) -> Obstacle | None:
    """What keeps a seat from a group although a holder would leave for it, whosever turn it is; None: it is ready."""
    rows = (one for one in counted("send") if one is not ROOM)
    return first(holding(rows, Ask(node, group, now, seat, without, "send")))


def leaving(node: NodeState, holder: ManagedSeat, now: Now) -> Iterator[Obstacle]:
    """Why an active holder is not drained now."""
    return holding((ROUTERS, PAUSE, SWITCH), Ask(node, holder.group, now))


def first(found: Iterable[Obstacle]) -> Obstacle | None:
    """The first of them."""
    return next(iter(found), None)


def holding(rows: Iterable[Row], ask: Ask) -> Iterator[Obstacle]:
    """Those of the rows that hold now."""
    for one in rows:
        if (found := one.holds(ask)) is not None:
            yield Obstacle(one, found)


def refusal(node: NodeState, seat: ManagedSeat, now: Now, rows: Collection[Row] = ()) -> Obstacle | None:
    """The stop that refuses a command that wants a seat active: that of its group, if each group to which it may go has
    one. ``rows``: only these."""
    groups = [seat.group, *(node.groups[seat.group.name].peers if not view.why_immovable(node, seat) else ())]
    if to := ordered_to(node, seat):
        groups = [node.groups[to].group]
    lists = (obstacles(node, seat, group, now, act="command") for group in groups)
    found = [
        next((one for one in each if (one.row in rows if rows else one.row.kind == "stop")), None) for each in lists
    ]
    return found[0] if all(found) else None


def lasting(node: NodeState, seat: ManagedSeat, now: Now) -> Obstacle | None:
    """The refusal that patience does not help against: it refuses a request, and ends a move on its way. Other stops
    (``blocked``) may be over in a moment."""
    return refusal(node, seat, now, [one for one in ROWS if one.kind == "stop" and one.code != "blocked"])


def no(code: str, reason: str, *, epoch: int = 0, retry: float | None = None) -> CommandReply:
    """A refusal."""
    return CommandReply(accepted=False, code=code, reason=reason, epoch=epoch, retry_after_seconds=retry)


def seat_refused(node: NodeState, name: str) -> CommandReply | None:
    """Why no command about this seat can be taken now; None: one can."""
    seat = node.seats.get(name)
    if seat is None or seat.state is S.FREE:
        return no("unknown-seat", f"no pod owns that seat of node {node.name}")
    if seat.state is S.QUARANTINED:
        return no("quarantined", f"{seat.name} is quarantined: {seat.reason}", epoch=seat.epoch)
    if seat.state is S.RELEASING:
        return no("deleted", f"the pod {seat.pod.pod if seat.pod else ''} of {seat.name} is being deleted")
    return None


# --- whose turn it is among groups -----------------------------------------------------------------------------------


def turn(node: NodeState, group: Group, now: Now) -> tuple[float, float, str]:
    """Whose turn it is among groups, lowest first: that of its seat that goes first; last without one that is ready."""
    seen = [
        view.seat_view(node, seat, now) for seat in view.seats_for(node, group) if seat.state in (S.PARKED, S.WAITING)
    ]
    turns = sorted(one.turn for one in seen if one.wait_seconds is not None)
    return next((one for one in turns if unready(node, node.seats[one[2]], group, now) is None), _NO_TURN)


# --- for people -------------------------------------------------------------------------------------------------------


_OWN = {S.QUARANTINED: QUARANTINED, S.BACKOFF: CONTAINER, S.RELEASING: UNPROVEN, S.LOST: UNPROVEN, S.STARTING: STARTING}
"""The row about a seat in such a state; in the others it is in a switch."""


def waits(node: NodeState, seat: ManagedSeat, now: Now) -> Iterator[Obstacle]:
    """What an owned seat that does not serve waits for. Stops of its group are left out where it may go to another
    group that has none."""
    if seat.state not in (S.PARKED, S.WAITING):
        return holding((FAILED, _OWN.get(seat.state, SWITCH)), Ask(node, seat.group, now, seat))
    group = node.groups[ordered_to(node, seat) or seat.group.name].group
    stopped = refusal(node, seat, now) is not None
    return (one for one in obstacles(node, seat, group, now) if stopped or one.row.kind != "stop")


def stage(node: NodeState, seat: ManagedSeat, now: Now) -> Stage:
    """What an owned seat does, else what it waits for first."""
    if seat.state is S.ACTIVE:
        return Stage("active")
    found = next(waits(node, seat, now), None)
    if found is not None:
        return found.stage
    if seat.state in (S.PARKED, S.WAITING):
        return Stage("policy", node.groups[seat.group.name].why)
    return Stage("switch", "its switch is over in a moment")


def also(node: NodeState, seat: ManagedSeat, now: Now) -> list[Obstacle]:
    """What else keeps a seat from its GPUs, after the first. While nothing asks for it, later rows do not matter."""
    if seat.state not in (S.PARKED, S.WAITING):
        return []
    found = list(waits(node, seat, now))
    asked = next((number for number, one in enumerate(found, start=1) if one.row is IDLE), len(found))
    return found[1:asked]


def blocked(node: NodeState, seat: ManagedSeat, now: Now) -> str:
    """Why a seat is not started or activated at present, whatever the demand, if no holder is the reason; empty:
    nothing prevents it. What is on the GPUs of a seat that serves does not stop it."""
    stops, serves = [one for one in counted(None) if one.kind == "stop"], seat.state in (S.ACTIVE, S.DRAINING)
    there = [one for one in stops if one.drives_out or not serves]
    rows = (*there, REFUSED) if serves else (*there, REFUSED, UNLOCATED, UNMADE, RESTS)
    for one in holding(rows, Ask(node, seat.group, now, seat)):
        if one.row not in there or refusal(node, seat, now, stops) is not None:
            return rest(seat, now).reason if one.row is RESTS else one.text
    return ""
