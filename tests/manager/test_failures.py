"""Failure is a fact: a seat whose engine ends again and again without having served is started by requests alone."""

from dataclasses import replace

import pytest

from kybernate.messages import ActivateSeat, PinSeat, TrafficSignal
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import StartTicket
from services.gpu_manager.failures import LONGEST_PAUSE_SECONDS
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import record
from tests.manager.world import World

LINE = "OSError: no such model file /models/x.gguf"


def crashes(world: World, seat: str, code: int = 1) -> None:
    """The container of its last ticket starts, and exits at once."""
    world.start(seat)
    ended = f"exited with code {code}"
    pod = replace(world.pods[seat], running=False, ended=ended, exited=float(world.now.unix), code=code, line=LINE)
    world.pods[seat] = pod
    world.look()
    assert world.state(seat) is S.BACKOFF


def starts(world: World, seat: str) -> bool:
    """Whether a start of it gets a ticket now, after the switches that this needs."""
    given = len(world.sent(StartTicket, seat))
    world.call(seat)
    world.tick(0.1)
    world.finish()
    return len(world.sent(StartTicket, seat)) > given


def tries(world: World, seat: str) -> bool:
    """The same; it crashes again."""
    if given := starts(world, seat):
        crashes(world, seat)
    return given


def broken(world: World, ends: int = 2) -> tuple[str, str]:
    """A good model that is active, and one that has failed so many times in a row."""
    bad, good = world.seat(0, 1), world.seat(0, 0)
    world.pod(bad, "bad")
    for _ in range(ends):
        world.tick(4.0)
        assert tries(world, bad)
    world.serve(good, "good")
    world.tick(100.0)
    return good, bad


@pytest.mark.parametrize("pinned", [False, True])
def test_a_crash_looper_without_a_request_takes_no_gpu_from_a_good_model(world: World, *, pinned: bool) -> None:
    """Before, it had warm-up's claim for ever, and evicted the good one at each of its starts."""
    good, bad = broken(world)
    if pinned:
        world.command(PinSeat, bad)
    for _ in range(20):
        world.tick(60.0)
        assert not tries(world, bad)
        assert world.state(good) is S.ACTIVE
    assert world.stage(bad).stage == "failed"


def test_a_free_slot_is_not_warmed_up_by_it_either(world: World) -> None:
    bad = world.seat(0, 1)
    world.pod(bad, "bad")
    assert tries(world, bad)
    world.tick(4.0)
    assert tries(world, bad), "one may be an accident"
    world.tick(1000.0)
    assert not tries(world, bad)


def test_a_request_starts_it_after_a_pause_that_doubles_also_where_it_is_alone(world: World) -> None:
    bad = world.seat(0, 1)
    world.pod(bad, "bad")
    assert tries(world, bad)
    world.tick(4.0)
    assert tries(world, bad)
    world.traffic(bad, waiting=1)
    for pause in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0):
        world.tick(pause - 0.5)
        assert not starts(world, bad), pause
        world.tick(0.35)
        assert tries(world, bad), pause
    assert world.managed(bad).durable.failed.count == 10


def test_the_reason_has_exit_code_count_last_line_and_pause(world: World) -> None:
    _, bad = broken(world)
    found = world.stage(bad)
    text = f"bad has failed 2 times in a row since 08:16 UTC: exited with code 1: {LINE}; a request may start it again"
    assert found.text == text
    assert {**found.data, "since": 0, "until": 0} == {
        "failures": 2,
        "code": 1,
        "why": "exited with code 1",
        "line": LINE,
        "since": 0,
        "until": 0,
    }
    world.traffic(bad, waiting=1)
    assert tries(world, bad)
    assert world.stage(bad).text.startswith("bad has failed 3 times in a row")
    assert world.stage(bad).clock.text(world.now) == " in 10 s"


def test_routers_are_told_until_when_no_request_starts_it(world: World) -> None:
    """Else they refuse requests that would start it, for ever."""
    bad = world.seat(0, 1)
    world.pod(bad, "bad")
    seat = world.managed(bad)

    def told() -> float:
        return record(world.node, seat, world.now).failed_until

    assert tries(world, bad)
    seat.durable.failed = replace(seat.durable.failed, until=float(world.now.unix) + 3.0)
    assert told() == 0.0, "one end may be an accident"
    world.tick(4.0)
    assert tries(world, bad)
    assert told() == seat.durable.failed.until
    world.tick(10.0)
    assert told() == float(seat.entered) + LONGEST_PAUSE_SECONDS, "kubelet's pause"
    world.call(bad)
    assert (seat.state, told()) == (S.WAITING, 0.0)


def test_an_operators_wish_clears_it_and_lapses_with_the_next_two_ends(world: World) -> None:
    good, bad = broken(world)
    world.command(ActivateSeat, bad)
    assert not world.managed(bad).durable.failed.count
    assert tries(world, bad)
    world.tick(4.0)
    assert tries(world, bad)
    world.tick(100.0)
    assert not tries(world, bad)
    assert world.managed(bad).usage.wanted_since is None
    assert world.managed(good).facts.alive


@pytest.mark.parametrize("how", ["answered", "60 s"])
def test_an_engine_that_has_served_begins_anew(world: World, how: str) -> None:
    _, bad = broken(world)
    world.traffic(bad, waiting=1)
    assert starts(world, bad)
    world.start(bad)
    world.healthy(bad)
    assert world.managed(bad).durable.failed.count == 2, "healthy is not enough"
    if how == "answered":
        signal = TrafficSignal(cause="r", source="router-0", model="bad", seat=bad, incarnation="1")
        for served in (0, 1):
            counts = {"seq": served, "arrived": 1, "served": served, "served_seconds": 0.4 * served}
            world.receive(signal.model_copy(update=counts))
    else:
        world.tick(61.0)
    assert not world.managed(bad).durable.failed.count
    world.exit(bad)
    assert not world.managed(bad).durable.failed.count, "this one has served"


def test_an_engine_that_is_healthy_and_ends_before_it_serves_counts(world: World, a: str) -> None:
    world.serve(a, "a")
    world.tick(10.0)
    world.exit(a)
    assert world.managed(a).durable.failed.count == 1


@pytest.mark.parametrize("backend", ["restart", "cuda"])
def test_an_end_that_the_node_has_ordered_counts_for_nothing(world: World, a: str, b: str, backend: str) -> None:
    """Nor does the end of an engine that rests."""
    world.serve(a, "a")
    world.annotate(a, backend=backend)
    world.tick(10.0)
    world.pod(b, "b")
    world.traffic(b, waiting=1)
    world.call(b)
    world.finish()
    assert world.state(a) is S.PARKED
    world.exit(a)
    assert world.managed(a).durable.failed.count == 0


def test_a_new_pod_begins_anew_and_a_new_manager_does_not(world: World) -> None:
    _, bad = broken(world)
    kept = Ledger.model_validate_json(recovery.ledger(world.node, "").model_dump_json())
    assert [one.durable.failed for one in kept.seats if one.seat == bad] == [world.managed(bad).durable.failed]
    world.pods[bad] = replace(world.pods[bad], uid="another")
    world.look(3)
    assert world.managed(bad).durable.failed.count == 0
