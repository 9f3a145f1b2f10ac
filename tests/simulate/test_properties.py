"""What holds for every scenario and every policy, however senseless."""

import math
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from kybernate.lab.simulate.engine import RunOptions, SimulationError, run
from kybernate.lab.simulate.model import Outcome, Scenario, SimGroup, SimSeat, check
from kybernate.policy import POLICIES, Decision, GroupView, Park, Policy, Stay, Switch
from kybernate.seat import SeatState
from tests.simulate.cases import Impatient

SECONDS = st.floats(0.0, 20.0)


@dataclass(frozen=True)
class Erratic:
    """Does anything that its view lets it, by a number derived from the view; also what cannot be done."""

    seed: int

    def decide(self, view: GroupView) -> Decision:
        wanted = sorted((s for s in (*view.seats, *view.elsewhere) if s.wait_seconds is not None), key=lambda s: s.turn)
        chance = crc32(f"{self.seed} {view.now:.3f} {view.group} {len(wanted)}".encode()) % 8
        holders = view.holders()
        if chance == 0 and holders:
            return Park(holders[0].seat, "")
        if not wanted or (chance == 1 and holders):
            return Stay(1.0 + chance, "")
        if len(holders) < view.slots and chance != 2:
            return Switch(wanted[chance % len(wanted)].seat, None, "")
        victim = view.seats[chance % len(view.seats)] if view.seats else None
        if victim is None or victim.state is not SeatState.ACTIVE:
            return Stay(0.5, "") if holders else Switch(wanted[0].seat, None, "")
        return Switch(wanted[chance % len(wanted)].seat, victim.seat, "")


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    groups = draw(st.integers(1, 3))
    pins = draw(st.sampled_from([0, 0, 1, 2]))
    homes = [f"G{draw(st.integers(0, groups - 1))}" for _ in range(draw(st.integers(1, 6)))]
    seats = tuple(
        SimSeat(
            f"s{index}",
            home,
            draw(st.floats(0.1, 5.0)),
            draw(st.floats(0.1, 5.0)),
            vram_bytes=10,
            host_bytes=draw(st.integers(0, 10)),
            tier=draw(st.sampled_from(["gold", "bronze"])),
            weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
            pinned=index < pins and draw(st.booleans()),
        )
        for index, home in enumerate(homes)
    )
    rows = draw(st.lists(st.tuples(st.floats(0.0, 200.0), st.integers(0, len(seats) - 1), SECONDS), max_size=40))
    rows.sort()
    made = Scenario(
        "drawn",
        seats,
        tuple(
            SimGroup(f"G{index}", draw(st.integers(1, 2)), draw(st.sampled_from([0, 15, 30])))
            for index in range(groups)
        ),
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        tuple(row[2] for row in rows),
        200.0,
        cap=draw(st.integers(1, 4)),
        move_seconds=draw(st.sampled_from([None, 0.0, 3.0])),
        host_bytes=draw(st.sampled_from([0, 25])),
    )
    try:
        check(made)
    except ValueError:  # pins that leave no room for the others
        reject()
    return made


OPTIONS = st.builds(
    RunOptions,
    seed=st.integers(0, 3),
    jitter=st.sampled_from([0.0, 0.3]),
    park_failure=st.sampled_from([0.0, 0.3]),
    restore_failure=st.sampled_from([0.0, 0.3]),
    slowdown=st.sampled_from([(), ((1.0, 1.0), (4.0, 2.0))]),
    refresh_seconds=st.sampled_from([0.0, 1.0]),
)
POLICY: st.SearchStrategy[Policy] = st.one_of(
    st.builds(Erratic, st.integers(0, 100)),
    st.builds(Impatient),
    st.sampled_from(sorted(POLICIES)).map(lambda name: POLICIES[name]()),
)


@settings(derandomize=True)
@given(scenarios(), POLICY, OPTIONS)
def test_whatever_is_decided_each_request_is_served_once_and_slots_are_never_exceeded(
    scenario: Scenario, policy: Policy, options: RunOptions
):
    try:
        outcome = run(scenario, policy, options)
    except SimulationError:
        if not isinstance(policy, Impatient):  # it may evict two seats by turns for ever; no other policy may fail
            raise
        return
    each_request_ends_once(scenario, outcome, options)
    holders_fit(scenario, outcome)
    visits_add_up(scenario, outcome)
    assert run(scenario, policy, options) == outcome


def each_request_ends_once(scenario: Scenario, outcome: Outcome, options: RunOptions) -> None:
    assert len(outcome.wait) == len(outcome.finished) == len(scenario.at)
    for at, service, wait, end in zip(scenario.at, scenario.service, outcome.wait, outcome.finished, strict=True):
        assert wait >= 0
        least = at + wait + service
        assert end >= least - 1e-4
        if not options.slowdown:
            assert end == pytest.approx(least, abs=1e-4)  # nothing is served twice, nothing is left out
    assert outcome.ended == max(outcome.finished, default=0.0)


def holders_fit(scenario: Scenario, outcome: Outcome) -> None:
    for group in scenario.groups:
        changes = []
        for visit in outcome.visits:
            if visit.group == group.name:
                size = scenario.seats[visit.seat].vram_bytes
                changes += [(visit.begun, 1, 1, size), (visit.gone, 0, -1, -size)]
        held = memory = 0
        for _, _, slot, size in sorted(changes):
            held, memory = held + slot, memory + size
            assert held <= group.slots
            assert not group.memory_bytes or group.slots == 1 or memory <= group.memory_bytes


def visits_add_up(scenario: Scenario, outcome: Outcome) -> None:
    """A seat is in one place at a time; requests are admitted only during visits; moves are counted."""
    assert sum(visit.served for visit in outcome.visits) == len(scenario.at)
    for index in range(len(scenario.seats)):
        visits = [visit for visit in outcome.visits if visit.seat == index]
        for earlier, later in pairwise(visits):
            assert earlier.gone <= later.begun
            assert earlier.begun < earlier.active <= earlier.closed <= earlier.gone
            assert later.moved == (earlier.group != later.group)
        admitted = [
            at + wait for at, seat, wait in zip(scenario.at, scenario.seat, outcome.wait, strict=True) if seat == index
        ]
        for moment in admitted:
            # While a park that fails is tried again, admission opens between two closings of one visit.
            assert any(visit.active - 1e-6 <= moment <= visit.gone for visit in visits)
    begun = sum(visit.begun < math.inf for visit in outcome.visits)
    assert begun <= outcome.counters["switches"]
    if scenario.move_seconds is None:
        assert outcome.counters["moves"] == 0
