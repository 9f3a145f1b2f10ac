"""What a seat is by its facts. Each message of the other tests and of the exploration looks for facts that cannot be
true together."""

from dataclasses import replace
from itertools import product

import pytest

from kybernate.seat import HOLDING
from kybernate.seat import SeatState as S
from scripts.schemas import transitions
from services.gpu_manager.core.facts import (
    TABLE,
    Facts,
    IllegalTransitionError,
    Owner,
    Process,
    Promise,
    Residence,
    Ticket,
    Trigger,
    after,
)
from tests.facts import COLD, COPY, RUNS, WAITS, check, contradictions
from tests.manager.test_mid_switch import switch_under_way
from tests.manager.world import World


@pytest.mark.parametrize(
    ("facts", "state", "held"),
    [
        (Facts(), S.FREE, False),
        (WAITS, S.WAITING, False),
        (replace(WAITS, process=Process.ENDED), S.BACKOFF, False),
        (replace(WAITS, ticket=Ticket.OPEN), S.STARTING, True),
        (replace(WAITS, ticket=Ticket.FORMER, promise=Promise.HANDS_OFF), S.QUARANTINED, True),
        (replace(RUNS, process=Process.LOADS), S.STARTING, True),
        (RUNS, S.ACTIVE, True),
        (replace(RUNS, promise=Promise.DRAINS), S.DRAINING, True),
        (replace(RUNS, promise=Promise.PARKS), S.PARKING, True),
        (replace(RUNS, process=Process.LOADS, promise=Promise.PARKS), S.PARKING, True),
        (COPY, S.PARKED, False),
        (replace(COPY, promise=Promise.ARRIVES), S.ACTIVATING, True),
        (replace(COPY, promise=Promise.MOVES), S.MIGRATING, True),
        (replace(RUNS, promise=Promise.ENDS), S.LOST, True),
        (replace(COPY, unlocated=True, promise=Promise.ENDS), S.LOST, False),
        (replace(COPY, promise=Promise.DROPS), S.PARKED, False),
        (COLD, S.PARKED, False),
        (replace(COLD, ticket=Ticket.OPEN), S.STARTING, True),
        (replace(RUNS, promise=Promise.HANDS_OFF), S.QUARANTINED, True),
        (replace(RUNS, owner=Owner.LEAVING), S.RELEASING, True),
        (replace(COPY, owner=Owner.LEAVING), S.RELEASING, False),
        (replace(WAITS, owner=Owner.LEAVING, ticket=Ticket.OPEN), S.RELEASING, True),
        (replace(COPY, owner=Owner.LEAVING, ticket=Ticket.OPEN), S.RELEASING, True),
    ],
)
def test_what_a_seat_is_and_holds_by_its_facts(facts: Facts, state: S, held: bool) -> None:
    assert (facts.state, facts.holds, check(facts)) == (state, held, "")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (replace(RUNS, owner=Owner.NONE), "without an owner"),
        (replace(WAITS, residence=Residence.RAM), "memory ram with process none"),
        (replace(WAITS, residence=Residence.VRAM), "memory vram with process none"),
        (replace(RUNS, residence=Residence.NOWHERE), "memory nowhere with process runs"),
        (replace(RUNS, residence=Residence.DISK), "memory disk with process runs"),
        (replace(COPY, process=Process.LOADS), "memory ram with process loads"),
        (replace(RUNS, promise=Promise.DROPS), "dropped that is none"),
        (replace(WAITS, promise=Promise.PARKS), "without a process has a promise"),
        (replace(COPY, promise=Promise.DRAINS), "a copy leaves"),
        (replace(RUNS, promise=Promise.ARRIVES), "comes back"),
        (replace(RUNS, process=Process.LOADS, promise=Promise.DRAINS), "does not run"),
        (replace(RUNS, unlocated=True), "several places"),
        (replace(COPY, ticket=Ticket.OPEN, promise=Promise.ARRIVES), "beside a switch"),
    ],
)
def test_facts_that_cannot_be_true_together(facts: Facts, says: str) -> None:
    assert says in check(facts)


LEGAL = [
    facts
    for values in product(Owner, Process, Residence, Ticket, Promise)
    if not check(facts := Facts(*values)) and (facts.alive or facts.waits or facts.state is not S.LOST)
]
"""Without what was killed and is proven gone: it is ``gone`` with the same message."""


@pytest.mark.parametrize("trigger", Trigger)
def test_what_can_happen_leads_to_no_facts_that_exclude_each_other(trigger: Trigger) -> None:
    listed = [facts for facts in LEGAL if facts.acts_as in TABLE[trigger][0]]
    if trigger is Trigger.NO_PROCESS:
        listed = [facts for facts in listed if not facts.alive]
    assert listed
    assert {check(after(facts, trigger)): facts for facts in listed if check(after(facts, trigger))} == {}


@pytest.mark.parametrize(
    ("facts", "trigger"),
    [
        (COPY, Trigger.TICKET),
        *((COLD, one) for one in (Trigger.LEASE, Trigger.REMAP, Trigger.WOKE, Trigger.EMPTIED)),
    ],
)
def test_a_switch_brings_what_is_kept_and_a_ticket_what_is_not(facts: Facts, trigger: Trigger) -> None:
    assert (facts.acts_as is S.PARKED, facts.acts_as is S.WAITING) == (facts is COPY, facts is COLD)
    with pytest.raises(IllegalTransitionError):
        after(facts, trigger)


@pytest.mark.parametrize("promise", [Promise.ARRIVES, Promise.MOVES])
@pytest.mark.parametrize("trigger", [Trigger.VERIFIED, Trigger.QUARANTINE, Trigger.DELETED, Trigger.NOT_RESTORED])
def test_what_was_coming_back_holds_its_gpus_unless_it_is_known_to_be_where_it_was(
    trigger: Trigger, promise: Promise
) -> None:
    found = after(replace(COPY, promise=promise), trigger)
    known = Residence.RAM if trigger is Trigger.NOT_RESTORED else Residence.VRAM
    assert (found.residence, found.holds) == (known, known is Residence.VRAM)


PAIRS = transitions()


def test_what_follows_depends_on_the_state_alone() -> None:
    several = {pair: states for pair, states in PAIRS.items() if len(states) > 1}
    assert several == {
        (S.STARTING, Trigger.NO_PROCESS): {S.WAITING, S.PARKED},
        (S.PARKING, Trigger.ROLLED_BACK): {S.ACTIVE, S.STARTING},
    }
    assert {pair[1] for pair in PAIRS} == {*Trigger}


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("state", S)
def test_what_the_table_does_not_list_is_refused(state: S, trigger: Trigger) -> None:
    facts = next(facts for facts in ALL if facts.state is state)
    if (state, trigger) in PAIRS:
        alike = [facts for facts in ALL if facts.state is state and facts.acts_as in TABLE[trigger][0]]
        facts = alike[-1] if trigger is Trigger.NO_PROCESS else alike[0]
        assert after(facts, trigger).state in PAIRS[state, trigger]
        return
    with pytest.raises(IllegalTransitionError, match=f"a {state} seat cannot take {trigger}$"):
        after(facts, trigger)


ALL = [
    Facts(),
    WAITS,
    *(replace(RUNS, promise=promise) for promise in Promise),
    COPY,
    COLD,
    *(replace(WAITS, process=process) for process in Process),
    replace(WAITS, ticket=Ticket.OPEN),
    replace(RUNS, owner=Owner.LEAVING),
]


def reached_from(start: S) -> set[S]:
    found, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        fresh = {one for (state, _), states in PAIRS.items() if state is here for one in states} - found
        found |= fresh
        waiting += fresh
    return found


@pytest.mark.parametrize("state", S)
def test_every_state_is_reached_and_leads_to_free_and_to_active(state: S) -> None:
    assert state in reached_from(S.FREE)
    assert {S.FREE, S.ACTIVE} <= reached_from(state)


def test_gpus_are_taken_only_by_a_grant_or_by_memory_that_is_found() -> None:
    taking = {t for (before, t), states in PAIRS.items() if before not in HOLDING and states & HOLDING}
    assert taking == {Trigger.TICKET, Trigger.LEASE, Trigger.REMAP, Trigger.WOKE, Trigger.FOUND}


def test_only_what_is_listed_ends_a_hold_of_a_process() -> None:
    freeing = {t for (before, t), states in PAIRS.items() if before in HOLDING and not states & {*HOLDING, S.RELEASING}}
    assert freeing == {
        Trigger.EVIDENCE,
        Trigger.EMPTIED,
        Trigger.NOT_RESTORED,
        Trigger.NO_PROCESS,
        Trigger.EXITED,
        Trigger.GONE,
        Trigger.CLEARED_PARKED,
    }


def test_facts_that_no_switch_explains_are_noticed(world: World) -> None:
    _, b = world.fill("a", "b")
    assert contradictions(world.node) == []

    world.managed(b).know(replace(COPY, promise=Promise.ARRIVES))

    assert contradictions(world.node) == [f"{b} (activating): comes back without a switch"]


def test_facts_of_another_state_are_not_learned_without_an_event(world: World) -> None:
    _, b = world.fill("a", "b")
    with pytest.raises(AssertionError, match="without an event"):
        world.managed(b).learn(residence=Residence.RAM)


@pytest.mark.parametrize("half", ["park", "activate"])
def test_a_seat_whose_job_finds_its_processes_gone_has_no_process(world: World, half: str) -> None:
    a, b, job = switch_under_way(world)

    world.progress(job, "gone" if half == "park" else "parked", "gone" if half == "activate" else "active")

    ended = b if half == "park" else a
    assert (world.state(ended), world.managed(ended).facts.alive) == (S.BACKOFF, False)
