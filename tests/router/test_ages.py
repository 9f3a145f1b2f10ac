"""Levels of a router: the ages of waiting calls as a histogram, and counters."""

from hypothesis import given
from hypothesis import strategies as st

from kybernate.envelope import decode
from kybernate.messages import TrafficSignal
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import SeatState
from services.router.core import step
from services.router.core.reports import HISTOGRAM_STEPS, addressed, age_histogram, level_of
from services.router.core.traffic import MISSING_SECONDS
from tests.router.test_traffic import K0, S, arrive, event, record, router

AGES = st.lists(st.floats(0, 1000, allow_nan=False), max_size=200)


@given(AGES)
def test_the_histogram_keeps_count_sum_and_order(ages: list[float]) -> None:
    found = age_histogram(ages)

    assert len(found) <= HISTOGRAM_STEPS
    assert sum(count for _, count in found) == len(ages)
    assert abs(sum(age * count for age, count in found) - sum(ages)) <= 1e-6 * (1 + sum(ages))
    assert [age for age, _ in found] == sorted((age for age, _ in found), reverse=True)
    if ages:
        assert found[0] == (max(ages), 1)


def test_a_level_has_ages_and_counters() -> None:
    traffic = router(record())
    for request, at in ((1, 1.0), (2, 3.0)):
        arrive(traffic, request, at)
    assert level_of(traffic.table, "m", K0, 4.0).age_histogram == ((3.0, 1), (1.0, 1))

    traffic.handle(event(epoch=11), 5.0)
    traffic.handle(step.CallEnded(1), 9.0)
    traffic.handle(step.CallEnded(2), 10.0)

    level = level_of(traffic.table, "m", K0, 10.0)
    assert (level.arrived, level.served, level.served_seconds, level.age_histogram) == (2, 2, 9.0, ())


def test_permits_and_returned_calls_do_not_count_as_served() -> None:
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, kind="permit")
    arrive(traffic, 2)
    traffic.handle(step.CallEnded(1), 2.0)
    traffic.handle(step.CallReturned(2), 2.0)

    assert level_of(traffic.table, "m", K0, 3.0).served == 0


def test_a_level_is_published_to_the_nodes_of_its_seats() -> None:
    traffic = router()
    signal = TrafficSignal(cause="c", source="r0", model="m", waiting=3, seq=7)
    assert addressed(signal, traffic.table) == [signal], "to all where no seat is known"
    assert signal.subject == "kyb.v1.sig.r0.m"
    for node, seat in (("n1", "s0"), ("n2", "s1"), ("n1", "s2")):
        traffic.handle(SeatRecord(node=node, seat=seat, state=SeatState.PARKED, model="m"), 1.0)
    both = addressed(signal, traffic.table)
    assert [one.subject for one in both] == ["kyb.v1.sig.n1.r0.m", "kyb.v1.sig.n2.r0.m"]
    assert [decode(one.subject, one.body()) for one in both] == both
    assert [(one.waiting, one.seq) for one in both] == [(3, 7)] * 2
    (of_one,) = addressed(signal.model_copy(update={"seat": "s1"}), traffic.table)
    assert of_one.subject == "kyb.v1.sig.n2.r0.m"
    traffic.handle(SeatRecord(node="n2", seat="s1", state=SeatState.FREE, model="", epoch=9), 2.0)
    (of_gone,) = addressed(signal.model_copy(update={"seat": "s1"}), traffic.table, seat_key("n2", "s1"))
    assert of_gone.subject == "kyb.v1.sig.n2.r0.m", "its node is to know that nobody waits there"


def test_a_seat_that_is_gone_has_no_level() -> None:
    """Without the seat's name it would be taken for the level of calls that wait at no seat, which it hid for 1 s."""
    traffic = router(record())
    assert addressed(level_of(traffic.table, "m", K0, 1.0), traffic.table, K0)

    traffic.handle(step.SeatMissing(K0), 1.0)
    traffic.handle(step.TimePassed(), 1.0 + MISSING_SECONDS)

    assert K0 not in traffic.table.upstreams
    assert addressed(level_of(traffic.table, "m", K0, 12.0), traffic.table, K0) == []
    assert addressed(level_of(traffic.table, "m", None, 12.0), traffic.table)
