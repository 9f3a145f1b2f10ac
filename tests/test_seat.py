"""The seat table: what it allows and refuses, and that no state is a dead end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.seat import HOLDING, TRANSITIONS, IllegalTransitionError, SeatState, Trigger, advance


@given(st.sampled_from(SeatState), st.sampled_from(Trigger))
def test_a_pair_is_in_the_table_or_is_refused(state: SeatState, trigger: Trigger) -> None:
    before = dict(TRANSITIONS)
    if (state, trigger) in TRANSITIONS:
        assert advance(state, trigger) is TRANSITIONS[state, trigger]
    else:
        with pytest.raises(IllegalTransitionError, match=f"a {state} seat cannot take {trigger}") as refused:
            advance(state, trigger)
        assert (refused.value.state, refused.value.trigger) == (state, trigger)
    assert before == TRANSITIONS


@given(st.lists(st.sampled_from(Trigger), max_size=60))
def test_what_is_refused_changes_nothing(triggers: list[Trigger]) -> None:
    """A seat fed anything at all ends where the legal part of it alone would have brought it."""
    state = SeatState.FREE
    legal = []
    for trigger in triggers:
        try:
            state = advance(state, trigger)
        except IllegalTransitionError:
            continue
        legal.append(trigger)
    again = SeatState.FREE
    for trigger in legal:
        again = advance(again, trigger)
    assert again is state


def reachable(start: SeatState) -> set[SeatState]:
    found, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        for (before, _), after in TRANSITIONS.items():
            if before is here and after not in found:
                found.add(after)
                waiting.append(after)
    return found


def test_every_state_is_reachable_from_free() -> None:
    assert reachable(SeatState.FREE) == set(SeatState)


@pytest.mark.parametrize("state", SeatState)
def test_every_state_leads_to_free_and_to_active(state: SeatState) -> None:
    assert {SeatState.FREE, SeatState.ACTIVE} <= reachable(state)


def test_every_trigger_has_a_use() -> None:
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


@pytest.mark.parametrize("state", sorted(set(SeatState) - {SeatState.FREE, SeatState.RELEASING}))
def test_a_deleted_pod_releases_its_seat_from_any_state(state: SeatState) -> None:
    assert advance(state, Trigger.DELETED) is SeatState.RELEASING


def test_gpus_are_taken_only_by_a_ticket_a_lease_or_a_remap() -> None:
    taking = {t for (before, t), after in TRANSITIONS.items() if before not in HOLDING and after in HOLDING}
    assert taking == {Trigger.TICKET, Trigger.LEASE, Trigger.REMAP}
