"""What a seat is by its facts. Each message of the other tests and of the exploration compares it with the state that
the manager writes."""

from dataclasses import replace

import pytest

from kybernate.seat import SeatState as S
from tests.facts import Facts, Life, Memory, Owner, Promise, Ticket, check, contradictions, holds, state_of
from tests.manager.test_mid_switch import switch_under_way
from tests.manager.world import World, make_group

G0, G1 = make_group("G0", [0], 2), make_group("G1", [1], 2)
WAITS = Facts(Owner.POD, Life.NONE, Ticket.NONE, Memory.NOTHING, (G0,), None, Promise.NONE)
RUNS = replace(WAITS, life=Life.RUNS, memory=Memory.VRAM)
COPY = replace(RUNS, memory=Memory.COPY)


@pytest.mark.parametrize(
    ("facts", "state", "held"),
    [
        (replace(WAITS, owner=Owner.NONE), S.FREE, ()),
        (replace(WAITS, owner=Owner.NONE, ticket=Ticket.FEARED), S.FREE, ()),
        (WAITS, S.WAITING, ()),
        (replace(WAITS, ticket=Ticket.FEARED), S.WAITING, ()),
        (replace(WAITS, life=Life.ENDED), S.BACKOFF, ()),
        (replace(WAITS, ticket=Ticket.OPEN), S.STARTING, (G0,)),
        (replace(RUNS, life=Life.LOADS), S.STARTING, (G0,)),
        (replace(RUNS, life=Life.LOADS, memory=Memory.BOTH, promise=Promise.REHEARSES), S.STARTING, (G0,)),
        (RUNS, S.ACTIVE, (G0,)),
        (replace(RUNS, promise=Promise.DRAINS), S.DRAINING, (G0,)),
        (replace(RUNS, promise=Promise.PARKS), S.PARKING, (G0,)),
        (COPY, S.PARKED, ()),
        (replace(COPY, promise=Promise.COMES), S.PARKED, ()),
        (replace(COPY, promise=Promise.DROPS), S.PARKED, ()),
        (replace(COPY, memory=Memory.BOTH, promise=Promise.ARRIVES), S.ACTIVATING, (G0,)),
        (replace(COPY, memory=Memory.BOTH, promise=Promise.ARRIVES, copied=G1), S.MIGRATING, (G0,)),
        (replace(RUNS, memory=Memory.BOTH, promise=Promise.ENDS), S.LOST, (G0,)),
        (replace(COPY, places=(G0, G1), promise=Promise.ENDS), S.LOST, ()),
        (replace(RUNS, promise=Promise.HANDS_OFF), S.QUARANTINED, (G0,)),
        (replace(RUNS, places=(G0, G1), promise=Promise.HANDS_OFF), S.QUARANTINED, ()),
        (replace(RUNS, owner=Owner.LEAVING), S.RELEASING, (G0,)),
        (replace(COPY, owner=Owner.LEAVING), S.RELEASING, ()),
        (replace(WAITS, owner=Owner.LEAVING, ticket=Ticket.OPEN), S.RELEASING, (G0,)),
    ],
)
def test_what_a_seat_is_and_holds_by_its_facts(facts: Facts, state: S, held: tuple[object, ...]) -> None:
    assert (state_of(facts), holds(facts), check(facts)) == (state, held, "")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(RUNS, owner=Owner.NONE), "without an owner"),
        (replace(RUNS, memory=Memory.NOTHING), "memory without a process"),
        (replace(WAITS, memory=Memory.COPY), "memory without a process"),
        (replace(WAITS, promise=Promise.PARKS), "without a process has a promise"),
        (replace(COPY, promise=Promise.DRAINS), "a copy leaves"),
        (replace(RUNS, life=Life.LOADS, promise=Promise.DRAINS), "does not run"),
        (replace(RUNS, promise=Promise.COMES), "no copy"),
        (replace(RUNS, places=(G0, G1)), "several places"),
        (replace(RUNS, ticket=Ticket.FEARED), "beside a process"),
    ],
)
def test_facts_that_cannot_be_true_together(facts: Facts, says: str) -> None:
    assert says in check(facts)


def test_a_state_that_the_facts_contradict_is_noticed(world: World) -> None:
    _, b = world.fill("a", "b")
    assert contradictions(world.node) == []

    world.managed(b).lease = False
    assert contradictions(world.node) == [f"{b} is active, and parked by its facts"]
    world.managed(b).state = S.PARKED

    assert contradictions(world.node) == []


@pytest.mark.parametrize("half", ["park", "activate"])
def test_a_seat_whose_job_finds_its_processes_gone_has_no_process(world: World, half: str) -> None:
    a, b, job = switch_under_way(world)

    world.progress(job, "gone" if half == "park" else "parked", "gone" if half == "activate" else "active")

    ended = b if half == "park" else a
    assert (world.state(ended), world.managed(ended).durable.seen_running) == (S.BACKOFF, False)
