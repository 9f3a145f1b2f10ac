"""Seeded bugs: each removes one decision of the product, and the exploration must find it.

A control is a context in which the product has the bug. The configuration is the one in which the decision matters;
``faults`` is the share of faults. Reasons for each: issue texts and the decisions in docs/dev/decisions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from kybernate.messages import AskJobs
from services.gpu_manager.core import demand, recovery, reports, view
from services.gpu_manager.core.riders.rehearsal import Rehearsals
from services.router.core.trust import TRUST_SECONDS
from tests.exploration.router import Router
from tests.exploration.search import Chaos, Found, Totals, random_run
from tests.exploration.world import SHAPES, Setup

Bug = Callable[[], Any]


@dataclass(frozen=True)
class Control:
    """One seeded bug. ``says``: words of the broken promise that the exploration reports."""

    name: str
    bug: Bug
    shapes: str
    says: str
    faults: float = 0.1
    focus: tuple[str, ...] = ()
    """Actions that happen more often, by their beginning or end: those without which the decision never matters."""
    warm: float = 1.0
    """Share of runs that begin when every seat has served."""
    moved: float = 0.0
    """Share of those in which seats have moved then."""
    runs: int = 60
    """Random runs of 600 actions in which it is found."""
    routers: int = 1
    found: int = 0
    """Seed of the run that found it; the test begins there."""


def _slots_are_not_counted() -> Any:
    room = view.room

    def without_slots(node: Any, seat: Any, **options: Any) -> bool:
        group = options.get("on") or seat.group
        with mock.patch.object(type(group), "slots", 9, create=True):
            return room(node, seat, **options)

    return mock.patch.object(view, "room", without_slots)


def _memory_is_not_counted() -> Any:
    return mock.patch.object(view, "fit_together", return_value=True)


def _a_rehearsal_is_over_when_it_begins() -> Any:
    rehearsed = Rehearsals.before_serving
    return mock.patch.object(
        Rehearsals,
        "before_serving",
        lambda self, node, seat, now: bool(seat.rehearsal) or rehearsed(self, node, seat, now),
    )


def _the_seat_folder_is_not_read() -> Any:
    return mock.patch.object(recovery, "open_tickets", return_value=())


def _a_seat_without_ledger_is_at_home() -> Any:
    place = view.place
    return mock.patch.object(view, "place", lambda node, seat, seen, **how: place(node, seat, seen, **how) or seat.home)


def _a_start_does_not_fence() -> Any:
    ask = recovery.ask

    def unfenced(node: Any, begun: Any, now: Any) -> None:
        ask(node, begun, now)
        node.effects[:] = [
            one.model_copy(update={"epoch": 0}) if isinstance(one, AskJobs) else one for one in node.effects
        ]

    return mock.patch.object(recovery, "ask", unfenced)


@contextmanager
def _drains_are_skipped() -> Iterator[None]:
    received = reports.on_engine_answer
    with (
        mock.patch.object(demand.Routers, "quiet", return_value=True),
        mock.patch.object(
            reports, "on_engine_answer", lambda node, answer, now: received(node, replace(answer, running=0), now)
        ),
    ):
        yield


def _a_router_believes_its_own_server() -> Any:
    """It trusts its roster while its own nats-server answers, as up to f4bbe586."""
    beat = Router.beat

    def echoed(router: Router, manager: str) -> None:
        beat(router, manager)
        wall = router.clock.wall
        for lease in router.traffic.trust._leases.values() if router.up else ():
            if lease.unbroken and wall < lease.until:
                lease.until = wall + TRUST_SECONDS

    return mock.patch.object(Router, "beat", echoed)


def _a_park_counts_when_it_begins() -> Any:
    received = reports._on_victim_progress

    def early(node: Any, of: Any, seat: Any, progress: Any, now: Any) -> None:
        done = progress.model_copy(update={"outcome": "parked"}) if progress.outcome == "started" else progress
        received(node, of, seat, done, now)

    return mock.patch.object(reports, "_on_victim_progress", early)


def _a_switch_is_not_adopted() -> Any:
    return mock.patch.object(recovery, "_adopt")


SECOND = "second engine"
LOST = ("crash-manager", " ledger")
CONTROLS = (
    Control("slots are not counted", _slots_are_not_counted, "three", "", 0.0, warm=0.0, found=1),
    Control("memory is not counted", _memory_is_not_counted, "packed", "", 0.0, warm=0.0, found=1),
    Control(
        "a rehearsal is over when it begins", _a_rehearsal_is_over_when_it_begins, "packed", "", 0.02, warm=0.0, found=3
    ),
    Control("the seat folder is not read", _the_seat_folder_is_not_read, "one", SECOND, focus=LOST, warm=0.0, found=22),
    Control(
        "a seat of a pool without ledger is at home",
        _a_seat_without_ledger_is_at_home,
        "moves",
        SECOND,
        focus=(*LOST, "silent"),
        moved=1.0,
        found=1,
    ),
    Control(
        "a start does not fence",
        _a_start_does_not_fence,
        "three",
        "had fenced",
        0.05,
        focus=("call", "finish", "crash-manager"),
        found=6,
    ),
    Control("a park counts when it begins", _a_park_counts_when_it_begins, "one", "", 0.0),
    Control("a switch is not adopted", _a_switch_is_not_adopted, "one", "", focus=("crash-manager",), found=5),
    Control("drains are skipped", _drains_are_skipped, "one", "", 0.02),
    Control(
        "a router believes its own nats-server",
        _a_router_believes_its_own_server,
        "one",
        "",
        0.03,
        focus=("part",),
        routers=2,
        found=39,
    ),
)


def search(control: Control, *, first: int = 0) -> Found | None:
    """Random runs with the bug until it is found, from the run with this seed."""
    totals, setup = Totals(), Setup(SHAPES[control.shapes], "impatient", routers=control.routers)
    chaos = Chaos(control.faults, control.focus, settles=False, warm=control.warm, moved=control.moved)
    with control.bug():
        for seed in (*range(first, control.runs), *range(first)):
            found = random_run(seed, setup, totals, length=600, chaos=chaos)
            if found is not None:
                return found
    return None
