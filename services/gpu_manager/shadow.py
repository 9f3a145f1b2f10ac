"""A second policy, evaluated on the live one's views: what it would have decided, and an estimate of the gain. Pure.

Its decisions are not carried out, so their results are unknown; ``gain_seconds`` is an estimate by a projection of one
round, the same for both decisions: the seats that wait now are served in the order of the decision, then oldest first,
each after the learned seconds of draining, parking, activating and serving, while requests go on arriving at the
learned rates. The difference of the summed waiting counts once per disagreement, when it begins. It tells which of two
policies to try, not the result of a trial.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from kybernate.policy import Decision, GroupView, Park, Policy, SeatView, Stay, Switch
from kybernate.policy.view import checked
from kybernate.seat import SeatState

KEPT = 50
"""Disagreements that ``kyb why`` shows."""
HOLDING = (SeatState.ACTIVE, SeatState.STARTING)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One time that the two policies decided differently."""

    group: str
    at: float
    """Model time."""
    live: str
    shadow: str
    gain_seconds: float


@dataclass(slots=True)
class ShadowScore:
    """The comparison for one group so far."""

    evaluations: Counter[str] = field(default_factory=Counter)
    """``same``, ``different``, ``error``."""
    disagreements: int = 0
    gain_seconds: float = 0.0
    """Request-seconds of waiting that the shadow would have saved; below zero: cost."""
    live: str = ""
    shadow: str = ""
    """The reasons of both last decisions."""
    apart: tuple[Decision, Decision] | None = None
    """The present disagreement."""


@dataclass
class Shadow:
    """Evaluates a second policy on the live one's views. ``observe`` never raises."""

    name: str
    policy: Policy
    scores: dict[str, ShadowScore] = field(default_factory=dict)
    """By group."""
    recent: deque[Disagreement] = field(default_factory=lambda: deque(maxlen=KEPT))
    last_error: str = ""

    def observe(self, view: GroupView, live: Decision, error: str = "") -> None:
        """Compare with the live policy's decision on this view."""
        del error
        score = self.scores.setdefault(view.group, ShadowScore())
        try:
            own = checked(self.policy.decide(view), view)
            pair = (_key(live), _key(own))
            gain = projected(view, live) - projected(view, own) if pair[0] != pair[1] else 0.0
        except Exception as raised:
            score.evaluations["error"] += 1
            self.last_error = f"group {view.group}: {raised!r}"
            return
        score.live, score.shadow = live.reason, own.reason
        score.evaluations["same" if pair[0] == pair[1] else "different"] += 1
        if pair[0] == pair[1]:
            score.apart = None
        elif pair != score.apart:
            score.apart = pair
            score.disagreements += 1
            score.gain_seconds += gain
            self.recent.append(Disagreement(view.group, view.now, _text(live), _text(own), gain))


def projected(view: GroupView, decision: Decision) -> float:
    """Request-seconds of waiting in the round that follows this decision (see the module's text)."""
    free = [0.0] * max(0, view.slots - sum(seat.state in HOLDING for seat in view.seats))
    waiting = [seat for seat in (*view.seats, *view.elsewhere) if seat.wait_seconds is not None]
    waiting.sort(key=lambda seat: seat.turn)
    if isinstance(decision, Switch):
        waiting.sort(key=lambda seat: seat.seat != decision.activate)
    leaves: dict[str, float] = {}
    for seat in view.seats:
        if seat.state in HOLDING:
            leaves[seat.seat] = _leaves_after(seat, decision) + seat.park_seconds
    slots = sorted([*free, *leaves.values()]) or [0.0]
    if isinstance(decision, Switch) and decision.evict in leaves:
        slots.sort(key=lambda at: at != leaves[decision.evict or ""])
    total = 0.0
    for index, seat in enumerate(waiting):
        at = slots.pop(0) if index == 0 else slots.pop(slots.index(min(slots)))
        begins = at + seat.activate_seconds + (seat.move_seconds or 0.0)
        total += seat.waiting * begins + seat.rate_slow * begins * begins / 2
        slots.append(begins + seat.service_seconds + seat.park_seconds)
    back = min(slots)
    for seat in view.seats:  # holders that left come back after all others had a turn
        if waiting and seat.seat in leaves:
            away = max(0.0, back + seat.activate_seconds - leaves[seat.seat] + seat.park_seconds)
            total += seat.waiting * away + seat.rate_slow * away * away / 2
    return total


def _leaves_after(holder: SeatView, decision: Decision) -> float:
    """Model seconds until a holder begins to park, under this decision."""
    drained = holder.service_seconds if holder.in_flight else 0.0
    match decision:
        case Switch(evict=evict, how=how) if evict == holder.seat:
            return 0.0 if how == "freeze" else drained
        case Park(seat=seat) if seat == holder.seat:
            return drained
        case Stay(until=until) if until is not None:
            return max(until, drained)
    return drained


def _key(decision: Decision) -> Decision:
    """Equal for decisions that do the same, whenever they are to be made again."""
    return Stay(None, "") if isinstance(decision, Stay) else replace(decision, reason="")


def _text(decision: Decision) -> str:
    match decision:
        case Switch(activate=activate, evict=None):
            return f"activate {activate}: {decision.reason}"
        case Switch():
            return f"{decision.how} {decision.evict} for {decision.activate}: {decision.reason}"
        case Park():
            return f"park {decision.seat}: {decision.reason}"
    return f"stay: {decision.reason}"
