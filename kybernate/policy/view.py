"""A policy's input and output: the view of a group and the decision about it. Immutable and causal: a view holds only
what has happened so far. ``checked`` refuses a decision that no node could carry out.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

from kybernate.seat import SeatState


@dataclass(frozen=True, slots=True)
class SeatView:
    """One seat of a group at one instant. Ages and durations in model seconds."""

    seat: str
    state: SeatState
    group: str = ""
    """The group that it holds, or to which it would be activated without moving."""
    waiting: int = 0
    """Requests held for it."""
    ages: tuple[tuple[float, int], ...] = ()
    """Its waiting requests, oldest first: (age, how many of about this age). Empty: only ``waiting`` and
    ``oldest_wait_seconds`` are known. The counts add up to ``waiting``."""
    oldest_wait_seconds: float = 0.0
    in_flight: int = 0
    tier: str = "standard"
    pinned: bool = False
    wanted_seconds: float | None = None
    """How long an operator has requested it active; None: no such request."""
    start_wait_seconds: float | None = None
    """How long its container has waited at the start gate; None: no waiting call."""
    active_seconds: float = 0.0
    """Since it became active."""
    unclaimed: bool = False
    """Active only because its container started without demand; it has had no request since."""
    idle_seconds: float = 0.0
    """Since it last had anything waiting or in flight."""
    park_seconds: float = 0.0
    """Learned duration of parking it."""
    activate_seconds: float = 0.0
    """Learned duration of activating it."""
    move_seconds: float | None = None
    """What activating it on this view's group costs beyond ``activate_seconds``; None: it belongs here already."""
    home_busy: bool = False
    """Only of a seat of another group: its own group has no slot for it now."""
    weight: float = 1.0
    """Of its tier."""
    slo_seconds: float = 20.0
    """How long a request of its tier may wait."""
    service_seconds: float = 5.0
    """Learned: how long a request is in flight."""
    rate_fast: float = 0.0
    """Learned arrivals per second, half-life 60 s."""
    rate_slow: float = 0.0
    """The same, half-life 900 s."""
    vram_bytes: int = 0
    """Of each GPU's memory in ``GroupView.free_bytes``: what activating it takes, and parking it gives back."""
    model: str = ""
    prefers: bool = False
    """Its pod names this view's group: it comes also while its own has a slot, and as a seat that belongs here."""
    loses_copy: bool = False
    """Activating it on this view's group ends its engine, which starts cold."""
    waited_seconds: float = 0.0
    """The longest wait before each of its visits since it came to its group, summed."""
    others_rate: float = 0.0
    """With ``loses_copy``: ``rate_slow`` of the other seats of its group, summed."""
    home_late: bool = False
    """With ``loses_copy``: a start holds its group, for far longer than usual."""
    ready: bool = True
    """Nothing but its turn and room keeps a seat with demand from this view's group: a decision may activate it."""
    why: str = ""
    """Why it is not ready."""
    yields: bool = False
    """Its start is under way, and gives way like an idle holder: it has no requests, or should have served by now."""

    @property
    def name(self) -> str:
        """What reasons call it: its model."""
        return self.model or self.seat

    @property
    def wait_seconds(self) -> float | None:
        """The longest wait for this seat to become active; None without demand or when it is active already."""
        if self.state is SeatState.WAITING:
            return self.start_wait_seconds
        if self.state is not SeatState.PARKED:
            return None
        ages = [self.wanted_seconds] if self.wanted_seconds is not None else []
        if self.pinned:
            ages.append(0.0)
        if self.waiting:
            ages.append(self.oldest_wait_seconds)
        return max(ages, default=None)

    @property
    def turn(self) -> tuple[float, float, str]:
        """Sort key of the seats with demand, next one first: pinned, then the longest wait, then the name."""
        return (0.0 if self.pinned else 1.0, -(self.wait_seconds or 0.0), self.seat)


@dataclass(frozen=True, slots=True)
class PeerView:
    """Another group of the pool at one instant, as far as it matters to this one."""

    group: str
    rate: float
    """Expected requests per second of its parked seats, without those that would lose their copies by a move."""
    free: bool
    """It has room for each of them, or will have once the park under way ends, and no seat is on its way to it."""
    frees_in: float | None
    """Seconds until it has room for one of them: 0 now, else the park of its idle holder that is asked least; None: it
    serves, or something keeps it."""
    lost_seconds: float = 0.0
    """Waiting that this park would cause: the share of that holder in the group's requests, times its activation."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group when a decision about it can be carried out: its holders and the seats that could follow."""

    group: str
    slots: int
    seats: tuple[SeatView, ...]
    elsewhere: tuple[SeatView, ...] = ()
    """Seats of other groups of the pool that could be activated here, or start here: see ``move_seconds``."""
    now: float = 0.0
    """Model time of this view; only differences mean anything."""
    free_bytes: int | None = None
    """Memory for further holders on each GPU of the group, with the seats that are leaving gone; None: only slots
    count."""
    peers: tuple[PeerView, ...] = ()
    """The other groups of its pool."""
    move_seconds: float = 0.0
    """What activating a parked seat of this group on another one of the pool costs beyond activating it here."""

    def holders(self) -> tuple[SeatView, ...]:
        """Seats that are active now."""
        return tuple(seat for seat in self.seats if seat.state is SeatState.ACTIVE)


@dataclass(frozen=True, slots=True)
class Stay:
    """Change nothing; decide again ``until`` model seconds from now at the latest (None: at the next change)."""

    until: float | None
    reason: str
    settles: bool = field(default=False, compare=False)
    """Only time has to pass: a holder has not been active for long enough."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Activate ``activate`` in the group; the victim ``evict`` leaves first (None: a slot is free).

    ``activate`` may be one of ``elsewhere``: it moves to this group. Once the victim is drained, the policy decides
    again with the slot free, and that decision counts (late binding).
    """

    activate: str
    evict: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Park:
    """Park this seat although no other one takes its slot."""

    seat: str
    reason: str


Decision = Stay | Switch | Park


class Policy(Protocol):
    """Decides for one group at a time."""

    def decide(self, view: GroupView) -> Decision:
        """Return the decision about this group now. Deterministic."""


class UnusableAnswerError(Exception):
    """A decision that no node could carry out."""


def checked(decision: Decision, view: GroupView) -> Decision:
    """Return the decision if it can be carried out in this view. Raises UnusableAnswerError."""
    own = {seat.seat for seat in view.seats}
    unready = {seat.seat: seat for seat in (*view.seats, *view.elsewhere) if not seat.ready}
    pinned = {seat.seat for seat in view.seats if seat.pinned}
    match decision:
        case Stay(until=until):
            if until is not None and not (isinstance(until, (int, float)) and isfinite(until)):
                raise UnusableAnswerError(f"Stay until {until!r}")
        case Switch(activate=activate, evict=evict):
            if activate not in own and activate not in {seat.seat for seat in view.elsewhere}:
                raise UnusableAnswerError(f"it would activate {activate!r}, which is not in view")
            if (seat := unready.get(activate)) is not None:
                raise UnusableAnswerError(f"it would activate {seat.name}, which is not ready: {seat.why}")
            if evict is not None and (evict not in own or evict == activate):
                raise UnusableAnswerError(f"it would evict {evict!r}, which is not in the group or comes itself")
            if evict in pinned:
                raise UnusableAnswerError(f"it would evict {evict!r}, which is pinned")
        case Park(seat=name):
            if name not in own or name in pinned:
                raise UnusableAnswerError(f"it would park {name!r}, which is pinned or not in the group")
        case _:
            raise UnusableAnswerError(f"{decision!r} is no decision")
    return decision
