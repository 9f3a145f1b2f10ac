"""Levels of a router: the ages of waiting calls as a histogram, and counters."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.core import step
from services.router.core.reports import HISTOGRAM_STEPS, age_histogram, level_of
from tests.router.test_traffic import K0, S, arrive, event, record, router

AGES = st.lists(st.floats(0, 1000, allow_nan=False), max_size=200)


def test_few_ages_are_exact() -> None:
    assert age_histogram([1.0, 7.0, 3.0]) == ((7.0, 1), (3.0, 1), (1.0, 1))
    assert age_histogram([]) == ()


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
    assert level_of(traffic.table, "m", K0, 4.0).ages == ((3.0, 1), (1.0, 1))

    traffic.handle(event(epoch=11), 5.0)
    traffic.handle(step.CallEnded(1), 9.0)
    traffic.handle(step.CallEnded(2), 10.0)

    level = level_of(traffic.table, "m", K0, 10.0)
    assert (level.arrivals, level.served, level.served_seconds, level.ages) == (2, 2, 9.0, ())


def test_permits_and_returned_calls_do_not_count_as_served() -> None:
    traffic = router(record(state=S.ACTIVE))
    arrive(traffic, 1, kind="permit")
    arrive(traffic, 2)
    traffic.handle(step.CallEnded(1), 2.0)
    traffic.handle(step.CallReturned(2), 2.0)

    assert level_of(traffic.table, "m", K0, 3.0).served == 0
