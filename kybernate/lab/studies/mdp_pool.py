"""A small pool solved exactly: the mean wait of the best rule that serves every visit until it is idle.

    python -m kybernate.lab.studies.mdp_pool

The model of ``mdp`` with two groups of one slot: seats are restored on either group, and where they were not parked
that takes ``move`` longer. All times are exponential, and a visit ends only when nothing is in flight. Queues are cut
at ``PoolCase.limit``. The gain is known between two bounds (Odoni), as in ``mdp``. A live policy is asked once per
state in which a group is empty or its holder idle, the empty group first; ages in its views are expectations.
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from kybernate.lab.baselines import POLICIES
from kybernate.lab.compiled import Floats, Ints, compiled
from kybernate.lab.studies.mdp import zipf
from kybernate.policy import GroupView, Park, PeerView, Policy, SeatView, Stay, Switch
from kybernate.seat import SeatState

GROUPS = 2
_CHECK_EVERY = 20
_MOST_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class PoolCase:
    """One problem. Seconds and requests per second."""

    rates: tuple[float, ...]
    service: float = 5.0
    park: float = 3.5
    restore: float = 3.5
    move: float = 3.0
    limit: int = 2
    """Waiting requests per seat from which on arrivals are turned away."""

    @property
    def in_flight(self) -> int:
        """Most requests in flight in a state."""
        return self.limit + 2

    @property
    def states(self) -> tuple[int, int, int]:
        """How many states a group has, how many places the seats have, how many queues."""
        seats = len(self.rates)
        return 1 + 3 * seats + seats * (self.in_flight + 1), GROUPS**seats, (self.limit + 1) ** seats


# A group is empty (0), parks seat i (1 + i), restores it where it was (1 + N + i) or from the other group (1 + 2N + i),
# or serves n requests of it (1 + 3N + i·(most + 1) + n). A state is ((group 0, group 1), places, queues) as one number;
# a place is the group where a seat is parked, or which it holds.


@compiled
def seat_of(group: int, seats: int, most: int) -> int:
    """The seat that holds a group in this state; -1: none."""
    if group == 0:
        return -1
    if group < 1 + 3 * seats:
        return (group - 1) % seats
    return (group - 1 - 3 * seats) // (most + 1)


@compiled
def in_flight_of(group: int, seats: int, most: int) -> int:
    """Requests in flight; -1: the group does not serve."""
    return -1 if group < 1 + 3 * seats else (group - 1 - 3 * seats) % (most + 1)


@compiled
def waiting_of(queues: int, seat: int, limit: int) -> int:
    """How many wait for a seat."""
    for _ in range(seat):
        queues //= limit + 1
    return queues % (limit + 1)


@compiled
def valid(first: int, second: int, places: int, queues: int, seats: int, most: int, limit: int) -> bool:
    """Whether there is such a state: no seat on two groups, none in another place than it holds, none that serves
    while requests wait for it."""
    one, two = seat_of(first, seats, most), seat_of(second, seats, most)
    if one >= 0 and (one == two or places >> one & 1 != 0):
        return False
    if two >= 0 and places >> two & 1 != 1:
        return False
    if in_flight_of(first, seats, most) >= 0 and waiting_of(queues, one, limit) > 0:
        return False
    return not (in_flight_of(second, seats, most) >= 0 and waiting_of(queues, two, limit) > 0)


@compiled
def options(own: int, other: int, here: int, places: int, digits: Ints, most: int, ahead: bool, found: Ints) -> int:
    """Fill the states to which a decision can bring a group at once, itself first; returns how many. ``digits``: how
    many wait for each seat; ``ahead``: seats are restored before any does."""
    seats = digits.shape[0]
    found[0] = own
    count = 1
    holder = seat_of(own, seats, most)
    if own == 0:
        taken = seat_of(other, seats, most)
        for seat in range(seats):
            if seat != taken and (ahead or digits[seat] > 0):
                found[count] = 1 + seats + seat if places >> seat & 1 == here else 1 + 2 * seats + seat
                count += 1
    elif in_flight_of(own, seats, most) == 0:
        found[count] = 1 + holder
        count += 1
    return count


@compiled
def placed(group: int, here: int, places: int, seats: int, most: int) -> int:
    """The places with the seat that holds a group in that group."""
    seat: int = seat_of(group, seats, most)
    if seat >= 0:
        places = places | 1 << seat if here == 1 else places & ~(1 << seat)
    return places


@compiled
def valid_states(groups: int, homes: int, queues: int, seats: int, most: int, limit: int) -> Ints:
    """The numbers of all states that there are."""
    found = np.empty(groups * groups * homes * queues, dtype=np.int64)
    count = 0
    for at in range(groups * groups * homes * queues):
        queue, places, both = at % queues, at // queues % homes, at // (queues * homes)
        if valid(both // groups, both % groups, places, queue, seats, most, limit):
            found[count] = at
            count += 1
    return found[:count]


@compiled
def sweep(
    rates: Floats, service: float, park: float, restore: float, move: float, limit: int, most: int, uniform: float,
    choose: bool, ahead: bool, states: Ints, after: Ints, value: Floats, kept: Floats, following: Floats,
) -> tuple[float, float]:  # fmt: skip
    """One step: ``kept`` is the value of leaving a state as it is, ``following`` that of the best decision, or of the
    one in ``after``. Returns the lowest and highest growth of a value."""
    seats = rates.shape[0]
    groups, homes, queues = 1 + 3 * seats + seats * (most + 1), 1 << seats, (limit + 1) ** seats
    strides, digits = np.empty(seats, dtype=np.int64), np.empty((queues, seats), dtype=np.int64)
    for seat in range(seats):
        strides[seat] = 1 if seat == 0 else strides[seat - 1] * (limit + 1)
        for queue in range(queues):
            digits[queue, seat] = waiting_of(queue, seat, limit)
    ends = np.empty(2)
    ended = np.empty(2, dtype=np.int64)
    for at in states:
        queue, rest = at % queues, at // queues
        places, rest = rest % homes, rest // homes
        first, second = rest // groups, rest % groups
        cost, left, total = 0.0, 0.0, 0.0
        one, two = seat_of(first, seats, most), seat_of(second, seats, most)
        ours, theirs = in_flight_of(first, seats, most), in_flight_of(second, seats, most)
        for seat in range(seats):
            digit = digits[queue, seat]
            cost += digit
            to = at
            if seat == one and ours >= 0:
                to = at + groups * homes * queues if ours < most else at
            elif seat == two and theirs >= 0:
                to = at + homes * queues if theirs < most else at
            elif digit < limit:
                to = at + strides[seat]
            total += rates[seat] * value[to]
            left += rates[seat]
        for here in range(2):
            group = first if here == 0 else second
            step = groups * homes * queues if here == 0 else homes * queues
            seat = seat_of(group, seats, most)
            ends[here], ended[here] = 0.0, at
            if group == 0:
                continue
            if group < 1 + seats:
                ends[here], ended[here] = 1.0 / park, at - group * step
            elif group < 1 + 3 * seats:
                ends[here] = 1.0 / (restore if group < 1 + 2 * seats else restore + move)
                digit = digits[queue, seat]
                serving = 1 + 3 * seats + seat * (most + 1) + digit
                ended[here] = at + (serving - group) * step - digit * strides[seat]
            else:
                ends[here] = in_flight_of(group, seats, most) / service
                ended[here] = at - step if in_flight_of(group, seats, most) > 0 else at
            total += ends[here] * value[ended[here]]
            left += ends[here]
        kept[at] = cost / uniform + total / uniform + (1.0 - left / uniform) * value[at]
    low, high = np.inf, -np.inf
    here_to, there_to = np.empty(seats + 2, dtype=np.int64), np.empty(seats + 2, dtype=np.int64)
    for at in states:
        queue, rest = at % queues, at // queues
        places, rest = rest % homes, rest // homes
        first, second = rest // groups, rest % groups
        one, two = in_flight_of(first, seats, most), in_flight_of(second, seats, most)
        if choose and not (first == 0 or second == 0 or one == 0 or two == 0):
            after[at] = at
        elif choose:
            best, to = np.inf, at
            for mine in range(options(first, second, 0, places, digits[queue], most, ahead, here_to)):
                then = placed(here_to[mine], 0, places, seats, most)
                for other in range(options(second, here_to[mine], 1, then, digits[queue], most, ahead, there_to)):
                    last = placed(there_to[other], 1, then, seats, most)
                    there = ((here_to[mine] * groups + there_to[other]) * homes + last) * queues + queue
                    if kept[there] < best - 1e-12:
                        best, to = kept[there], there
            after[at] = to
        following[at] = kept[after[at]]
        low, high = min(low, following[at] - value[at]), max(high, following[at] - value[at])
    return low, high


@dataclass(frozen=True, slots=True)
class PoolSolution:
    """The mean wait, and what is done in every state."""

    mean_wait: float
    """Seconds."""
    error: float
    """Half of the distance of the two bounds, seconds."""
    after: Ints
    """By state: the one that it becomes by decision."""


def solve(case: PoolCase, tolerance: float = 5e-3, *, ahead: bool = False) -> PoolSolution:
    """The best that a rule can do that serves until idle; ``ahead``: one that also restores seats before any request
    waits for them. ``tolerance`` is relative."""
    return _iterate(case, None, tolerance, ahead=ahead)


def evaluate(case: PoolCase, policy: Policy, absence: float, tolerance: float = 5e-3) -> PoolSolution:
    """The mean wait of a policy; seats with requests have been away for ``absence`` seconds in the mean."""
    return _iterate(case, _Asked(case, policy, absence).after(), tolerance, ahead=False)


def _iterate(case: PoolCase, after: Ints | None, tolerance: float, *, ahead: bool) -> PoolSolution:
    groups, homes, queues = case.states
    count = groups * groups * homes * queues
    states = valid_states(groups, homes, queues, len(case.rates), case.in_flight, case.limit)
    obeyed = np.zeros(count, dtype=np.int64) if after is None else after
    value, kept, following = np.zeros(count), np.zeros(count), np.zeros(count)
    fastest = max(case.in_flight / case.service, 1 / case.park, 1 / case.restore)
    uniform = (sum(case.rates) + GROUPS * fastest) * 1.01
    low, high = -np.inf, np.inf
    for step in range(_MOST_STEPS):
        growth = sweep(
            np.asarray(case.rates), case.service, case.park, case.restore, case.move, case.limit, case.in_flight,
            uniform, after is None, ahead, states, obeyed, value, kept, following,
        )  # fmt: skip
        value, following = following, value
        low, high = growth[0] * uniform, growth[1] * uniform
        if high - low <= 2 * tolerance * max(low, 1e-9):
            break
        if step % _CHECK_EVERY == 0:
            value -= value[0]
    total = sum(case.rates)
    return PoolSolution((low + high) / 2 / total, (high - low) / 2 / total, obeyed)


class _Asked:
    """Asks a policy in every state in which it can decide something."""

    def __init__(self, case: PoolCase, policy: Policy, absence: float) -> None:
        self.case, self.policy = case, policy
        most = case.limit
        self.ages = [[k / (one + 1 / absence) for k in range(most, 0, -1)] for one in case.rates]

    def after(self) -> Ints:
        """By state: the one that its decisions make of it."""
        groups, homes, queues = self.case.states
        seats, most, limit = len(self.case.rates), self.case.in_flight, self.case.limit
        found: Ints = np.arange(groups * groups * homes * queues, dtype=np.int64)
        for at in valid_states(groups, homes, queues, seats, most, limit).tolist():
            places, both = at // queues % homes, at // (queues * homes)
            first, second = divmod(both, groups)
            if any(not one or in_flight_of(one, seats, most) == 0 for one in (first, second)):
                found[at] = self._settled((first, second), places, at % queues)
        return found

    def _settled(self, state: tuple[int, int], places: int, queue: int) -> int:
        seats, most = len(self.case.rates), self.case.in_flight
        asked, waits = True, queue > 0
        while asked:
            asked = False
            for here in sorted(range(GROUPS), key=lambda one: state[one] != 0 or not waits):
                if state[here] and in_flight_of(state[here], seats, most) != 0:
                    continue
                own = self._decided(state, here, places, queue)
                if own != state[here]:
                    state = (own, state[1]) if here == 0 else (state[0], own)
                    places, asked = placed(own, here, places, seats, most), True
        groups, homes, queues = self.case.states
        return ((state[0] * groups + state[1]) * homes + places) * queues + queue

    def _decided(self, state: tuple[int, int], here: int, places: int, queue: int) -> int:
        """What a decision makes of a group."""
        seats, most = len(self.case.rates), self.case.in_flight
        match self.policy.decide(self._view(state, here, places, queue)):
            case Stay():
                return state[here]
            case Park(seat=name):
                return 1 + int(name[1:])
            case Switch(evict=str(name)):
                return 1 + int(name[1:])
            case Switch(activate=name):
                seat = int(name[1:])
                return 1 + seats + seat if places >> seat & 1 == here else 1 + 2 * seats + seat
        raise AssertionError(most)

    def _view(self, state: tuple[int, int], here: int, places: int, queue: int) -> GroupView:
        case, seats, most = self.case, len(self.case.rates), self.case.in_flight
        held = {seat_of(group, seats, most): group for group in state if group}
        there = 1 - here
        busy_there = state[there] != 0
        shown: list[list[SeatView]] = [[], []]
        peer_rate = 0.0
        for seat in range(seats):
            place = places >> seat & 1
            away = place != here
            if away and seat not in held:
                peer_rate += case.rates[seat]
                if not waiting_of(queue, seat, case.limit) or 1 <= state[there] < 1 + seats:  # that makes room for it
                    continue
            elif away:
                continue
            shown[away].append(self._seat(seat, held.get(seat), queue, moves=away, busy=busy_there))
        serving = in_flight_of(state[there], seats, most)
        clears, free = 1 <= state[there] < 1 + seats, state[there] == 0
        holder = seat_of(state[there], seats, most)
        lost = 0.0
        if serving == 0:
            lost = case.rates[holder] / (case.rates[holder] + peer_rate) * case.restore
        frees_in = 0.0 if free else case.park if clears or serving == 0 else None
        peer = PeerView(f"G{there}", peer_rate, free or clears, frees_in, lost)
        return GroupView(f"G{here}", 1, tuple(shown[0]), tuple(shown[1]), 1e6, None, None, (peer,), case.move)

    def _seat(self, seat: int, held: int | None, queue: int, *, moves: bool, busy: bool) -> SeatView:
        case, seats, most = self.case, len(self.case.rates), self.case.in_flight
        waiting = waiting_of(queue, seat, case.limit)
        more: dict[str, Any] = {"move_seconds": case.move, "home_busy": busy, "group": ""} if moves else {}
        state = SeatState.PARKED
        if held is not None:
            state = SeatState.PARKING if held < 1 + seats else SeatState.ACTIVATING
            if in_flight_of(held, seats, most) >= 0:
                state = SeatState.ACTIVE
                more |= {"in_flight": in_flight_of(held, seats, most), "active_seconds": 60.0, "idle_seconds": 30.0}
        return SeatView(
            f"s{seat}", state, waiting=waiting, ages=tuple((age, 1) for age in self.ages[seat][case.limit - waiting :]),
            oldest_wait_seconds=self.ages[seat][case.limit - waiting] if waiting else 0.0, park_seconds=case.park,
            activate_seconds=case.restore, service_seconds=case.service, rate_fast=case.rates[seat],
            rate_slow=case.rates[seat], **more,
        )  # fmt: skip


CASES = {
    "3 seats, 0.06/s, P = R = 3.5 s": PoolCase(zipf(0.06, 3)),
    "3 seats, 0.12/s, P = R = 3.5 s": PoolCase(zipf(0.12, 3)),
    "3 seats, 0.12/s, P = 9.5, R = 6 s": PoolCase(zipf(0.12, 3), park=9.5, restore=6.0),
    "3 seats, 0.12/s, P = 1, R = 3.5 s": PoolCase(zipf(0.12, 3), park=1.0),
    "4 seats, 0.06/s, P = R = 3.5 s": PoolCase(zipf(0.06, 4)),
}
NAMES = ("kyb-balanced", "exhaustive-ttl", "exhaustive", "fifo-switch")


def main() -> int:
    """Print the optima, and the ratio of each policy to the one that restores on demand."""
    sys.stdout.write(f"two groups, move 3 s: optimum s; over it: with seats restored ahead, {', '.join(NAMES)}\n")
    for name, case in CASES.items():
        best, ahead = solve(case), solve(case, ahead=True)
        waits = [evaluate(case, POLICIES[one](), 2 * best.mean_wait).mean_wait for one in NAMES]
        cells = " ".join(f"{wait / best.mean_wait:6.3f}" for wait in (ahead.mean_wait, *waits))
        sys.stdout.write(f"{name:34} {best.mean_wait:6.2f} ± {best.error:.2f}  {cells}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
