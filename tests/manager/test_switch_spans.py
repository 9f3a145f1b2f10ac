"""The spans of switches: in whose trace, from when to when, and what jobs and events get of them."""

from typing import Any

import pytest

from kybernate.messages import ActivateSeat, ParkSeat, SeatActivated, SwitchJob
from kybernate.seat import SeatState
from services.gpu_manager.switch_spans import ASKED_SECONDS, MOST_ASKED, SwitchSpans
from tests.manager.world import World
from tests.spans import Spans, parent, span_id, trace_id, traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


class Followed(World):
    """A board whose effects go through the spans, as the manager's do. ``sent``: what leaves."""

    def follow(self, spans: Spans) -> None:
        self.spans, self.sent = SwitchSpans(spans.tracer), []  # type: list[Any]

    def receive(self, message: object) -> list[object]:
        effects: list[Any] = super().receive(message)
        if hasattr(self, "spans"):
            under_way = {switch.op for switch in self.node.switches.values()}
            self.sent += self.spans.follow(effects, under_way, self.now.unix)
        return effects

    def asked(self, seat: str, cause: str = "req-1") -> None:
        command = ActivateSeat(cause=cause, node="n1", seat=seat, traceparent=GIVEN)
        self.spans.asked(command, self.now.unix)
        self.receive(command)

    def leaving(self, kind: type) -> Any:
        return next(effect for effect in reversed(self.sent) if isinstance(effect, kind))


@pytest.fixture
def spans() -> Any:
    with Spans("gpu-manager") as found:
        yield found


@pytest.fixture
def world() -> Followed:
    here = Followed()
    here.boot()
    return here


def test_a_switch_is_in_the_trace_of_the_request_that_asked_for_it(world: Followed, spans: Spans):
    a, b = world.fill("a", "b")
    world.follow(spans)
    world.tick(10)
    world.asked(a)
    world.traffic(a, waiting=2, oldest=3.0)
    assert world.state(b) is SeatState.DRAINING
    decided = world.now.unix
    world.tick(2.5)
    world.quiet(b)
    drained = world.now.unix
    world.tick(0.5)
    world.finish()
    assert world.state(a) is SeatState.ACTIVE

    [switch], [drain] = spans.of("switch"), spans.of("drain")
    assert (trace_id(switch), parent(switch)) == (TRACE, SPAN)
    assert parent(drain) == span_id(switch)
    assert (drain.start_time, drain.end_time) == (int(decided * 1e9), int(drained * 1e9))
    assert (switch.start_time, switch.end_time) == (int(decided * 1e9), int(world.now.unix * 1e9))
    facts = {name.removeprefix("kybernate."): value for name, value in switch.attributes.items()}
    assert (facts["victim"], facts["incoming"], facts["model"], facts["cause"]) == (b, a, "a", "req-1")
    assert switch.status.is_ok
    noted = [event.name for event in switch.events]
    assert noted == [f"{b} draining", f"{b} parking", f"{b} parked", f"{a} activating", f"{a} active"]
    assert world.leaving(SwitchJob).traceparent == traceparent(switch)
    assert world.leaving(SeatActivated).traceparent == traceparent(switch)


def test_a_seat_that_is_lost_is_the_error_of_its_switch(world: Followed, spans: Spans):
    a, b = world.fill("a", "b")
    world.follow(spans)
    world.tick(10)
    world.traffic(a, waiting=1)
    world.quiet(b)
    world.progress(world.job(), activate="lost")
    [switch] = spans.of("switch")
    assert parent(switch) == ""  # no request was traced
    assert (switch.status.is_ok, switch.status.description) == (False, "made lost")


def test_a_drain_that_is_called_off_ends_with_its_switch(world: Followed, spans: Spans):
    a, b = world.fill("a", "b")
    world.follow(spans)
    world.tick(10)
    world.asked(a)
    world.traffic(a, waiting=1)
    world.tick(1)
    world.traffic(a)  # the caller left
    world.receive(ActivateSeat(cause="op-2", node="n1", seat=b, actor="operator"))
    for _ in range(20):
        world.tick(1)
    assert world.state(b) is SeatState.ACTIVE
    [switch], [drain] = spans.of("switch"), spans.of("drain")
    assert drain.end_time == switch.end_time


def test_who_asked_is_remembered_for_a_while_and_not_without_end(world: Followed, spans: Spans):
    a, b = world.fill("a", "b")
    world.follow(spans)
    world.tick(10)
    for number in range(MOST_ASKED):
        world.spans.asked(ActivateSeat(cause=f"r-{number}", node="n1", seat=f"s-{number}", traceparent=GIVEN), 0.0)
    assert len(world.spans._asked) == MOST_ASKED
    world.spans.asked(ActivateSeat(cause="earlier", node="n1", seat=a, traceparent=GIVEN), world.now.unix)
    world.traffic(a, waiting=1, cause="later")
    world.quiet(b)
    world.finish()
    world.tick(ASKED_SECONDS + 1)
    world.traffic(a)
    world.traffic(b, waiting=1, cause="earlier")
    world.quiet(a)
    world.finish()
    first, second = spans.of("switch")
    assert (parent(first), parent(second)) == (SPAN, "")


def test_a_seat_that_only_leaves_is_in_no_requests_trace(world: Followed, spans: Spans):
    [a] = world.fill("a")
    world.follow(spans)
    world.tick(10)
    world.asked(a)
    world.command(ParkSeat, a)
    world.quiet(a)
    world.finish()
    [switch] = spans.of("switch")
    assert (switch.attributes["kybernate.victim"], parent(switch)) == (a, "")
