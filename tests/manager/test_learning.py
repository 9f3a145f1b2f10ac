"""Rates and service times from signals, over lost ones and restarts of routers."""

import pytest
from pydantic import ValidationError

from kybernate.messages import TrafficSignal
from kybernate.policy.estimators import SERVICE_WEIGHT, Arrivals
from services.gpu_manager.core import view
from services.gpu_manager.core.demand import ASSUMED_SERVICE_SECONDS, MOST_SOURCES, Learning
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.publish import record
from tests.manager.world import World


def at(model: float) -> Now:
    return Now(wall=model / 2, model=model, unix=1e9 + model / 2)


def signal(number: int, **fields: object) -> TrafficSignal:
    plain = {"cause": "c", "source": "r", "model": "m", "seat": "s", "seq": number, "incarnation": "i"}
    return TrafficSignal(**{**plain, **fields})  # type: ignore[arg-type]


def learned(*signals: tuple[float, TrafficSignal]) -> Learning:
    learning = Learning()
    for time, one in signals:
        learning.update(one, "s", at(time))
    return learning


def arrived(learning: Learning, now: float) -> float:
    """How many arrivals the slow rate stands for, roughly: what it would be for one is divided out."""
    seat = learning.of("s", "m")
    one = Learning()
    one.update(signal(0, arrived=0), "s", at(1000.0))
    one.update(signal(1, arrived=1), "s", at(now))
    lone = one.of("s", "m")
    return seat.arrivals.slow.at(now) / lone.arrivals.slow.at(now)


def test_what_counts_is_the_difference_so_lost_signals_lose_nothing() -> None:
    learning = learned((1000.0, signal(1, arrived=40)), (1001.0, signal(9, arrived=47)))

    assert arrived(learning, 1001.0) == pytest.approx(7.0)


@pytest.mark.parametrize("incarnation", ["i", "j"])
def test_a_counter_that_falls_or_of_a_router_that_starts_again_counts_from_zero(incarnation: str) -> None:
    """It falls for a seat that its router had lost from its sight, and of which no last level was sent."""
    learning = learned(
        (1000.0, signal(1, arrived=40, served=40, served_seconds=80.0)),
        (1001.0, signal(2, arrived=3, served=2, served_seconds=8.0, incarnation=incarnation)),
    )

    assert arrived(learning, 1001.0) == pytest.approx(3.0)
    seat = learning.of("s", "m")
    assert (seat.service.value, seat.service.count) == (4.0, 2)


def test_late_signals_change_nothing() -> None:
    learning = learned(
        (1000.0, signal(1, arrived=40)), (1001.0, signal(3, arrived=45)), (1001.0, signal(2, arrived=42))
    )
    learning.update(signal(4, arrived=46), "s", at(1001.0))

    assert arrived(learning, 1001.0) == pytest.approx(6.0)


def test_sources_that_count_a_window_are_taken_at_their_word_once() -> None:
    old = {"incarnation": "", "arrivals": 10, "window_seconds": 4.0}
    learning = learned((1000.0, signal(1, **old)), (1002.0, signal(2, **old)), (1010.0, signal(3, **old)))

    assert arrived(learning, 1010.0) == pytest.approx(25.0, rel=0.02)


def test_service_seconds_are_assumed_until_something_was_served() -> None:
    seat = learned((1000.0, signal(1, arrived=1, served=0, served_seconds=0.0))).of("s", "m")

    assert seat.service.value == ASSUMED_SERVICE_SECONDS
    assert seat.service.weight == SERVICE_WEIGHT


def test_another_model_on_the_seat_is_learned_anew() -> None:
    learning = learned((1000.0, signal(1, arrived=1)), (1001.0, signal(2, arrived=9)))

    learning.update(signal(3, arrived=2, model="n"), "s", at(1002.0))

    assert learning.of("s", "m") is None
    assert learning.of("s", "n") is not None


def test_counters_do_not_grow_without_end() -> None:
    learning = Learning()
    for number in range(MOST_SOURCES + 10):
        learning.update(signal(1, source=f"r{number}", arrived=1), "s", at(1000.0 + number))

    assert len(learning.counters) <= MOST_SOURCES
    assert (f"r{MOST_SOURCES + 9}", "m", "s", "standard") in learning.counters


def test_a_seat_is_idle_since_its_last_request_ended(world: World) -> None:
    """Not since the last message while that was in flight."""
    (a,) = world.fill("a")
    world.traffic(a, in_flight=1)
    world.wall += 30.0
    world.traffic(a)
    assert view.seat_view(world.node, world.managed(a), world.now).idle_seconds == 0.0
    world.tick(3.0)
    assert view.seat_view(world.node, world.managed(a), world.now).idle_seconds == 3.0


def test_annotations_that_cannot_be_used_count_as_not_written(world: World, a: str) -> None:
    world.pod(a, "a", tier="god", slo="-3")

    found = world.managed(a).terms

    assert (found.tier_name, found.tier.slo_seconds) == ("god", 20.0)
    assert [text.partition(":")[0] for text in found.problems] == ["kyb.ai/tier", "kyb.ai/slo"]
    seen = view.seat_view(world.node, world.managed(a), world.now)
    assert (seen.slo_seconds, seen.weight) == (20.0, 1.0)


def test_ages_reach_the_policy_also_from_sources_that_tell_only_the_oldest(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.managed(a).durable.pinned = False
    reported = {"model": "a", "seat": a, "cause": "c", "ttl_seconds": 1e9}
    histogram = ((8.0, 1), (4.0, 2))
    world.receive(TrafficSignal(**reported, source="r1", waiting=3, oldest_wait_seconds=8.0, age_histogram=histogram))  # type: ignore[arg-type]
    world.receive(TrafficSignal(**reported, source="r2", waiting=3, oldest_wait_seconds=6.0))  # type: ignore[arg-type]

    seen = view.seat_view(world.node, world.managed(a), world.now)

    assert seen.ages == ((8.0, 1), (6.0, 1), (4.0, 2), (3.0, 2))
    assert (seen.waiting, seen.oldest_wait_seconds) == (6, 8.0)


NAN = float("nan")
INFINITE = float("inf")


def test_a_source_that_names_no_seat_is_counted_once_wherever_its_requests_go() -> None:
    learning = Learning()
    counted = {"s": Arrivals(1000.0), "t": Arrivals(1002.0)}
    for number, (seat, reported, new) in enumerate([("s", 10, 0), ("s", 20, 10), ("t", 30, 10), ("s", 31, 1)]):
        learning.update(signal(number, seat=None, arrived=reported), seat, at(1000.0 + number))
        counted[seat].add(1000.0 + number, new)
    learned = {seat: one.arrivals.at(1003.0) for seat, one in learning.seats.items()}
    assert learned == {seat: one.at(1003.0) for seat, one in counted.items()}


@pytest.mark.parametrize("fields", [{"served_seconds": INFINITE}, {"age_histogram": ((NAN, 1),)}])
def test_what_is_no_number_is_no_signal(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        signal(1, arrived=1, **fields)


def test_ages_that_cannot_be_count_as_not_reported(world: World) -> None:
    (a,) = world.fill("a")
    reported = signal(1, model="a", seat=a, waiting=2, oldest_wait_seconds=4.0, age_histogram=((4.0, 5), (9.0, -3)))
    world.receive(reported)

    assert view.demand(world.node, world.managed(a)).ages(world.now) == ((4.0, 1), (2.0, 1))


def test_a_name_that_is_not_printable_is_no_models_name_and_is_escaped_where_it_is_named(world: World) -> None:
    """Nothing may have refused the pod: the webhook is optional. Rows and logs are read on terminals."""
    seat = world.seat(0, 0)
    world.pod(seat, "a")
    world.annotate(seat, model="qwen\x1b[2J", **{"prefer-group": "G0\nforged"})

    row, problems = record(world.node, world.managed(seat), world.now), world.managed(seat).terms.problems

    assert row.model == "a", "its pod's name"
    assert [text.partition(" of pod default/a is ")[0] for text in problems] == [
        r"kyb.ai/model: 'qwen\x1b[2J'",
        r"kyb.ai/prefer-group: 'G0\nforged'",
    ]
    assert "".join(problems).isprintable()
