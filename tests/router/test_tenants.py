"""Tenants share a model: they take turns in its queue, none keeps the others out, and each keeps to its limits."""

from kybernate.seat import SeatState
from services.router.core import step
from services.router.core.admission import Limits
from services.router.core.managers import RouterIdentity
from services.router.core.traffic import Traffic
from tests.router.test_traffic import arrive, kinds, record, synced


def busy(queue_limit: int = 2000) -> Traffic:
    """A router whose only seat has one place, which a call has taken."""
    traffic = Traffic(Limits(queue_limit=queue_limit), RouterIdentity("r", "i1"))
    traffic.handle(synced(record(state=SeatState.ACTIVE, max_requests=1)), 0.0)
    assert kinds(arrive(traffic, 1000, now=0.0), step.Forward)
    return traffic


def drain(traffic: Traffic, running: int = 1000) -> list[int]:
    """End one call after the other; return the calls in the order in which they were forwarded."""
    order = []
    while True:
        forwards = kinds(traffic.handle(step.CallEnded(running, True), 1.0), step.Forward)
        if not forwards:
            return order
        (forward,) = forwards
        running = forward.request
        order.append(running)


def test_tenants_take_turns_however_many_calls_one_has():
    traffic = busy()
    for number in range(1, 13):
        arrive(traffic, number, tenant="many", now=0.1)
    for number in (20, 21):
        arrive(traffic, number, tenant="few", now=0.2)
    assert drain(traffic) == [1, 20, 2, 21, *range(3, 13)]


def test_a_tenant_that_was_silent_saves_no_turns():
    traffic = busy()
    for number in range(1, 9):
        arrive(traffic, number, tenant="a", now=0.1)
    running = 1000
    for _ in range(5):
        (forward,) = kinds(traffic.handle(step.CallEnded(running, True), 0.2), step.Forward)
        running = forward.request
    assert running == 5
    for number in (20, 21):
        arrive(traffic, number, tenant="b", now=0.3)
    assert drain(traffic, running) == [6, 20, 7, 21, 8]


def test_priorities_come_before_turns():
    traffic = busy()
    arrive(traffic, 1, tenant="a", priority=1, now=0.1)
    arrive(traffic, 2, tenant="a", priority=1, now=0.1)
    arrive(traffic, 3, tenant="b", now=0.1)
    assert drain(traffic) == [1, 2, 3]


def test_a_full_queue_takes_the_last_call_of_the_tenant_with_the_most():
    traffic = busy(queue_limit=4)
    for number in range(1, 5):
        arrive(traffic, number, tenant="a", now=0.1)
    assert [reject.request for reject in kinds(arrive(traffic, 5, tenant="a", now=0.1), step.Reject)] == [5]
    assert [reject.request for reject in kinds(arrive(traffic, 20, tenant="b", now=0.1), step.Reject)] == [4]
    assert [reject.request for reject in kinds(arrive(traffic, 21, tenant="b", now=0.1), step.Reject)] == [3]
    assert [reject.request for reject in kinds(arrive(traffic, 22, tenant="b", now=0.1), step.Reject)] == [22]
    assert drain(traffic) == [1, 20, 2, 21]
