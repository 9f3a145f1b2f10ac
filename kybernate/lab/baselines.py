"""Baselines of the simulator: rules of Ollama, autoscalers, llama-swap (``ttl``); c-mu, longest queue, random. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from zlib import crc32

from kybernate import policy
from kybernate.policy.index import visit_seconds
from kybernate.policy.rules import Exhaustive, idle_now
from kybernate.policy.turns import (
    FADE_SECONDS,
    contenders,
    demand,
    guests,
    movable,
    oldest,
    own_load,
    settles_in,
    take_turns,
)
from kybernate.policy.view import Decision, GroupView, Park, Policy, SeatView, Stay


@dataclass(frozen=True, slots=True)
class FifoSwitch:
    """The first request for another model ends the admission of the running one.

    Source: Ollama's ``server/sched.go``, as a rule: the head of the queue expires the runner, all behind it queue.
    """

    def decide(self, view: GroupView) -> Decision:
        """Close the holder as soon as another seat has demand."""
        return take_turns(view, oldest, lambda holder, incoming: 0.0)  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class IdleTimeout:
    """The holder yields once it has been idle for ``idle_seconds``: the autoscalers' rule."""

    idle_seconds: float = 10.0

    def decide(self, view: GroupView) -> Decision:
        """Wait for a holder that has been idle long enough."""
        return take_turns(view, oldest, self._yields_in)

    def _yields_in(self, holder: SeatView, incoming: SeatView) -> float | None:
        del incoming
        if holder.unclaimed:
            return 0.0
        return None if own_load(holder) else self.idle_seconds - holder.idle_seconds


@dataclass(frozen=True, slots=True)
class ExhaustiveTtl:
    """``exhaustive``, and a holder that has been idle for ``ttl_seconds`` is parked although no other seat has demand.

    Source: llama-swap's option ``ttl`` of a model, as a rule. Its least value, 1 s, is the default: the shorter, the
    lower the mean wait on the reference scenarios.
    """

    ttl_seconds: float = 1.0

    def decide(self, view: GroupView) -> Decision:
        """Serve until idle; without demand elsewhere, park after the ttl."""
        if contenders(view) or guests(view):
            return Exhaustive().decide(view)
        idle = [seat for seat in movable(view) if not own_load(seat)]
        left = {seat.seat: max(self.ttl_seconds - seat.idle_seconds, settles_in(seat)) for seat in idle}
        first = min(idle, key=lambda seat: (left[seat.seat], seat.seat), default=None)
        if first is None:
            return Stay(None, "no demand")
        if left[first.seat] > 0:
            return Stay(left[first.seat], f"no demand; {first.name} is parked once idle for {self.ttl_seconds:g} s")
        return Park(first.seat, f"idle for {first.idle_seconds:.1f} s, ttl {self.ttl_seconds:g} s")


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed(ExhaustiveTtl):
    """``exhaustive-ttl`` that keeps models warm for a minute: in groups of one slot, the holder that is idle leaves."""

    ttl_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class CmuSetup:
    """The seat with the most weighted requests served per second of its visit goes next; ages do not count.

    A busy holder yields after ``min_visit_seconds`` to a seat whose rate exceeds its own by the factor
    ``hysteresis``. Source: the reward-rate rule of Duenyas and Van Oyen for queues with set-up times, with a visit
    that serves all waiting requests.
    """

    min_visit_seconds: float = 10.0
    hysteresis: float = 1.5

    def decide(self, view: GroupView) -> Decision:
        """Compare rates of reward."""
        answer = take_turns(view, _best, self._yields_in)
        if isinstance(answer, Stay) and answer.until is None and (contenders(view) or guests(view)):
            return replace(answer, until=FADE_SECONDS)
        return answer

    def _yields_in(self, holder: SeatView, incoming: SeatView) -> float | None:
        if not own_load(holder):
            return 0.0
        own = holder.weight * own_load(holder) / max(holder.service_seconds, 0.001)
        if incoming.pinned or _reward(incoming, holder.park_seconds) > self.hysteresis * own:
            return self.min_visit_seconds - holder.active_seconds
        return None


def _reward(seat: SeatView, park_seconds: float = 0.0) -> float:
    setup = park_seconds + seat.activate_seconds
    served = demand(seat) + seat.rate_fast * setup
    return seat.weight * served / max(setup + visit_seconds(seat, round(served)), 0.001)


def _best(waiting: Iterable[SeatView]) -> SeatView:
    return min(waiting, key=lambda seat: (-_reward(seat), *seat.turn))


@dataclass(frozen=True, slots=True)
class LongestQueue:
    """The seat with most waiting requests goes next.

    A busy holder yields after ``min_visit_seconds`` to a queue of more than ``hysteresis`` times its own load.
    """

    min_visit_seconds: float = 10.0
    hysteresis: float = 1.5

    def decide(self, view: GroupView) -> Decision:
        """Compare queues."""
        return take_turns(view, _longest, self._yields_in)

    def _yields_in(self, holder: SeatView, incoming: SeatView) -> float | None:
        if not own_load(holder):
            return 0.0
        if incoming.pinned or demand(incoming) > self.hysteresis * own_load(holder):
            return self.min_visit_seconds - holder.active_seconds
        return None


def _longest(waiting: Iterable[SeatView]) -> SeatView:
    return min(waiting, key=lambda seat: (-demand(seat), *seat.turn))


@dataclass(frozen=True, slots=True)
class RandomSeat:
    """Any waiting seat goes next, once the holder is idle. The same view and ``seed`` give the same choice."""

    seed: int = 0

    def decide(self, view: GroupView) -> Decision:
        """Draw from a hash of the seed, the group and the time."""

        def drawn(waiting: Iterable[SeatView]) -> SeatView:
            return min(waiting, key=lambda seat: (crc32(f"{self.seed}/{view.now!r}/{seat.seat}".encode()), seat.seat))

        return take_turns(view, drawn, idle_now)


POLICIES: dict[str, type[Policy]] = {
    **policy.POLICIES,
    "fifo-switch": FifoSwitch,
    "idle-timeout": IdleTimeout,
    "exhaustive-ttl": ExhaustiveTtl,
    "lru-60": LeastRecentlyUsed,
    "longest-queue": LongestQueue,
    "cmu-setup": CmuSetup,
    "random": RandomSeat,
}
"""The names that ``kyb simulate --policy`` accepts: the policies of production and these baselines."""
