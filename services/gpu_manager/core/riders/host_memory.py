"""Host memory as a budget of the node: which copies it has room for, and which seat goes without one. Pure.

A copy is reserved before it is made: when the drain of a seat begins, and before the start of an engine that rehearses.
Then its account (``Account.taken_bytes``) is what the checkpointer measured. Without room the seat that is
expected back last goes without a copy: the victim is parked by a restart, or a parked seat's copy is dropped for it.
Either starts cold when it is wanted again. The sum of all accounts never exceeds the budget by what is granted here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kybernate.cuda import HOST_BYTES_PER_VRAM_BYTE
from kybernate.engines import DRIVER_BACKENDS, PINNING, REHEARSED, RESTART, WITHOUT_COPY
from kybernate.messages import SeatProgress, SeatTarget
from kybernate.seat import COMING, SeatState
from kybernate.sizes import format_bytes
from kybernate.topology import Group
from services.gpu_manager.core import view
from services.gpu_manager.core.facts import Promise
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.obstacles import ordered_to
from services.gpu_manager.core.stage import Stage
from services.gpu_manager.core.state import GroupSwitch, NodeState, Rider, Sample

LEAST_RESERVE_BYTES = 4 * 2**30
"""With ``auto``: what is left to everything else on the machine, at least; a tenth where that is more."""
DROP_SECONDS = 5.0
"""Wall: how long a drained victim waits for copies that are being dropped for its own."""


def budget(written: int | str, machine_bytes: int) -> int | None:
    """The budget of a node by its configuration (``hostMemory``); None: no limit."""
    if isinstance(written, int):
        return written
    return None if written == "off" else machine_bytes - max(LEAST_RESERVE_BYTES, machine_bytes // 10)


def taken_bytes(node: NodeState) -> int:
    """Host memory on the accounts of all seats."""
    return sum(account(seat).taken_bytes for seat in node.seats.values())


def needed_bytes(seat: ManagedSeat) -> int:
    """Host memory that the seat takes while it is parked; what a restart parks takes none.

    As measured at its last park, and what it has grown since then where the driver copies all of it. Else a copy of
    the VRAM that it uses or is known to take; of all memory of its GPUs if neither is known.
    """
    mine = account(seat)
    if seat.backend == RESTART:
        return 0
    if mine.parked_bytes and mine.parked_by in ("", seat.backend):
        grown = max(0, seat.used_bytes - seat.durable.vram_bytes) if seat.backend in DRIVER_BACKENDS else 0
        return mine.parked_bytes + grown
    if seat.backend in WITHOUT_COPY:
        return 0
    return round((max(seat.used_bytes, seat.known_bytes) or seat.size) * HOST_BYTES_PER_VRAM_BYTE)


def fits(node: NodeState, seat: ManagedSeat) -> bool:
    """True if the budget has room for the copy of a seat, beside all that is on other accounts."""
    return node.setup.host_bytes is None or _short(node, seat) <= 0


@dataclass(slots=True)
class Account:
    """Host memory of one seat."""

    taken_bytes: int = 0
    """Reserved, and then as measured."""
    parked_bytes: int = 0
    """What it takes while it is parked, as measured at its last park; 0: it was not parked with a copy."""
    parked_by: str = ""
    """The backend of that park."""
    active_bytes: int = 0
    """What it takes while it is active; 0: not measured."""


class HostMemory(Rider):
    """Which seat goes without a copy."""

    name, record = "host_memory", Account

    def row(self, node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
        """What is on its account."""
        return {"host_bytes": account(seat).taken_bytes}

    def metrics(self, node: NodeState, now: Now) -> Iterable[Sample]:
        """The budget, and what is taken of it."""
        parked = sum(account(one).taken_bytes for one in node.seats.values() if one.state is SeatState.PARKED)
        yield Sample("kybernate_parked_host_bytes", "Host memory that parked seats take", parked)
        text = "Host memory that seats take or have reserved, parked or active"
        yield Sample("kybernate_host_bytes", text, taken_bytes(node))
        text = "Host memory for all seats; no sample without a budget"
        yield Sample("kybernate_host_budget_bytes", text, node.setup.host_bytes)
        text = "Parks without a copy, and copies dropped, for lack of host memory"
        yield Sample("kybernate_host_spills", text, node.spills, counter=True)

    def why(self, node: NodeState, of: Group | ManagedSeat | None, now: Now) -> dict[str, Any] | None:
        """The budget; of a seat why it goes without a copy."""
        if isinstance(of, ManagedSeat):
            return {"spilled": of.durable.spilled}
        known = {"budget_bytes": node.setup.host_bytes, "taken_bytes": taken_bytes(node), "spills": node.spills}
        return known if of is None else None

    def waits(self, node: NodeState, switch: GroupSwitch, now: Now) -> Stage | None:
        """Copies are being dropped for that of the victim, and make room in time."""
        victim = node.seats.get(switch.victim or "")
        if victim is None or victim.durable.spilled or fits(node, victim):
            return None
        if _short(node, victim) > _ending(node) or now.wall >= switch.times.drained + DROP_SECONDS:
            return None
        seats = [seat for seat in node.seats.values() if seat.facts.promise is Promise.DROPS]
        names = ", ".join(seat.name for seat in seats)
        text = f"copies of {names} are dropped, so that host memory has room for that of {victim.name}"
        return Stage("host-memory", text, {"seats": [seat.id for seat in seats]})

    def starts(self, node: NodeState, seat: ManagedSeat) -> None:
        """An engine that will rehearse keeps its copy from its start on. Without room it does not rehearse."""
        if seat.backend not in REHEARSED:
            return
        if node.setup.host_bytes is None or _take(node, seat):
            seat.durable.spilled = ""
        elif not seat.durable.spilled:
            _spill(node, seat, _without_room(node, seat))

    def before_serving(self, node: NodeState, seat: ManagedSeat, now: Now) -> bool:
        """A container that came without a ticket may be about to rehearse, too."""
        known = seat.rehearsal
        if not seat.durable.spilled and (known is None or known.container_id != seat.durable.container_id):
            self.starts(node, seat)
        return True

    def parks(self, node: NodeState, victim: ManagedSeat, target: SeatTarget) -> SeatTarget:
        """Its copy is reserved, or a restart parks it.

        (1) It is decided. (2) There is room, or (3) none.
        """
        durable = victim.durable
        if node.setup.host_bytes is not None and not durable.spilled and not _take(node, victim):  # (1), (2)
            _spill(node, victim, _without_room(node, victim))  # (3)
        return target.model_copy(update={"backend": RESTART}) if durable.spilled else target

    def reported(self, node: NodeState, seat: ManagedSeat, before: SeatState, half: SeatProgress) -> None:
        """What it took, as measured."""
        mine, comes = account(seat), before in COMING
        if half.outcome == "parked" and not comes:
            mine.taken_bytes = 0 if seat.durable.spilled else half.host_bytes
            if mine.taken_bytes:
                mine.parked_bytes, mine.parked_by = mine.taken_bytes, seat.backend
        elif half.outcome == "active" or not comes:
            mine.active_bytes = half.host_bytes or (0 if comes else mine.active_bytes)

    def after(self, node: NodeState, seat: ManagedSeat, switch: GroupSwitch | None, now: Now) -> None:
        """What it keeps of the host's memory now."""
        mine = account(seat)
        if switch is not None and seat.state is SeatState.DRAINING:
            reserve(node, switch, seat, now)
        if seat.facts.at_home:
            mine.taken_bytes = mine.active_bytes = 0
        elif seat.state is SeatState.ACTIVE:
            _keeps_active(seat)

    def found(self, node: NodeState, seat: ManagedSeat, now: Now, *, remembered: bool) -> None:
        """What its account is.

        (1) Without a record its copy has the size that it is expected to have. (2) So has what an engine pins, where it
        may have been parked before. (3) A drain that had reserved a copy is over. (4) The manager that decided to drop
        this copy may have died before it asked for it.
        """
        durable, mine = seat.durable, account(seat)
        mine.parked_by = mine.parked_by or (seat.backend if mine.parked_bytes else "")
        if durable.spilled:
            if seat.acts_as is SeatState.PARKED and seat.facts.promise is Promise.NONE:  # (4)
                node.kill_copy(seat, node.next_epoch(now))
        elif seat.state in (SeatState.PARKED, SeatState.PARKING, *COMING):  # (1)
            mine.taken_bytes = mine.taken_bytes or needed_bytes(seat)
        elif seat.state is SeatState.ACTIVE:
            if seat.backend in PINNING and (durable.measured or not remembered):  # (2)
                mine.active_bytes = mine.active_bytes or needed_bytes(seat)
            _keeps_active(seat)  # (3)


def account(seat: ManagedSeat) -> Account:
    """The account of a seat."""
    known = seat.records.get(HostMemory.name)
    return known if isinstance(known, Account) else HostMemory.of(seat)


def reserve(node: NodeState, switch: GroupSwitch, victim: ManagedSeat, now: Now) -> None:
    """Reserve the copy of a victim whose drain begins. Without room, begin to drop copies of seats that are
    expected back later than it, if they are enough: the account of each lasts until its container has ended."""
    if node.setup.host_bytes is None or _take(node, victim):
        return
    for seat in _give_way(node, victim, now):
        node.spills += 1
        node.drop_copy(seat, f"{_without_room(node, victim)}, which is expected back sooner", now, switch.epoch)


def _keeps_active(seat: ManagedSeat) -> None:
    """What it keeps while it is active: as measured, else what an engine pins at its first park."""
    mine = account(seat)
    seat.durable.spilled = ""
    if seat.backend not in PINNING or mine.active_bytes or not seat.durable.measured:
        mine.taken_bytes = mine.active_bytes


def _take(node: NodeState, seat: ManagedSeat) -> bool:
    """Reserve the copy of a seat; False without room."""
    if not fits(node, seat):
        return False
    account(seat).taken_bytes = max(account(seat).taken_bytes, needed_bytes(seat))
    return True


def _short(node: NodeState, seat: ManagedSeat) -> int:
    """Bytes that the budget lacks for the copy of a seat; below 0: that much is left over."""
    more = max(0, needed_bytes(seat) - account(seat).taken_bytes)
    return taken_bytes(node) + more - (node.setup.host_bytes or 0) if more else 0


def _ending(node: NodeState) -> int:
    return sum(account(seat).taken_bytes for seat in node.seats.values() if seat.facts.promise is Promise.DROPS)


def _give_way(node: NodeState, victim: ManagedSeat, now: Now) -> list[ManagedSeat]:
    """The parked seats whose copies are to be dropped for a victim's: those that the policy expects back last, if each
    is expected later than the victim and they make enough room. Empty: none, or those that end already are enough."""
    lacking = _short(node, victim) - _ending(node)
    limit = _expected(node, victim, now)
    ranked = sorted(
        (order, seat.id)
        for seat in node.seats.values()
        if _may_drop(node, seat, victim, now) and (order := _expected(node, seat, now)) < limit
    )
    found: list[ManagedSeat] = []
    for _, name in ranked:
        if lacking > 0:
            found.append(node.seats[name])
            lacking -= account(found[-1]).taken_bytes
    return found if lacking <= 0 else []


def _expected(node: NodeState, seat: ManagedSeat, now: Now) -> float:
    """How soon a seat is expected back, as the policy sees it: requests per second."""
    known = node.learning.seats.get(seat.id)
    return 0.0 if known is None else known.arrivals.at(float(now.model))


def _may_drop(node: NodeState, seat: ManagedSeat, victim: ManagedSeat, now: Now) -> bool:
    """True for a parked seat with a copy that nothing needs now: no request, operator or switch wants it, and its group
    is in no switch that would make the kill wait."""
    if seat.state is not SeatState.PARKED or seat.durable.spilled or not account(seat).taken_bytes:
        return False
    if ordered_to(node, seat) or view.wanted(node, seat, now):
        return False
    switches = node.switches.values()
    if any(seat.id == switch.incoming for switch in switches):
        return False
    return seat.group.name == victim.group.name or seat.group.name not in node.switches


def _spill(node: NodeState, seat: ManagedSeat, reason: str) -> None:
    seat.durable.spilled = reason
    node.spills += 1


def _without_room(node: NodeState, seat: ManagedSeat) -> str:
    budget = format_bytes(node.setup.host_bytes or 0)
    return (
        f"host memory has no room for the copy of {seat.name}: it needs {format_bytes(needed_bytes(seat))}, and "
        f"{format_bytes(taken_bytes(node))} of {budget} (hostMemory) are taken"
    )
