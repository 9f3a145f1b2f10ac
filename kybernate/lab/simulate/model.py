"""A scenario and its outcome as plain data: the contract between generators, engine, bounds and reports; and the check
that a scenario can be played. Pure.

Times are model seconds from the beginning of the scenario, durations model seconds.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf


@dataclass(frozen=True, slots=True)
class SimSeat:
    """One seat: what it costs to move it and how it is valued."""

    name: str
    group: str
    """Its home."""
    park_seconds: float
    activate_seconds: float
    vram_bytes: int = 0
    host_bytes: int = 0
    """Host memory that its parked copy takes."""
    model: str = ""
    tier: str = "standard"
    weight: float = 1.0
    slo_seconds: float = 20.0
    pinned: bool = False
    stall_budget_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimGroup:
    """One group of GPUs."""

    name: str
    slots: int = 1
    memory_bytes: int = 0
    """Shared by its seats, where it has several slots; 0: as much as they need."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run's input. The three request columns have equal length; ``at`` does not fall."""

    name: str
    seats: tuple[SimSeat, ...]
    groups: tuple[SimGroup, ...]
    at: tuple[float, ...]
    """Arrival times."""
    seat: tuple[int, ...]
    """Index into ``seats``."""
    service: tuple[float, ...]
    """How long each request is in flight when it is alone."""
    duration: float
    """Window of arrivals; the run goes on until everything that arrived in it has ended."""
    cap: int = 64
    """Requests that one seat serves at the same time; more wait, although it is active."""
    move_seconds: float | None = None
    """Extra cost of activating a seat on another group than the one it was parked on; None: groups are not soft."""
    host_bytes: int = 0
    """Host memory for parked seats, over the node; 0: no limit."""
    source: str = ""
    """Where the arrivals come from, as text."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One time that a seat held a group: [began to restore, active from, closed admission, park done)."""

    seat: int
    group: str
    begun: float
    active: float
    closed: float
    gone: float
    """Infinity when it still held at the end."""
    served: int
    moved: bool = False
    failed: bool = False
    """The restore failed and the seat was cold started or given up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. Columns follow the scenario's requests."""

    scenario: str
    policy: str
    wait: tuple[float, ...]
    """Arrival to admission by the engine."""
    stall: tuple[float, ...]
    """Seconds in which the request was frozen in flight."""
    finished: tuple[float, ...]
    visits: tuple[Visit, ...]
    ended: float
    """When the last request had ended."""
    switching_seconds: float
    """Sum over groups of time spent parking and restoring."""
    counters: dict[str, int] = field(default_factory=dict)
    """decisions, moves, park_failures, restore_failures, no_room …"""


def check(scenario: Scenario) -> None:
    """Raise ValueError, with what is wrong, for a scenario that cannot be played."""
    name, count = scenario.name, len(scenario.at)
    if not count == len(scenario.seat) == len(scenario.service):
        raise ValueError(f"scenario {name}: at, seat and service differ in length")
    if any(later < earlier for earlier, later in pairwise(scenario.at)):
        raise ValueError(f"scenario {name}: arrival times fall; sort the requests by time")
    _check_numbers(scenario)
    if scenario.seat and not 0 <= min(scenario.seat) <= max(scenario.seat) < len(scenario.seats):
        raise ValueError(f"scenario {name}: a request names a seat that is not there")
    if scenario.cap < 1 or any(group.slots < 1 for group in scenario.groups):
        raise ValueError(f"scenario {name}: cap and slots must be at least 1")
    _check_names(scenario)
    _check_pins(scenario)
    _check_memory(scenario)


def _check_numbers(scenario: Scenario) -> None:
    """Times that are no number or below 0 would give waits below 0 or a run without end."""
    times = {
        "arrival time": scenario.at,
        "service time": scenario.service,
        "park time": [seat.park_seconds for seat in scenario.seats],
        "activate time": [seat.activate_seconds for seat in scenario.seats],
    }
    for what, values in times.items():
        wrong = next((value for value in values if not 0 <= value < inf), None)
        if wrong is not None:
            raise ValueError(f"scenario {scenario.name}: {what} {wrong!r}; give seconds from 0")


def _check_names(scenario: Scenario) -> None:
    """Groups and seats are called by their names."""
    name, groups = scenario.name, {group.name for group in scenario.groups}
    for what, names in (("seats", scenario.seats), ("groups", scenario.groups)):
        twice = [one for one, count in Counter(each.name for each in names).items() if count > 1]
        if twice:
            raise ValueError(f"scenario {name}: two {what} are called {twice[0]}; give each a unique name")
    for seat in scenario.seats:
        if seat.group not in groups:
            raise ValueError(f"scenario {name}: seat {seat.name} belongs to group {seat.group}, which is not there")


def _check_pins(scenario: Scenario) -> None:
    """Pinned seats must fit, and leave a slot where anything else is asked for. Seats that may move count together."""
    asked = _asked(scenario)
    for groups in [(group,) for group in scenario.groups] if scenario.move_seconds is None else [scenario.groups]:
        names, slots = {group.name for group in groups}, sum(group.slots for group in groups)
        here = [seat for seat in scenario.seats if seat.group in names]
        pinned = sum(seat.pinned for seat in here)
        others = any(not seat.pinned and seat.name in asked for seat in here)
        if pinned > slots or (others and pinned == slots):
            raise ValueError(
                f"scenario {scenario.name}: {pinned} pinned seats take all {slots} slots of {', '.join(sorted(names))} "
                f"and others would wait for ever; pin fewer or give it more slots"
            )


def _check_memory(scenario: Scenario) -> None:
    """Each seat must fit beside those that never leave its group."""
    asked = _asked(scenario)
    for group in scenario.groups:
        if not group.memory_bytes:
            continue
        here = [seat for seat in scenario.seats if seat.group == group.name]
        if max((seat.vram_bytes for seat in here), default=0) > group.memory_bytes:
            raise ValueError(
                f"scenario {scenario.name}: a seat of group {group.name} needs more memory than the group has"
            )
        _check_beside_pinned(scenario, group, here, asked)


def _check_beside_pinned(scenario: Scenario, group: SimGroup, here: list[SimSeat], asked: set[str]) -> None:
    if group.slots == 1 or scenario.move_seconds is not None:
        return
    taken = sum(seat.vram_bytes for seat in here if seat.pinned)
    most = max((s.vram_bytes for s in here if s.name in asked and not s.pinned), default=0)
    left = group.memory_bytes - taken
    if most > left:
        raise ValueError(
            f"scenario {scenario.name}: the pinned seats of group {group.name} leave {left} bytes and a seat needs "
            f"{most}; pin fewer or give the group more memory"
        )


def _asked(scenario: Scenario) -> set[str]:
    """Names of the seats with requests."""
    return {scenario.seats[index].name for index in set(scenario.seat)}
