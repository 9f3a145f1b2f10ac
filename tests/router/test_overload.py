"""More requests than an engine can answer, in model time: what is answered, in time, and how callers are sent away."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from kybernate.seat import SeatState
from services.router.core import step
from tests.router.test_traffic import listed, record, router


@dataclass
class Load:
    """Callers that arrive at random, wait for so long and do not come back; an engine with slots and a queue."""

    slots: int
    service_seconds: float
    patience: float
    tells: bool = False
    """Callers say how long they wait."""
    declared: bool = False
    now: float = 0.0
    answered: list[tuple[float, float]] = field(default_factory=list)
    """(when, after how long)."""
    rejected: list[tuple[float, int]] = field(default_factory=list)
    """(when, Retry-After)."""
    gave_up: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(14)
        self.traffic = router(record(state=SeatState.ACTIVE, max_requests=self.slots if self.declared else 0))
        self.events: list[tuple[float, int, str, int]] = []
        self.arrived: dict[int, float] = {}
        self.running: set[int] = set()
        self.queued: list[int] = []
        self.number = 0

    def run(self, per_second: float, until: float) -> None:
        """Let callers arrive at this rate until then."""
        self._later(self.chance.expovariate(per_second), "arrive", 0)
        self._later(1.0, "presence", 0)
        while self.events and self.events[0][0] <= until:
            self.now, _, kind, request = heapq.heappop(self.events)
            alarm = self.traffic.alarms.at
            if alarm is not None and alarm <= self.now:
                self._feed(step.TimePassed())
            if kind == "arrive":
                self._later(self.chance.expovariate(per_second), "arrive", 0)
                self._arrive()
            elif kind == "presence":
                self._feed(listed(self.now))
                self._later(1.0, "presence", 0)
            elif kind == "leave" and request in self.arrived:
                self.gave_up += 1
                self._end(request, answered=False)
            elif kind == "done" and request in self.running:
                self.answered.append((self.now, self.now - self.arrived[request]))
                self._end(request, answered=True)
        self.events = [event for event in self.events if event[2] not in ("arrive", "presence")]

    def _arrive(self) -> None:
        self.number += 1
        self.arrived[self.number] = self.now
        self._later(self.patience, "leave", self.number)
        patience = self.patience if self.tells else None
        self._feed(step.CallArrived(self.number, "m", "c", hold_seconds=patience))

    def _end(self, request: int, *, answered: bool) -> None:
        self.arrived.pop(request, None)
        self.running.discard(request)
        if request in self.queued:
            self.queued.remove(request)
        self._compute()
        self._feed(step.CallEnded(request, answered))

    def _compute(self) -> None:
        while self.queued and len(self.running) < self.slots:
            request = self.queued.pop(0)
            self.running.add(request)
            self._later(self.service_seconds * self.chance.uniform(0.5, 1.5), "done", request)

    def _feed(self, message: step.Input) -> None:
        for effect in self.traffic.handle(message, self.now):
            if isinstance(effect, step.Forward):
                self.queued.append(effect.request)
                self._compute()
            elif isinstance(effect, step.Reject):
                assert (effect.status, effect.code) == (429, "queue_full")
                self.rejected.append((self.now, effect.retry_after or 0))
                self.arrived.pop(effect.request, None)

    def _later(self, seconds: float, kind: str, request: int) -> None:
        heapq.heappush(self.events, (self.now + seconds, len(self.events) + self.number, kind, request))


@pytest.mark.parametrize("times", [3, 10])
@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("slots", "service_seconds"), [(16, 3.2), (4, 0.5), (64, 8.0)])
def test_under_overload_the_engine_goes_on_giving_useful_answers(
    slots: int, service_seconds: float, declared: bool, tells: bool, times: int
) -> None:
    capacity = slots / service_seconds
    load = Load(slots, service_seconds, patience=30.0, tells=tells, declared=declared)
    load.run(times * capacity, 120.0)
    useful = [at for at, _ in load.answered if at > 60.0]
    assert len(useful) > (0.9 if declared else 0.85) * 60.0 * capacity
    assert load.rejected
    assert min(after for _, after in load.rejected) >= 1
    assert len({after for _, after in load.rejected}) > 1, "rejected callers do not all come back together"
    served = len(load.answered)
    assert load.gave_up <= (0 if declared else 0.4 * served), (load.gave_up, served)


@pytest.mark.parametrize("times", [3, 10])
def test_after_an_overload_a_call_is_answered_within_seconds(times: int) -> None:
    load = Load(16, 3.2, patience=30.0, declared=True)
    load.run(times * 5.0, 60.0)
    before = len(load.answered)
    load.run(1.0, 90.0)  # a fifth of the capacity
    later = [took for at, took in load.answered[before:] if at - took > 65.0]
    assert len(later) > 10
    assert max(later) < 5.0, "a free place at once: only the time of the answer itself"


def test_below_its_capacity_no_call_is_rejected_or_waits() -> None:
    load = Load(16, 3.2, patience=30.0)
    load.run(3.5, 300.0)
    assert not load.rejected
    assert not load.gave_up
    assert max(took for _, took in load.answered) < 15.0
