"""A scenario and its outcome as plain data: the contract between generators, engine, bounds and reports; and the check
that a scenario can be played. Pure.

Times are model seconds from the beginning of the scenario, durations model seconds.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf


@dataclass(frozen=True, slots=True)
class Learned:
    """What the policy has learned of a seat before the run begins; what its switches take may differ."""

    park_seconds: float
    activate_seconds: float
    service_seconds: float
    rate_fast: float
    """Arrivals per second, as are ``rate_slow``."""
    rate_slow: float
    count: int
    """Values that each mean was made of."""


@dataclass(frozen=True, slots=True)
class SimSeat:
    """One seat: what it costs to move it and how it is valued."""

    name: str
    group: str
    """Its home."""
    park_seconds: float
    activate_seconds: float
    fixed_seconds: float = 0.0
    """How much of each copies no memory, and shares the host's link with nothing."""
    vram_bytes: int = 0
    host_bytes: int = 0
    """Host memory that its parked copy takes."""
    model: str = ""
    tier: str = "standard"
    weight: float = 1.0
    slo_seconds: float = 20.0
    pinned: bool = False
    active: bool = False
    """It holds its home when the run begins, idle for long; else it is parked."""
    learned: Learned | None = None
    """None: its costs are known and nothing else."""


@dataclass(frozen=True, slots=True)
class SimGroup:
    """One group of GPUs."""

    name: str
    slots: int = 1
    memory_bytes: int = 0
    """Shared by its seats, where it has several slots; 0: as much as they need."""
    pool: str = ""
    """Seats move among groups of one pool, if at all."""


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
    loses_copy: bool = False
    """A move ends the engine, and ``move_seconds`` is what its start takes longer than an activation."""
    control_seconds: float = 0.0
    """Part of every activation that the learned costs do not contain: deciding it, and passing requests on after it."""
    host_bytes: int = 0
    """Host memory for parked seats, over the node; 0: no limit."""
    lanes: int = 0
    """Transfers that the node carries at full speed, side by side; 0: any number."""
    observed_seconds: float = 0.0
    """How long arrivals had been counted when the run begins."""
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
    _check_memory(scenario)
    _check_pins(scenario)
    _check_active(scenario)


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
    """Pinned seats must fit into their group and leave room for each other seat with requests: in its own group, or,
    where seats may move, in one of its pool."""
    asked = {scenario.seats[index].name for index in set(scenario.seat)}
    room = {group.name: _room_beside_pinned(scenario, group) for group in scenario.groups}
    pools = {group.name: group.pool for group in scenario.groups}
    for name, (slots, memory) in room.items():
        if slots < 0 or memory < 0:
            raise ValueError(
                f"scenario {scenario.name}: the pinned seats of group {name} do not fit into it together; pin fewer, "
                f"or give the group more {'slots' if slots < 0 else 'memory'}"
            )
    for seat in scenario.seats:
        soft, pool = scenario.move_seconds is not None, pools[seat.group]
        homes = [left for name, left in room.items() if name == seat.group or (soft and pools[name] == pool)]
        if seat.pinned or seat.name not in asked or any(slots and seat.vram_bytes <= memory for slots, memory in homes):
            continue
        slots, memory = room[seat.group]
        left = f"{memory:.0f} bytes, and seat {seat.name} needs {seat.vram_bytes}" if slots else "no slot"
        raise ValueError(
            f"scenario {scenario.name}: the pinned seats of group {seat.group} leave {left}: its requests would wait "
            f"for ever; pin fewer, or give the group more {'memory' if slots else 'slots'}"
        )


def _check_active(scenario: Scenario) -> None:
    """What is active at the beginning must fit."""
    for group in scenario.groups:
        held = [seat.vram_bytes for seat in scenario.seats if seat.active and seat.group == group.name]
        if len(held) > group.slots or sum(held) > (group.memory_bytes or inf):
            raise ValueError(
                f"scenario {scenario.name}: the active seats of group {group.name} do not fit into it together; begin "
                f"with fewer"
            )


def _room_beside_pinned(scenario: Scenario, group: SimGroup) -> tuple[int, float]:
    """Slots and bytes that the pinned seats of a group leave; below 0: they do not fit."""
    pinned = [seat.vram_bytes for seat in scenario.seats if seat.pinned and seat.group == group.name]
    return group.slots - len(pinned), (group.memory_bytes or inf) - sum(pinned)


def _check_memory(scenario: Scenario) -> None:
    """Each seat must fit into its group."""
    for group in scenario.groups:
        most = max((seat.vram_bytes for seat in scenario.seats if seat.group == group.name), default=0)
        if group.memory_bytes and most > group.memory_bytes:
            raise ValueError(
                f"scenario {scenario.name}: a seat of group {group.name} needs more memory than the group has"
            )
