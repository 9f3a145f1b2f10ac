"""A small run of the exploration with fixed seeds, and its negative controls. ``make explore`` runs it for long."""

from unittest import mock

import pytest

from tests.exploration.controls import CONTROLS, Control, search
from tests.exploration.manager import Manager
from tests.exploration.search import Chaos, Totals, explain, random_run, replay, setup_of, shrink
from tests.exploration.world import SHAPES, Setup
from tests.thorough import part

SEEDS = range(8)
"""One of each configuration."""


@pytest.mark.parametrize("seed", part(SEEDS, 3))
def test_no_promise_is_broken_and_every_seat_serves_again(seed: int) -> None:
    totals = Totals()
    found = random_run(seed, setup_of(seed), totals, length=200)
    assert found is None, explain(shrink(found, seconds=20))
    assert totals.starts > 0
    assert totals.steps > 200


FOUND = {
    70048: 0.0,  # a conflict
    80253: 0.0,  # a fence
    20779139: 0.0,  # a start without memory
    20780169: 0.0,  # a heir of a ticket
    20860106: 0.5,  # a ticket for a seat that waits beside one that was found later
    20840091: 0.5,  # a router that knew higher epochs than anything that was left
    20840158: 0.5,  # a copy that kept the lease of its move
    20850168: 0.5,  # a pin that outlasted a quarantine
    20850336: 0.5,  # a job without a seat
    20787111: 0.5,  # two holders that left for one seat
}
"""Seeds whose runs have found a broken promise, and the share of runs with seats that have moved in their time."""


@pytest.mark.timeout(180)  # one of them has 24,000 steps
@pytest.mark.parametrize(("seed", "moved"), part(FOUND.items(), 4))
def test_runs_that_once_found_a_bug_are_kept(seed: int, moved: float) -> None:
    totals = Totals()
    found = random_run(seed, setup_of(seed), totals, chaos=Chaos(moved=moved))
    assert found is None, explain(found)
    assert totals.steps > 2000


FORCED = (
    ("warm",),
    ("force", "m-1x-742563.s00-u1"),
    ("create", "m-1x-742563.s00", "1x-742563.s00"),
    ("time", 280.0),
    ("k-call", "m-1x-742563.s00-u10"),
    ("force", "m-1x-742563.s02-u3"),
    ("crash-manager",),
    ("start-manager", -3600.0, "ledger"),
    ("time", 5.0),
    ("take", "1x-742563.s00"),
    ("start", "m-1x-742563.s00-u10"),
)
"""The engine of s02 runs on, its pod was deleted by force, and the ledger is lost: only the driver knows of it."""


def test_a_manager_that_lost_its_ledger_starts_nothing_beside_an_engine_of_a_pod_deleted_by_force() -> None:
    setup = Setup(SHAPES["one"], "impatient", routers=1)

    assert not replay(setup, FORCED, settled=True)
    with mock.patch.object(Manager, "look_first"):
        assert "second engine on GPU-0" in replay(setup, FORCED, settled=False)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("control", part(CONTROLS, 4), ids=lambda one: one.name)
def test_a_seeded_bug_is_found(control: Control) -> None:
    found = search(control, first=control.found)
    assert found is not None, f"not within {control.runs} runs"
    assert control.says in found.text
    assert not replay(found.setup, found.actions, settled=found.settled), "it is found without the bug, too"


def test_a_found_bug_is_shrunk_to_a_few_actions_that_still_show_it() -> None:
    control = next(one for one in CONTROLS if one.name == "the seat folder is not read")
    with control.bug():
        found = search(control, first=control.found)
        assert found is not None
        short = shrink(found, seconds=3)
        assert len(short.actions) < len(found.actions)
        assert control.says in replay(short.setup, short.actions, settled=short.settled)
        assert "BROKEN" in explain(short)


def test_a_run_is_the_same_every_time() -> None:
    totals = [Totals(), Totals()]
    for one in totals:
        random_run(3, setup_of(3), one, length=200, chaos=Chaos(settles=False))
    assert totals[0].kinds == totals[1].kinds
    assert totals[0].steps == totals[1].steps
