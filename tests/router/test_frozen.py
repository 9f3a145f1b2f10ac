"""Calls in flight on a seat that is parked: cut, unless its manager says that they are frozen with it."""

from kybernate.messages import DrainAck
from services.router.core import step
from services.router.core.reports import level_of
from services.router.core.traffic import Traffic
from tests.router.test_traffic import K0, S, arrive, event, kinds, record, router


def running(now: float = 1.0) -> Traffic:
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, now)
    arrive(traffic, 2, now, kind="permit")
    return traffic


def freeze(traffic: Traffic) -> list[step.Effect]:
    (ack,) = kinds(traffic.handle(event(state=S.DRAINING, epoch=11), 2.0), DrainAck)
    assert (ack.in_flight, ack.permits) == (2, 1)
    traffic.handle(step.TimePassed(), 3.5)
    (ack,) = kinds(traffic.handle(step.CallEnded(2), 3.5), DrainAck) or [ack]
    return traffic.handle(event(state=S.PARKING, epoch=11, at=3.0, stall_seconds=10.0), 4.0)


def test_without_a_stall_budget_calls_in_flight_are_cut() -> None:
    traffic = running()
    traffic.handle(event(state=S.DRAINING, epoch=11), 2.0)

    cuts = kinds(traffic.handle(event(state=S.PARKING, epoch=11, at=3.0), 4.0), step.Cut)

    assert [cut.request for cut in cuts] == [1]


def test_frozen_calls_are_kept_and_frozen_time_does_not_count_as_served() -> None:
    traffic = running()

    assert not kinds(freeze(traffic), step.Cut)
    assert not kinds(traffic.handle(event(state=S.PARKED, epoch=11, at=5.0, stall_seconds=8.0), 6.0), step.Cut)
    assert not kinds(traffic.handle(event(state=S.ACTIVATING, epoch=12, at=7.0, stall_seconds=6.0), 8.0), step.Cut)
    traffic.handle(event(state=S.ACTIVE, epoch=12, at=9.0), 10.0)
    assert not kinds(traffic.handle(step.TimePassed(), 20.0), step.Cut)
    traffic.handle(step.CallEnded(1), 21.0)

    level = level_of(traffic.table, "m", K0, 21.0)
    assert (level.served, level.served_seconds) == (1, 20.0 - 6.0)


def test_frozen_calls_are_cut_when_the_stall_budget_is_used_up() -> None:
    traffic = running()
    freeze(traffic)
    traffic.handle(event(state=S.PARKED, epoch=11, at=5.0, stall_seconds=8.0), 6.0)

    assert not kinds(traffic.handle(step.TimePassed(), 13.9), step.Cut)
    cuts = kinds(traffic.handle(step.TimePassed(), 14.0), step.Cut)

    assert [(cut.request, cut.code) for cut in cuts] == [(1, "seat_evicted")]


def test_frozen_calls_of_a_lost_seat_are_cut() -> None:
    traffic = running()
    freeze(traffic)

    cuts = kinds(traffic.handle(event(state=S.LOST, epoch=12, at=5.0), 6.0), step.Cut)

    assert [(cut.request, cut.code) for cut in cuts] == [(1, "upstream_failed")]


def test_a_roster_row_with_a_stall_budget_freezes_calls_like_an_event() -> None:
    traffic = running()
    traffic.handle(event(state=S.DRAINING, epoch=11), 2.0)

    row = record(state=S.PARKED, epoch=11, since=5.0, stall_seconds=8.0)

    assert not kinds(traffic.handle(row, 6.0), step.Cut)
    assert kinds(traffic.handle(step.TimePassed(), 14.0), step.Cut)
