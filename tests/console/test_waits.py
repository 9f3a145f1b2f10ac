"""How long served requests waited: held ones by their records, the others by the counters of levels."""

from typing import Any

from kybernate.messages import RequestEnded, TrafficSignal
from services.console.core.waits import Waits


def level(
    served: int, *, source: str = "router-0", incarnation: str = "a", arrived: int | None = None
) -> TrafficSignal:
    counts: dict[str, Any] = {"served": served, "served_seconds": 0.0, "incarnation": incarnation}
    if arrived is not None:
        counts |= {"arrived": arrived, "arrivals": arrived}
    return TrafficSignal(cause="c", source=source, model="m", seat="s0", **counts)


def record(held: float, status: int = 200) -> RequestEnded:
    return RequestEnded(
        cause="c", request="r", router="router-0", model="m", node="n", seat="s0", arrived_at=90.0,
        held_seconds=held, seconds=held + 1.0, status=status,
    )  # fmt: skip


def kept(waits: Waits, *, steps: int = 2) -> list[float]:
    """The waits after so many steps."""
    for _ in range(steps):
        waits.settle()
    return list(waits.waits.get("m", ()))


def test_counting_begins_with_the_first_level_of_a_seat():
    waits = Waits()
    waits.count(level(500))
    assert kept(waits) == []
    waits.count(level(502))
    assert kept(waits) == [0.0] * 2


def test_the_first_level_that_a_source_sends_counts_from_0():
    waits = Waits()
    waits.count(level(2, arrived=2))
    assert kept(waits) == [0.0] * 2


def test_a_request_with_a_record_is_not_counted_again_whichever_comes_first():
    for record_first in (True, False):
        waits = Waits()
        waits.count(level(0))
        if record_first:
            waits.record(record(4.0))
        waits.count(level(2))
        if not record_first:
            assert kept(waits, steps=1) == []
            waits.record(record(4.0))
        assert kept(waits) == [4.0, 0.0], record_first


def test_a_record_that_comes_before_its_count_by_more_than_a_step_is_remembered():
    waits = Waits()
    waits.count(level(0))
    waits.record(record(4.0))
    assert kept(waits) == [4.0]
    waits.count(level(1))
    assert kept(waits) == [4.0]


def test_a_router_that_was_started_again_counts_from_0_and_two_routers_add_up():
    waits = Waits()
    waits.count(level(7))
    waits.count(level(1, incarnation="b"))
    waits.count(level(3, source="router-1"))
    waits.count(level(4, source="router-1"))
    assert kept(waits) == [0.0] * 2


def test_a_request_that_failed_was_not_served():
    waits = Waits()
    waits.record(record(4.0, status=503))
    assert kept(waits) == []


def test_waits_count_requests_that_did_not_wait():
    waits = Waits()
    waits.count(level(100, arrived=100))
    for seconds in (4.0, 8.0):
        waits.record(record(seconds))
    kept(waits)
    assert waits.of("m") == {"count": 100, "p50": 0.0, "p99": 4.0}
    assert waits.changed == {"m"}
