"""What is simulated and what came of it: plain data, the contract between generators, engine, bounds and reports.

Times are model seconds from the beginning of the scenario, durations model seconds. Nothing here needs more than the
standard library.
"""

from dataclasses import dataclass, field


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
    gang: str = ""
    """Seats of one gang serve one model together and run only together; empty: it stands alone."""


@dataclass(frozen=True, slots=True)
class SimGroup:
    """One group of GPUs."""

    name: str
    slots: int = 1
    memory_bytes: int = 0
    """Of the whole group; 0: as much as the slots' seats need."""


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
    """Where the arrivals come from, in words."""


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
    """What came of it. Columns follow the scenario's requests."""

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
