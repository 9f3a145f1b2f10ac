"""The KYB index: how much urgency a visit would end per second that it would cost. Pure.

The theory is pull broadcast scheduling with set-up times: one activation serves all requests that wait for that seat,
so a seat is worth the sum over its waiting requests, divided by what the whole visit costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from kybernate.policy.turns import demand
from kybernate.policy.view import SeatView
from kybernate.seat import SeatState

_LEAST_COST = 0.001
"""Seconds; unknown costs are 0 and must not be divided by."""
_MOST_LOAD = 3.0
"""Load of one seat, in requests in flight, beyond which the busy period is not estimated any further."""
_TERMS, _SMALL = 40, 1e-4
"""Most terms of the series for the busy period, and the term below which it ends."""
TAIL = 0.7
"""The longest of n service times is about 1 + 0.7 ln n mean ones, for the spread of decode times."""


@dataclass(frozen=True, slots=True)
class Urgency:
    """The weight of one waiting request as a function of x = (age when it would be served) / SLO.

    ``base + slope·x^power`` up to ``due``, then ``lost·x``; beyond ``late`` another ``late_slope·(x − late)`` on top.
    """

    base: float = 1.0
    slope: float = 1.0
    power: float = 1.0
    due: float = float("inf")
    lost: float = 0.0
    late: float = float("inf")
    late_slope: float = 0.0

    def of(self, x: float) -> float:
        """Urgency of one request."""
        value = self.base + self.slope * x**self.power if x <= self.due else self.lost * x
        return value + self.late_slope * (x - self.late) if x > self.late else value

    def total(self, ages: Sequence[tuple[float, int]], delay: float, slo_seconds: float) -> float:
        """Sum over (age, count) of all requests that wait for a seat, ``delay`` seconds from now."""
        unit = 1.0 / max(slo_seconds, _LEAST_COST)
        if self.power == 1.0 and self.due == self.late == float("inf"):  # one straight line: the common case, and fast
            base, slope = self.base + self.slope * unit * delay, self.slope * unit
            return sum([count * (base + slope * age) for age, count in ages])
        return sum([count * self.of((age + delay) * unit) for age, count in ages])


def waiting_ages(seat: SeatView) -> tuple[tuple[float, int], ...]:
    """Return (age, count) of all demand: requests, an operator's request, the container at the start gate.

    Where only the oldest age is known, the others are taken to be half as old.
    """
    ages = seat.ages
    if not ages and seat.waiting:
        ages = ((seat.oldest_wait_seconds, 1),)
        if seat.waiting > 1:
            ages += ((seat.oldest_wait_seconds / 2, seat.waiting - 1),)
    if seat.wanted_seconds is not None:
        ages += ((seat.wanted_seconds, 1),)
    if seat.state is SeatState.WAITING and seat.start_wait_seconds is not None:
        ages += ((seat.start_wait_seconds, 1),)
    return ages


def rate(seat: SeatView) -> float:
    """Expected requests per second: between the rates of the last minute and of the last quarter of an hour."""
    return 0.5 * seat.rate_fast + 0.5 * seat.rate_slow


def drain_seconds(seat: SeatView, requests: float) -> float:
    """Expected seconds until this many requests in flight have ended, when nothing more is admitted."""
    return seat.service_seconds * (1.0 + TAIL * log(requests)) if requests >= 1.0 else seat.service_seconds * requests


def prolonged_seconds(seat: SeatView, requests: int) -> float:
    """Expected seconds by which later arrivals prolong a visit that has this many requests now, if it admits them.

    Exact for Poisson arrivals and exponential service that nothing slows down (M/M/infinity): the time from n in flight
    to none, minus the same without arrivals, is d · sum over k >= 1 of rho^k / k · (1/k! - n!/(n+k)!).
    """
    load = min(_MOST_LOAD, rate(seat) * seat.service_seconds)
    power, falling, total = 1.0, 1.0, 0.0  # rho^k / k!, and (n! k!) / (n+k)!
    for k in range(1, _TERMS):
        power *= load / k
        falling *= k / (requests + k)
        term = power / k * (1.0 - falling)
        total += term
        if term < _SMALL:
            break
    return seat.service_seconds * total


def step_seconds(seat: SeatView, requests: int) -> float:
    """Expected seconds by which later arrivals prolong the time until one request less than now is in flight.

    Of the same model: d · sum over k >= 1 of rho^k · (n - 1)! / (n + k)!.
    """
    load = min(_MOST_LOAD, rate(seat) * seat.service_seconds)
    term, total = 1.0 / max(requests, 1), 0.0
    for k in range(1, _TERMS):
        term *= load / (requests + k)
        total += term
        if term < _SMALL * total:
            break
    return seat.service_seconds * total


def visit_seconds(seat: SeatView, requests: int) -> float:
    """Expected seconds of a visit that begins with this many requests and goes on until the seat is idle."""
    return drain_seconds(seat, requests) + prolonged_seconds(seat, requests)


@dataclass(frozen=True, slots=True)
class Bid:
    """What a seat with demand offers for the next slot."""

    seat: SeatView
    index: float
    """Urgency per second."""
    setup_seconds: float
    visit_seconds: float
    requests: int
    overdue: float
    """Wait of its oldest request by the time it is served, in SLOs."""

    def __str__(self) -> str:
        seat = self.seat
        share = 100 * (seat.wait_seconds or 0.0) / max(seat.slo_seconds, _LEAST_COST)
        waited = f"{share:.0f} % of its {seat.slo_seconds:g} s"
        if seat.waiting > 1:
            why = f"{seat.waiting} requests wait, the longest for {waited}"
        elif seat.waiting:
            why = f"1 request has waited {waited}"
        elif seat.state is SeatState.WAITING:
            why = "its container waits for the start"
        else:
            why = "an operator asked for it"
        return f"{seat.name} goes first: {why}; the switch takes {self.setup_seconds:.1f} s"


def bid(seat: SeatView, urgency: Urgency, park_seconds: float, length_power: float = 1.0) -> Bid:
    """Return the bid of a seat with demand whose activation can begin after ``park_seconds``.

    With ``length_power`` below 1 a long visit counts less against a seat: part of it serves later arrivals.
    """
    setup = park_seconds + seat.activate_seconds + (seat.move_seconds or 0.0)
    ages = waiting_ages(seat)
    requests = demand(seat)
    visit = visit_seconds(seat, requests)
    value = seat.weight * urgency.total(ages, setup, seat.slo_seconds)
    oldest = max(seat.oldest_wait_seconds if seat.waiting else 0.0, seat.wanted_seconds or 0.0)
    if seat.state is SeatState.WAITING:
        oldest = max(oldest, seat.start_wait_seconds or 0.0)
    overdue = (oldest + setup) / max(seat.slo_seconds, _LEAST_COST)
    index = value / max(setup + visit, _LEAST_COST) ** length_power
    return Bid(seat, index, setup, visit, requests, overdue)
