"""Which requests were served: held ones by their records, the others by the counters of levels."""

from typing import Any

from kybernate.messages import RequestEnded, TrafficSignal
from services.console.core.served import Served, Waits


def level(served: int, seconds: float = 0.0, *, source: str = "router-0", incarnation: str = "a") -> TrafficSignal:
    counts: dict[str, Any] = {"served": served, "served_seconds": seconds, "incarnation": incarnation}
    return TrafficSignal(cause="c", source=source, model="m", seat="s0", **counts)


def record(held: float, status: int = 200) -> RequestEnded:
    return RequestEnded(
        cause="c", request="r", router="router-0", model="m", node="n", seat="s0", arrived_at=90.0,
        held_seconds=held, seconds=held + 1.0, status=status,
    )  # fmt: skip


def settled(served: Served, *, twice: bool = True) -> list[tuple[float, float]]:
    """(seconds, held seconds) of the requests of the last step, and of the one before."""
    found = list(served.settle(100.0))
    return [(one.seconds, one.held_seconds) for one in found + (list(served.settle(101.0)) if twice else [])]


def test_counting_begins_with_the_first_level_of_a_seat():
    served = Served(lambda seconds: seconds)
    served.count(level(500, 1000.0))
    assert settled(served) == []
    served.count(level(502, 1006.0))
    assert settled(served) == [(3.0, 0.0)] * 2


def test_the_first_level_that_a_source_sends_counts_from_0():
    served = Served(lambda seconds: seconds)
    served.count(level(2, 3.0).model_copy(update={"arrived": 2, "arrivals": 2}))
    assert settled(served) == [(1.5, 0.0)] * 2


def test_a_request_with_a_record_is_not_counted_again_whichever_comes_first():
    for record_first in (True, False):
        served = Served(lambda seconds: seconds)
        served.count(level(0))
        if record_first:
            assert served.record(record(4.0)) is not None
        served.count(level(2, 2.0))
        if not record_first:
            assert settled(served, twice=False) == []
            held = served.record(record(4.0))
            assert held is not None
            assert (held.seconds, held.held_seconds, held.ended_at) == (5.0, 4.0, 95.0)
        assert settled(served) == [(1.0, 0.0)], record_first


def test_a_record_that_comes_before_its_count_by_more_than_a_step_is_remembered():
    served = Served(lambda seconds: seconds)
    served.count(level(0))
    served.record(record(4.0))
    assert settled(served) == []
    served.count(level(1, 1.0))
    assert settled(served) == []


def test_a_router_that_was_started_again_counts_from_0_and_two_routers_add_up():
    served = Served(lambda seconds: seconds)
    served.count(level(7))
    served.count(level(1, 2.0, incarnation="b"))
    served.count(level(3, source="router-1"))
    served.count(level(4, 2.0, source="router-1"))
    assert settled(served) == [(2.0, 0.0)] * 2


def test_a_request_that_failed_was_not_served():
    served = Served(lambda seconds: seconds)
    assert served.record(record(4.0, status=503)) is None


def test_waits_count_requests_that_did_not_wait():
    waits = Waits()
    for seconds in (*[0.0] * 98, 4.0, 8.0):
        waits.add("m", seconds)
    assert waits.of("m") == {"count": 100, "p50": 0.0, "p99": 4.0}
