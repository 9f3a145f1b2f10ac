"""Every row of the failure table, and every interrupted prefix."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.checkpointer.core.failures import RULES, JobGoal, ProcessState, Remedy, StepTrouble, Verb
from services.checkpointer.core.procedure import End, Procedure, replay_goal
from tests.checkpointer.sim import Fault, Sim, run

V, T = Verb, StepTrouble
R, L, C, F, G = (
    ProcessState.RUNNING,
    ProcessState.LOCKED,
    ProcessState.CHECKPOINTED,
    ProcessState.FAILED,
    ProcessState.GONE,
)


def verbs(sim: Sim) -> list[tuple[Verb, int | None]]:
    return [(step.verb, step.member) for step in sim.done if step.verb is not V.STATE]


def ends(sim: Sim, goal: JobGoal, **more: Any) -> End:
    return run(sim.procedure(goal, **more), sim)


def park(*faults: Fault, members: int = 3) -> tuple[End, Sim]:
    sim = Sim([R] * members, faults=list(faults))
    return ends(sim, JobGoal.PARKED), sim


def activate(*faults: Fault, members: int = 3, room: bool = True) -> tuple[End, Sim]:
    sim = Sim([C] * members, frozen=True, faults=list(faults), room=room)
    return ends(sim, JobGoal.ACTIVE), sim


def test_a_park_checks_then_locks_all_then_checkpoints_each_then_proves_then_freezes() -> None:
    end, sim = park(members=2)
    assert end == End("parked")
    assert verbs(sim) == [
        (V.CHECKS, None),
        (V.HEADROOM, None),
        (V.LOCK, 0),
        (V.LOCK, 1),
        (V.CHECKPOINT, 0),
        (V.CHECKPOINT, 1),
        (V.EVIDENCE, None),
        (V.FREEZE, None),
    ]


def test_an_activation_waits_for_room_thaws_restores_all_then_unlocks_all() -> None:
    end, sim = activate(members=2)
    assert end == End("active")
    assert verbs(sim) == [
        (V.ROOM, None),
        (V.THAW, None),
        (V.RESTORE, 0),
        (V.RESTORE, 1),
        (V.UNLOCK, 0),
        (V.UNLOCK, 1),
        (V.VERIFY, None),
    ]


WHOLE = {"parked": ({C}, True), "active": ({R}, False)}
REFUSED = Fault(V.RESTORE, T.REFUSED, member=2)
ENDINGS: dict[str, tuple[Callable[..., tuple[End, Sim]], str, list[Fault]]] = {
    "lock-hung-and-took-effect": (park, "active", [Fault(V.LOCK, T.HUNG, member=1, lands=True)]),
    "second-hang": (park, "quarantined", [Fault(V.LOCK, T.HUNG, member=1), Fault(V.STATE, T.HUNG, member=1)]),
    "helper-dies": (park, "quarantined", [Fault(verb, T.HELPER_DIED, times=99) for verb in (V.LOCK, V.STATE)]),
    "dies-in-a-lock": (park, "lost", [Fault(V.LOCK, T.GONE, member=1, becomes=G)]),
    "checkpoint-failed": (park, "lost", [Fault(V.CHECKPOINT, T.OPERATING_SYSTEM, member=1, becomes=F)]),
    "checkpoint-hangs-twice": (park, "quarantined", [Fault(V.CHECKPOINT, T.HUNG, member=1, times=2)]),
    "memory-does-not-fall": (park, "active", [Fault(V.EVIDENCE, T.REFUSED)]),
    "b5-slow-reading-of-room": (activate, "parked", [Fault(V.ROOM, T.SLOW)]),
    "restore-refused": (activate, "parked", [REFUSED]),
    "restore-not-ready": (activate, "parked", [Fault(V.RESTORE, T.NOT_READY, member=2)]),
    "restore-failed": (activate, "lost", [Fault(V.RESTORE, T.REFUSED, member=2, becomes=F)]),
    "no-memory-for-the-copies": (activate, "lost", [REFUSED, Fault(V.HEADROOM, T.REFUSED, times=9)]),
    "helper-died-and-restored": (activate, "active", [Fault(V.RESTORE, T.HELPER_DIED, member=0, lands=True)]),
    "hung-and-restored": (activate, "active", [Fault(V.RESTORE, T.HUNG, member=0, lands=True)]),
    "unlocked-in-spite-of-an-error": (activate, "active", [Fault(V.UNLOCK, T.REFUSED, member=1, lands=True)]),
    "unlocked-at-last": (activate, "active", [Fault(V.UNLOCK, T.REFUSED, member=1, times=3)]),
    "never-unlocked": (activate, "lost", [Fault(V.UNLOCK, T.REFUSED, member=1, times=4)]),
    "cannot-be-killed": (
        activate,
        "quarantined",
        [Fault(V.RESTORE, T.OUT_OF_MEMORY, member=0, becomes=F), Fault(V.KILL, T.REFUSED)],
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_after_a_fault_a_seat_is_whole_starts_cold_or_is_quarantined(case: str) -> None:
    half, outcome, faults = ENDINGS[case]
    end, sim = half(*map(replace, faults))
    assert end.outcome == outcome
    assert sim.killed == (outcome == "lost")
    if outcome in WHOLE:
        assert (set(sim.states), sim.frozen) == WHOLE[outcome]


@pytest.mark.parametrize("trouble", [T.NOT_READY, T.REFUSED, T.OUT_OF_MEMORY, T.OPERATING_SYSTEM, T.HUNG])
def test_a_lock_that_fails_unlocks_those_before_it_in_reverse(trouble: StepTrouble) -> None:
    end, sim = park(Fault(V.LOCK, trouble, member=2))
    assert end.outcome == "active"
    assert str(trouble) in end.reason
    assert verbs(sim)[-3:] == [(V.UNLOCK, 1), (V.UNLOCK, 0), (V.VERIFY, None)]
    assert sim.states == [R, R, R]


@pytest.mark.parametrize("trouble", [T.NOT_READY, T.REFUSED, T.OUT_OF_MEMORY, T.OPERATING_SYSTEM, T.HUNG])
@pytest.mark.parametrize("verb", [V.CHECKS, V.HEADROOM])
def test_a_refusal_before_a_park_leaves_the_seat_running_and_untouched(verb: Verb, trouble: StepTrouble) -> None:
    if (verb, trouble) == (V.HEADROOM, T.HUNG):
        return  # it makes no driver call
    end, sim = park(Fault(verb, trouble))
    assert (end.outcome, sim.states) == ("active", [R, R, R])
    assert str(verb) in end.reason
    assert not {V.LOCK, V.FREEZE} & {one for one, _ in verbs(sim)}


@pytest.mark.parametrize("trouble", [T.REFUSED, T.HUNG, T.OPERATING_SYSTEM])
def test_a_move_that_cannot_be_leaves_the_seat_parked_and_frozen(trouble: StepTrouble) -> None:
    sim = Sim([C], frozen=True, faults=[Fault(V.MAP, trouble)])
    end = ends(sim, JobGoal.ACTIVE, moving=True)
    assert (end.outcome, sim.states, sim.frozen) == ("parked", [C], True)
    assert not {V.THAW, V.RESTORE, V.ROOM} & {one for one, _ in verbs(sim)}


def test_the_map_of_a_move_is_built_before_the_room_is_reserved() -> None:
    sim = Sim([C], frozen=True)
    end = run(sim.procedure(JobGoal.ACTIVE, moving=True), sim)
    assert end == End("active")
    assert [verb for verb, _ in verbs(sim)] == [V.MAP, V.ROOM, V.THAW, V.RESTORE, V.UNLOCK, V.VERIFY]


def test_a_seat_of_which_only_a_part_has_moved_starts_cold_since_its_copies_would_belong_to_two_groups() -> None:
    sim = Sim([C, C], frozen=True, faults=[Fault(V.RESTORE, T.REFUSED, member=1)])
    end = ends(sim, JobGoal.ACTIVE, moving=True)
    assert (end.outcome, sim.killed) == ("lost", True)
    sim = Sim([C, C], frozen=True, faults=[Fault(V.RESTORE, T.REFUSED, member=0)])
    end = ends(sim, JobGoal.ACTIVE, moving=True)
    assert (end.outcome, sim.states) == ("parked", [C, C])


def test_a_restore_that_was_reported_as_failed_and_took_effect_is_no_failure() -> None:
    end, sim = activate(Fault(V.RESTORE, T.REFUSED, member=0, lands=True), members=1)
    assert (end.outcome, sim.states) == ("active", [R])
    assert V.CHECKPOINT not in [verb for verb, _ in verbs(sim)]


def test_a_hang_after_one_in_an_earlier_half_is_quarantine_at_once() -> None:
    sim = Sim([R], faults=[Fault(V.LOCK, T.HUNG)])
    end = ends(sim, JobGoal.PARKED, hangs=1)
    assert (end.outcome, "second hang" in end.reason) == ("quarantined", True)
    sim = Sim([R])
    assert run(sim.procedure(JobGoal.PARKED, hangs=2), sim) == End("parked"), (
        "without a hang nothing is held against it"
    )


@pytest.mark.parametrize("trouble", [T.REFUSED, T.OUT_OF_MEMORY, T.OPERATING_SYSTEM, T.NOT_READY])
def test_b4_a_checkpoint_that_fails_is_a_cold_start_since_its_contexts_may_be_dead(trouble: StepTrouble) -> None:
    end, sim = park(Fault(V.CHECKPOINT, trouble, member=2))
    assert (end.outcome, sim.killed) == ("lost", True)
    assert verbs(sim)[8:] == [(V.CHECKPOINT, 2), (V.KILL, None)], "tried once more: a kill is safer of what is parked"


def attached(states: list[ProcessState], goal: JobGoal, *faults: Fault, frozen: bool = False) -> tuple[End, Sim]:
    """Member 0 is attached (an API server), member 1 a holder, member 2 attached."""
    sim = Sim(states, frozen=frozen, faults=list(faults), attached=frozenset({0, 2}))
    return ends(sim, goal), sim


def test_b1_attached_processes_are_locked_and_checkpointed_with_the_holder_and_restored_before_it() -> None:
    end, sim = attached([R, R, R], JobGoal.PARKED)
    assert (end, sim.states) == (End("parked"), [C, C, C])
    end, sim = attached([C, C, C], JobGoal.ACTIVE, frozen=True)
    assert end == End("active")
    assert [member for verb, member in verbs(sim) if verb is V.RESTORE] == [0, 2, 1]


def test_b1_an_attached_process_that_is_gone_or_not_initialized_is_left_out() -> None:
    end, sim = attached([R, R, R], JobGoal.PARKED, Fault(V.LOCK, T.GONE, member=0, becomes=G))
    assert (end, sim.states) == (End("parked"), [G, C, C])
    end, sim = attached([G, C, C], JobGoal.ACTIVE, frozen=True)
    assert (end.outcome, sim.states, sim.killed) == ("active", [G, R, R], False)
    end, sim = attached([R, R, R], JobGoal.PARKED, Fault(V.LOCK, T.GONE, member=1, becomes=G))
    assert end.outcome == "lost", "the holder is the engine"


def test_b1_an_attached_process_that_cannot_be_restored_moves_no_memory_and_the_second_time_condemns() -> None:
    """A forked child keeps a stale context: INVALID_VALUE at each restore (vLLM #42873)."""
    end, sim = attached([C, C, C], JobGoal.ACTIVE, Fault(V.RESTORE, T.REFUSED, member=2), frozen=True)
    assert (end.outcome, sim.states) == ("parked", [C, C, C])
    assert (V.RESTORE, 1) not in verbs(sim)
    sim = Sim([C, C, C], frozen=True, faults=[Fault(V.RESTORE, T.REFUSED, member=2)], attached=frozenset({0, 2}))
    again = sim.procedure(JobGoal.ACTIVE)
    again.refusals = 1
    found = run(again, sim)
    assert (found.outcome, sim.killed) == ("lost", True)


@pytest.mark.parametrize("verb", [V.CHECKS, V.EVIDENCE])
def test_b5_a_slow_reading_is_no_hang_of_the_seat(verb: Verb) -> None:
    for hangs in (0, 1):
        sim = Sim([R], faults=[Fault(verb, T.SLOW)])
        end = ends(sim, JobGoal.PARKED, hangs=hangs)
        assert end.outcome == ("active" if verb is V.CHECKS else "parked"), (hangs, end)


@pytest.mark.parametrize("trouble", [T.HELPER_DIED, T.HUNG])
def test_a_helper_that_dies_in_a_checkpoint_leaves_the_driver_to_finish_it(trouble: StepTrouble) -> None:
    end, sim = park(Fault(V.CHECKPOINT, trouble, member=1, lands=True))
    assert end == End("parked", end.reason)
    assert verbs(sim).count((V.CHECKPOINT, 1)) == 1


def test_no_room_for_a_rollback_means_a_foreign_process_and_quarantine() -> None:
    end, sim = park(Fault(V.EVIDENCE, T.REFUSED), Fault(V.ROOM, T.REFUSED, times=9))
    assert end.outcome == "quarantined"
    assert V.RESTORE not in [verb for verb, _ in verbs(sim)]


def test_no_room_leaves_the_seat_parked_and_frozen() -> None:
    end, sim = activate(room=False)
    assert (end.outcome, sim.states, sim.frozen) == ("parked", [C, C, C], True)
    assert V.RESTORE not in [verb for verb, _ in verbs(sim)]
    assert V.THAW not in [verb for verb, _ in verbs(sim)]


@pytest.mark.parametrize("trouble", [T.OUT_OF_MEMORY, T.OPERATING_SYSTEM])
def test_a_restore_without_memory_is_terminal(trouble: StepTrouble) -> None:
    end, sim = activate(Fault(V.RESTORE, trouble, member=1, becomes=F))
    assert end.outcome == "lost"
    assert verbs(sim).count((V.RESTORE, 1)) == 1, "never restored again"
    assert verbs(sim)[-2:] == [(V.CHECKPOINT, 0), (V.KILL, None)], "what was restored is checkpointed before the kill"


def test_the_room_is_looked_at_again_before_a_restore_that_hung_is_repeated() -> None:
    end, sim = activate(Fault(V.RESTORE, T.HUNG), members=1)
    assert end.outcome == "active"
    assert [verb for verb, _ in verbs(sim)] == [V.ROOM, V.THAW, V.RESTORE, V.ROOM, V.RESTORE, V.UNLOCK, V.VERIFY]


def test_the_evidence_is_read_again_after_a_step_that_failed() -> None:
    end, sim = park(Fault(V.FREEZE, T.HELPER_DIED), members=1)
    assert end.outcome == "parked"
    assert [verb for verb, _ in verbs(sim)][-4:] == [V.EVIDENCE, V.FREEZE, V.EVIDENCE, V.FREEZE]


@pytest.mark.parametrize("trouble", [T.OUT_OF_MEMORY, T.OPERATING_SYSTEM])
def test_a_restore_without_memory_is_not_repeated_even_where_the_driver_reports_a_parked_process(
    trouble: StepTrouble,
) -> None:
    end, sim = activate(Fault(V.RESTORE, trouble), members=1)
    assert end.outcome == "lost"
    assert verbs(sim).count((V.RESTORE, 0)) == 1


def test_a_kill_locks_and_checkpoints_what_runs_first() -> None:
    sim = Sim([R, C, F])
    end = run(Procedure(JobGoal.DEAD, list(sim.states)), sim)
    assert end == End("lost")
    assert verbs(sim) == [(V.LOCK, 0), (V.CHECKPOINT, 0), (V.KILL, None)]


def test_a_kill_first_reads_the_states_and_leaves_parked_processes_frozen() -> None:
    sim = Sim([R, C])
    assert run(sim.procedure(JobGoal.DEAD), sim) == End("lost")
    assert verbs(sim) == [(V.LOCK, 0), (V.CHECKPOINT, 0), (V.KILL, None)]
    sim = Sim([C, C], frozen=True)
    assert run(sim.procedure(JobGoal.DEAD), sim) == End("lost")
    assert verbs(sim) == [(V.KILL, None)]


def test_a_kill_goes_on_after_a_refused_lock_or_checkpoint() -> None:
    sim = Sim([R, R], faults=[Fault(V.LOCK, T.HUNG, member=0), Fault(V.CHECKPOINT, T.REFUSED, member=1)])
    end = run(Procedure(JobGoal.DEAD, list(sim.states)), sim)
    assert end.outcome == "lost"


def test_a_seat_without_processes_is_gone() -> None:
    sim = Sim([G, G])
    end = ends(sim, JobGoal.ACTIVE)
    assert end.outcome == "gone"


def test_every_trouble_of_every_step_has_a_row() -> None:
    """Except for a process that is gone, which always means a cold start, and for the kill, which has nothing to
    fall back to."""
    wanted = {
        (verb, trouble) for verb in Verb for trouble in StepTrouble if trouble is not T.GONE and verb is not V.KILL
    }
    assert wanted <= set(RULES)


ENDS = {
    Remedy.REREAD: {"parked", "active"},
    Remedy.RETRY: {"parked", "active"},
    Remedy.ROLL_BACK: {"parked", "active"},
    Remedy.CONDEMN: {"lost"},
    Remedy.QUARANTINE: {"quarantined"},
}


@pytest.mark.parametrize(("verb", "trouble"), RULES, ids=lambda name: str(name).replace(" ", "-"))
def test_every_row_of_the_table_ends_as_its_remedy_says(verb: Verb, trouble: StepTrouble) -> None:
    """Met once, and met for ever; in both halves; with the call's effect and without."""
    for goal, lands, times in itertools.product((JobGoal.PARKED, JobGoal.ACTIVE), (False, True), (1, 99)):
        start, frozen = ([R, R], False) if goal is JobGoal.PARKED else ([C, C], True)
        sim = Sim(start, frozen=frozen, faults=[Fault(verb, trouble, times=times, lands=lands and verb not in LOOKS)])
        end = ends(sim, goal, moving=goal is JobGoal.ACTIVE)
        met = verb in {step.verb for step in sim.done}
        if not met:
            assert end == End(str(goal))  # type: ignore[arg-type]
        elif times == 1:
            assert end.outcome in ENDS[RULES[verb, trouble].remedy], (goal, lands, end)
        if end.outcome in WHOLE:
            assert (set(sim.states), sim.frozen) == WHOLE[end.outcome], (goal, lands, times, end)
        assert end.outcome != "lost" or sim.killed


LOOKS = {V.STATE, V.CHECKS, V.HEADROOM, V.EVIDENCE, V.MAP, V.ROOM, V.VERIFY}


def test_every_rule_names_a_remedy_that_ends() -> None:
    assert {rule.then for rule in RULES.values()} <= {Remedy.CONDEMN, Remedy.QUARANTINE}


@pytest.mark.parametrize(
    ("intent", "states", "goal"),
    [
        (JobGoal.PARKED, [R, R], JobGoal.ACTIVE),
        (JobGoal.PARKED, [L, R], JobGoal.ACTIVE),
        (JobGoal.PARKED, [L, L], JobGoal.ACTIVE),
        (JobGoal.PARKED, [C, L], JobGoal.PARKED),
        (JobGoal.PARKED, [C, R], JobGoal.PARKED),
        (JobGoal.PARKED, [C, C], JobGoal.PARKED),
        (JobGoal.ACTIVE, [C, C], JobGoal.PARKED),
        (JobGoal.ACTIVE, [L, C], JobGoal.ACTIVE),
        (JobGoal.ACTIVE, [L, L], JobGoal.ACTIVE),
        (JobGoal.ACTIVE, [R, L], JobGoal.ACTIVE),
        (JobGoal.ACTIVE, [R, R], JobGoal.ACTIVE),
    ],
)
def test_the_replay_decision(intent: JobGoal, states: list[ProcessState], goal: JobGoal) -> None:
    assert replay_goal(intent, states) is goal
    sim = Sim(list(states))
    end = ends(sim, intent, replaying=True)
    assert end.outcome == str(goal)


@pytest.mark.parametrize("state", [F, G])
def test_a_replay_that_finds_a_dead_member_is_a_cold_start(state: ProcessState) -> None:
    for intent in (JobGoal.PARKED, JobGoal.ACTIVE):
        sim = Sim([C, state])
        end = ends(sim, intent, replaying=True)
        assert end.outcome == "lost"


@pytest.mark.parametrize("goal", [JobGoal.PARKED, JobGoal.ACTIVE])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_every_prefix_replays_to_an_end_and_replaying_twice_gives_the_same(goal: JobGoal, members: int) -> None:
    """Crash after each step, and again after each step of the replay; nothing stays locked or half."""
    start = R if goal is JobGoal.PARKED else C
    length = 0
    while True:
        sim = Sim([start] * members, frozen=goal is JobGoal.ACTIVE)
        if run(sim.procedure(goal), sim, steps=length) is not None:
            break
        crashed = (list(sim.states), sim.frozen)
        end = ends(sim, goal, replaying=True)
        assert end.outcome in ("parked", "active")
        assert set(sim.states) == ({C} if end.outcome == "parked" else {R})
        assert sim.frozen == (end.outcome == "parked")
        again = ends(sim, goal, replaying=True)
        assert again.outcome == end.outcome
        cut = 0
        while True:
            sim = Sim(list(crashed[0]), frozen=crashed[1])
            if run(sim.procedure(goal, replaying=True), sim, steps=cut) is not None:
                break
            second = ends(sim, goal, replaying=True)
            assert second.outcome == end.outcome, f"crash after {length} steps, then after {cut}"
            cut += 1
        length += 1
    assert length > members * 2


@given(data=st.data())
def test_every_sequence_of_failures_comes_to_an_end(data: st.DataObject) -> None:
    """Steps fail at random, with or without effect, and states change in between: the half ends after few steps."""
    goal = data.draw(st.sampled_from([JobGoal.PARKED, JobGoal.ACTIVE, JobGoal.DEAD]))
    states = data.draw(st.lists(st.sampled_from([R, L, C, F, G, ProcessState.UNKNOWN]), min_size=1, max_size=3))
    procedure = Procedure(goal, states, frozen=data.draw(st.booleans()), replaying=data.draw(st.booleans()))
    for _ in range(120):
        step = procedure.next()
        if isinstance(step, End):
            assert step.outcome in ("parked", "active", "lost", "gone", "quarantined")
            return
        if data.draw(st.integers(0, 2)) == 0:
            procedure.failed(step, data.draw(st.sampled_from(list(StepTrouble))))
        else:
            seen = data.draw(st.sampled_from([R, L, C, F, G])) if step.verb is V.STATE else None
            procedure.done(step, seen, killed=1)
    raise AssertionError("no end")


def test_a_gpu_process_that_ends_before_the_first_step_of_a_park_condemns_no_seat() -> None:
    """A short-lived process of an engine: the others keep running, and the next discovery finds the present ones."""
    sim = Sim([R, G])
    end = ends(sim, JobGoal.PARKED)
    assert (end.outcome, sim.states, sim.killed) == ("active", [R, G], False)
    assert "ended" in end.reason
    sim = Sim([G])
    end = ends(sim, JobGoal.PARKED)
    assert end.outcome == "gone"
    sim = Sim([R, G])
    end = ends(sim, JobGoal.PARKED, replaying=True)
    assert end.outcome == "lost", "during a park the cause of its end is unknown"


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(V.UNLOCK, T.REFUSED, times=9)],
        [Fault(V.VERIFY, T.REFUSED, times=9)],
    ],
)
def test_a_condemned_seat_is_locked_and_checkpointed_before_the_kill(faults: list[Fault]) -> None:
    end, sim = activate(*faults, members=1)
    assert end.outcome == "lost"
    assert verbs(sim)[-2:] == [(V.CHECKPOINT, 0), (V.KILL, None)]
