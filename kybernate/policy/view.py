"""What a policy sees and what it may say. Immutable and causal: nothing here knows the future."""

from dataclasses import dataclass
from typing import Literal, Protocol

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
    """How long an operator has wanted it active; None: nobody asked."""
    start_wait_seconds: float | None = None
    """How long its container has waited at the start gate; None: no waiting call."""
    active_seconds: float = 0.0
    """Since it became active."""
    unclaimed: bool = False
    """Active only because it was started once without demand; nobody has used it since."""
    idle_seconds: float = 0.0
    """Since it last had anything waiting or in flight."""
    park_seconds: float = 0.0
    """Learned cost of parking it."""
    activate_seconds: float = 0.0
    """Learned cost of activating it."""
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
    stall_budget_seconds: float = 0.0
    """How long its requests in flight may be frozen; 0: it is always drained."""

    @property
    def wait_seconds(self) -> float | None:
        """How long somebody has waited for this seat to run; None when nobody does or it runs already."""
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
        """Whose turn it is among those that wait, lowest first: pins, then the longest wait, then the name."""
        return (0.0 if self.pinned else 1.0, -(self.wait_seconds or 0.0), self.seat)


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group that is not in the middle of a switch: who holds it, who could."""

    group: str
    slots: int
    seats: tuple[SeatView, ...]
    elsewhere: tuple[SeatView, ...] = ()
    """Parked seats of other groups of this node that could be activated here (rebinding): see ``move_seconds``."""
    now: float = 0.0
    """Model time of this look; only differences mean anything."""
    hit_share: float | None = None
    """How often the seat with the highest rate was the one that the next request was for; None: not measured."""

    def holders(self) -> tuple[SeatView, ...]:
        """Seats that are active now."""
        return tuple(seat for seat in self.seats if seat.state is SeatState.ACTIVE)


@dataclass(frozen=True, slots=True)
class Stay:
    """Change nothing; look again ``until`` model seconds from now at the latest (None: when something changes)."""

    until: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """Give the group to ``activate``; ``evict`` yields to it (None: a slot is free).

    ``activate`` may be one of ``elsewhere``: it moves here. While the victim leaves, the policy is asked again with
    the slot free, and its newest word counts (late binding).
    """

    activate: str
    evict: str | None
    reason: str
    how: Literal["drain", "freeze"] = "drain"
    """How the victim leaves: its requests in flight end first, or they are frozen with it until it comes back."""


@dataclass(frozen=True, slots=True)
class Park:
    """Park this seat although nobody takes its place."""

    seat: str
    reason: str


Decision = Stay | Switch | Park


class Policy(Protocol):
    """Decides for one group at a time."""

    def decide(self, view: GroupView) -> Decision:
        """What to do with this group now. Deterministic."""
        ...
