"""How many requests a seat may have in flight: declared or learned; what waits for a place, and in which order."""

import heapq
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from kybernate.seat import SeatState
from services.router.core import step
from services.router.core.capacity import LEAST_LIMIT, MOST_LIMIT, Capacity
from services.router.core.reports import level_of
from services.router.core.traffic import Traffic
from services.router.settings import RouterSettings
from tests.router.test_traffic import K0, K1, arrive, event, kinds, listed, record, router, synced

S = SeatState


def limits_of(slots: int, service: Callable[[random.Random], float], seconds: float) -> tuple[list[int], float]:
    """Overload an engine that has a queue through a Capacity; return the limits, and the share of its best rate.

    As many requests as there are places are always in flight.
    """
    chance, capacity, now = random.Random(1), Capacity(), 0.0
    running: list[tuple[float, float, int]] = []  # (ends, sent, found)
    queued: list[tuple[float, int]] = []
    limits, answers, in_flight, taken_seconds = [], 0, 0, 0.0
    while now < seconds:
        while in_flight < capacity.limit:
            in_flight += 1
            queued.append((now, in_flight))
        while queued and len(running) < slots:
            sent, found = queued.pop(0)
            took = service(chance)
            taken_seconds += took
            heapq.heappush(running, (now + took, sent, found))
        now, sent, found = heapq.heappop(running)
        capacity.ended(found, now - sent, now, answered=True, taken=in_flight >= capacity.limit)
        in_flight -= 1
        answers += 1
        limits.append(capacity.limit)
    return limits, answers / (slots * now / (taken_seconds / (answers + len(running))))


def heavy_tailed(mean: float) -> Callable[[random.Random], float]:
    """As answers of language models are: the longest tenth makes half of the sum."""
    return lambda chance: mean * math.exp(chance.gauss(0.0, 1.5) - 1.5**2 / 2)


@pytest.mark.parametrize("slots", [1, 8, 16, 64])
@pytest.mark.parametrize("kind", ["constant", "exponential"])
def test_a_saturated_engine_gets_few_more_requests_than_it_has_slots(slots: int, kind: str) -> None:
    service = (lambda _: 2.0) if kind == "constant" else (lambda chance: chance.expovariate(0.5))
    limits, share = limits_of(slots, service, max(600.0, 4800.0 / slots))  # it learns from answers
    settled = limits[len(limits) // 2 :]
    assert sum(settled) / len(settled) <= max(32, 4 * slots)
    assert share > 0.9


@pytest.mark.parametrize("slots", [8, 32, 64])
def test_a_saturated_engine_whose_answers_differ_much_in_length_keeps_most_of_its_rate(slots: int) -> None:
    limits, share = limits_of(slots, heavy_tailed(2.0), 600.0)
    assert sum(limits[len(limits) // 2 :]) / (len(limits) // 2) < 0.75 * MOST_LIMIT
    assert share > 0.75


@pytest.mark.parametrize("seed", range(5))
def test_answers_that_differ_much_in_length_do_not_take_places_away(seed: int) -> None:
    chance, capacity, service = random.Random(seed), Capacity(), heavy_tailed(2.0)
    running: list[tuple[float, float, int]] = []  # (ends, sent, found)
    now, refused, arrivals = 0.0, 0, 6000
    for _ in range(arrivals):
        now += chance.expovariate(20.0)  # 40 in flight in the mean; the engine takes any number
        while running and running[0][0] <= now:
            ends, sent, found = heapq.heappop(running)
            capacity.ended(found, ends - sent, ends, answered=True, taken=len(running) + 1 >= capacity.limit)
        if len(running) < capacity.limit:
            heapq.heappush(running, (now + service(chance), now, len(running) + 1))
        else:
            refused += 1
    assert refused < arrivals / 20, "most of them would get a place within seconds"


def test_an_engine_that_is_not_saturated_keeps_its_places() -> None:
    capacity = Capacity()
    for number in range(5000):
        found = 1 + number % 40
        capacity.ended(found, 1.0, number / 10, answered=True, taken=False)  # it takes 1 s, however many there are
    assert capacity.limit == MOST_LIMIT


def test_an_engine_that_gets_faster_with_more_requests_gets_them_back() -> None:
    capacity = Capacity()
    for number in range(200):
        for found in (2, 4, 16, 64):
            capacity.ended(found, found * 1.0, number / 100, answered=True, taken=True)  # one slot of 1 s
    assert capacity.limit == LEAST_LIMIT
    for number in range(2000):
        now = 1000 + number / 10
        capacity.ended(capacity.limit, 1.0, now, answered=True, taken=True)  # any number at once in 1 s
        capacity.ended(max(1, capacity.limit // 2), 1.0, now, answered=True, taken=True)
    assert capacity.limit == MOST_LIMIT


def full(fields: dict[str, Any] | None = None, **limits: Any) -> Traffic:
    """A router whose only seat is active, with one place unless another number is given; call 1 is in flight."""
    traffic = router(record(state=S.ACTIVE, **(fields or {"max_requests": 1})), **limits)
    assert kinds(arrive(traffic, 1), step.Forward)
    return traffic


def test_a_call_waits_for_a_place_and_gets_the_next_one() -> None:
    traffic = full()
    assert not kinds(arrive(traffic, 2, now=1.0), step.Forward, step.Reject)
    level = level_of(traffic.table, "m", K0, 1.0)
    assert (level.waiting, level.in_flight) == (0, 2), "for the manager it is computed"
    (forward,) = kinds(traffic.handle(step.CallEnded(1, answered=True), 2.0), step.Forward)
    assert (forward.request, forward.held_seconds, forward.opened) == (2, 1.0, None)
    traffic.handle(event(state=S.DRAINING, epoch=11, at=3.0), 3.0)
    arrive(traffic, 3, now=3.0)
    level = level_of(traffic.table, "m", K0, 3.0)
    assert (level.waiting, level.in_flight) == (1, 1), "it waits for the seat, which may turn back for it"


def test_of_waiting_calls_the_highest_priority_goes_first() -> None:
    traffic = full()
    for request, priority in [(2, 0), (3, -1), (4, 1), (5, 0)]:
        traffic.handle(step.CallArrived(request, "m", "c", priority=priority), 1.0)
    order = []
    for request in (1, 4, 2, 5):
        (forward,) = kinds(traffic.handle(step.CallEnded(request), 2.0), step.Forward)
        order.append(forward.request)
    assert order == [4, 2, 5, 3]


def test_a_call_that_waits_for_one_seat_takes_a_place_of_another() -> None:
    traffic = full()
    arrive(traffic, 2)
    effects = traffic.handle(record("s1", S.ACTIVE, epoch=11, max_requests=1), 1.0)
    assert [(f.request, f.key) for f in kinds(effects, step.Forward)] == [(2, K1)]


def test_a_seat_that_opens_gets_no_more_calls_than_places() -> None:
    traffic = router(record(max_requests=3))
    for request in range(1, 8):
        arrive(traffic, request)
    effects = traffic.handle(record(state=S.ACTIVE, epoch=11, since=2.0, max_requests=3), 2.0)
    assert [f.request for f in kinds(effects, step.Forward)] == [1, 2, 3]
    assert len(traffic.table.models["m"].held) == 4


def busy(seconds: float = 1.0, **limits: float) -> Traffic:
    """A full seat whose rate is known: one answer per ``seconds``."""
    traffic = full(**limits)
    for request in range(1, 30):
        traffic.handle(listed(request * seconds), request * seconds)
        traffic.handle(step.CallArrived(request + 1, "m", "c"), request * seconds)
        traffic.handle(step.CallEnded(request, answered=True), 1.0 + request * seconds)
    return traffic


def rejected(traffic: Traffic, request: int, now: float, **more: float) -> list[step.Reject]:
    return kinds(traffic.handle(step.CallArrived(request, "m", "c", **more), now), step.Reject)  # type: ignore[arg-type]


def test_a_call_is_rejected_if_a_place_is_expected_too_late() -> None:
    traffic = busy(queue_seconds=5.0)
    outcomes = [rejected(traffic, 100 + number, 30.0) for number in range(8)]
    assert [len(rejects) for rejects in outcomes] == [0] * 5 + [1] * 3
    reject = outcomes[-1][0]
    assert (reject.status, reject.code) == (429, "queue_full")
    assert "a place is expected in" in reject.message
    assert 5 <= reject.retry_after <= 14, "until those that wait are forwarded, spread"


def test_as_many_calls_as_declared_places_may_wait_however_long_answers_take() -> None:
    traffic = busy(seconds=4.0)
    assert not kinds(arrive(traffic, 100, now=117.0), step.Forward, step.Reject), "it waits"
    assert "a place is expected in" in rejected(traffic, 101, 117.0)[0].message


def test_rejected_callers_come_back_apart() -> None:
    traffic = busy(seconds=6.0, queue_seconds=6.5)
    assert not rejected(traffic, 100, 175.0)
    after = {rejected(traffic, 101 + number, 175.0)[0].retry_after for number in range(10)}
    assert len(after) >= 5


def test_a_call_is_rejected_if_its_answer_comes_after_its_caller_left() -> None:
    traffic = busy(seconds=2.0, queue_seconds=5.0)
    assert not rejected(traffic, 100, 59.0, hold_seconds=5.0)
    (reject,) = rejected(traffic, 101, 59.0, hold_seconds=5.0)
    assert (reject.status, reject.code) == (429, "queue_full")
    assert "the caller waits 5 s" in reject.message
    assert not rejected(traffic, 102, 59.0, hold_seconds=60.0)


def test_a_call_whose_deadline_passes_at_a_full_seat_gets_a_429() -> None:
    traffic = full(hold_seconds=3.0)
    arrive(traffic, 2, now=1.0)
    (reject,) = kinds(traffic.handle(step.TimePassed(), 4.1), step.Reject)
    assert (reject.request, reject.status, reject.code) == (2, 429, "queue_full")


def test_a_full_queue_makes_place_for_a_higher_priority() -> None:
    traffic = full(queue_limit=2)
    for request, priority in [(2, -1), (3, -1)]:
        traffic.handle(step.CallArrived(request, "m", "c", priority=priority), 1.0)
    (reject,) = rejected(traffic, 4, 1.0, priority=1)
    assert (reject.request, reject.status) == (3, 429)
    (reject,) = rejected(traffic, 5, 1.0, priority=-1)
    assert reject.request == 5


def test_all_wakes_of_a_model_are_one_and_no_request() -> None:
    traffic = router(record(), queue_limit=1)
    for request in range(1, 2001):
        effects = traffic.handle(step.CallArrived(request, "m", "c", "wake", 60.0), 1.0 + request / 1e4)
        assert not kinds(effects, step.Reject)
    assert level_of(traffic.table, "m", K0, 2.0).waiting == 1
    assert not kinds(arrive(traffic, 3000, now=2.0), step.Reject), "a wake takes no place of a request"
    assert level_of(traffic.table, "m", K0, 2.0).waiting == 2
    effects = traffic.handle(record(state=S.ACTIVE, epoch=11, since=2.0), 3.0)
    assert sorted(f.request for f in kinds(effects, step.Forward)) == [1, 3000]


def test_a_later_wake_makes_the_pending_one_last_longer() -> None:
    traffic = router(record())
    traffic.handle(step.CallArrived(1, "m", "c", "wake", 10.0), 0.0)
    traffic.handle(step.CallArrived(2, "m", "c", "wake", 10.0), 8.0)
    assert not kinds(traffic.handle(step.TimePassed(), 11.0), step.Reject)
    assert kinds(traffic.handle(step.TimePassed(), 18.1), step.Reject)


@pytest.mark.parametrize(("answered", "lowered"), [(None, False), (False, True)])
def test_only_calls_that_waited_in_vain_take_places_away(answered: bool | None, lowered: bool) -> None:
    traffic = full({"max_requests": 0})
    upstream = traffic.table.upstreams[K0]
    for number in range(100, 160):
        arrive(traffic, number, now=1.0)
    for number in range(100, 160):  # all are in flight; those of the upper half fail, or their callers leave
        done = True if number < 130 else answered
        traffic.handle(step.CallEnded(number, done), 1.0 + number / 100)
    assert (upstream.capacity.limit < MOST_LIMIT) is lowered


def test_an_engine_whose_callers_leave_gets_fewer_requests() -> None:
    capacity = Capacity()
    for number in range(400):
        capacity.ended(80, 10.0, number / 8, answered=True, taken=False)
        capacity.ended(250, 30.0, number / 8, answered=number % 3 == 0, taken=True)
    assert capacity.limit <= 109


def test_before_the_first_answers_no_more_calls_wait_than_there_are_places() -> None:
    traffic = router(record(state=S.ACTIVE, max_requests=20))
    outcomes = [kinds(arrive(traffic, number), step.Reject) for number in range(1, 43)]
    assert [len(rejects) for rejects in outcomes] == [0] * 40 + [1] * 2


def test_the_only_call_of_a_model_without_seats_can_be_displaced() -> None:
    traffic = Traffic(RouterSettings(queue_limit=1), "i1")
    assert not kinds(arrive(traffic, 1, now=0.0, priority=-1), step.Reject)
    (reject,) = kinds(arrive(traffic, 2, now=0.1, priority=1), step.Reject)
    assert reject.request == 1
    traffic.handle(listed(0.4), 0.4)
    effects = traffic.handle(synced(record(state=S.ACTIVE), at=0.5), 1.0)
    assert [forward.request for forward in kinds(effects, step.Forward)] == [2]
