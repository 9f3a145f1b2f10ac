"""Rows of the buckets: the roster (``kyb_seats``) and the GPUs of the nodes (``kyb_inventory``).

Only the seat's manager writes a row of the roster, only the node's device plugin a row of the inventory; readers that
missed events read them. Keys are ``<node>.<seat>`` and ``<node>.<gpu UUID>`` as slugs; values are JSON of the records.
"""

from collections.abc import Iterable, Sequence

from pydantic import Field, JsonValue

from kybernate.envelope import Address, Record, slug
from kybernate.messages import SeatEvent, SeatFacts, SeatFreed, SeatPinned, SeatUnpinned
from kybernate.seat import SeatState

BUCKET = "kyb_seats"
INVENTORY_BUCKET = "kyb_inventory"


class SeatRecord(Record, SeatFacts):
    """One row of the roster."""

    home_group: str = ""
    """Group that its seat ID belongs to."""
    gpus: tuple[int, ...] = ()
    """Host indices of the group's GPUs."""
    resource: str = ""
    """The extended resource, e.g. ``kyb.ai/gpu-1x-seat``."""
    tier: str = "standard"
    slo_seconds: float = 0.0
    """How long a request for it may wait, model seconds; 0: not known."""
    pinned: bool = False
    host_bytes: int = 0
    """Host memory that its parked copy takes."""
    riders: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    """What other features of its manager show, by their names."""
    blocked: str = ""
    """Why it cannot be started or activated at present: a refused pod, a foreign process on its GPUs."""
    failed: str = ""
    """Its engine has ended at least twice in a row without having served: how often, how, and its last line of log."""
    failed_until: float = 0.0
    """Unix seconds of the end of its pause after that; 0: a request may start it."""
    drained: str = ""
    """Its group is drained by an operator: the actor, and how it ends. Such groups also have rows of free seats."""
    fixed: str = ""
    """Why it stays on its group although that is part of a pool; empty: it may move, or there is no pool."""
    since: float = 0.0
    """Unix seconds at which it entered this state."""
    usual_seconds: float = 0.0
    """How long it usually is in this state, wall seconds; 0: not known, or the state does not end by itself."""
    deadline_at: float = 0.0
    """Unix seconds by which this state ends; 0: nothing bounds it."""
    started: bool = False
    """It has been active at least once since its pod came."""
    cold: bool = False
    """It has no engine: an activation starts one."""
    max_requests: int = 0
    """Requests that its engine serves at once, as its pod declares; 0: not declared."""
    activate_seconds: float = 0.0
    """Learned: seconds (model time) from the order to activate until it serves, eviction included."""
    manager_url: Address = ""
    """Where the node's manager answers HTTP, for a router without NATS."""
    node_signals: bool = True
    """For routers of 843f10d5, which send NodeTrafficSignal only where all rows say so. The next release drops it."""
    reported_at: float = Field(default=0.0)
    """Unix seconds of this write."""

    @property
    def key(self) -> str:
        """Key in the bucket."""
        return seat_key(self.node, self.seat)


def after_event(record: SeatRecord, event: SeatEvent) -> SeatRecord:
    """Return the row of a seat with the changes of its event, which arrives before the roster's row."""
    changes: dict[str, object] = {"state": event.state, "epoch": event.epoch, "seq": event.seq}
    changes |= {"since": event.at, "reason": event.reason}
    changes |= {"usual_seconds": 0.0, "deadline_at": 0.0}  # those of its state before; the row brings the others
    for name in ("model", "group", "pod", "pod_uid", "endpoint", "vram_bytes"):
        if value := getattr(event, name):
            changes[name] = value
    if isinstance(event, SeatPinned | SeatUnpinned):
        changes["pinned"] = isinstance(event, SeatPinned)
        changes["since"] = record.since
    if isinstance(event, SeatFreed):
        changes |= {"endpoint": None, "pod": "", "pod_uid": ""}
    return record.model_copy(update=changes)


_MODEL_STATES: tuple[tuple[str, frozenset[SeatState]], ...] = (
    ("active", frozenset({SeatState.ACTIVE, SeatState.DRAINING})),
    ("activating", frozenset({SeatState.ACTIVATING, SeatState.STARTING, SeatState.MIGRATING})),
    ("parked", frozenset({SeatState.PARKED, SeatState.PARKING, SeatState.WAITING, SeatState.BACKOFF})),
)


def model_state(records: Iterable[SeatRecord]) -> str:
    """Return the best state among a model's seats: active, activating, parked or lost."""
    states = {record.state for record in records}
    return next((name for name, of in _MODEL_STATES if states & of), "lost")


MOST_NAMES = 20
"""Names that one error text lists."""


def some(names: Sequence[str], where: str = "GET /v1/models") -> str:
    """Return the first names as text for error messages; ``where`` a caller finds all."""
    more = f" and {len(names) - MOST_NAMES} more: {where}" if len(names) > MOST_NAMES else ""
    return (", ".join(names[:MOST_NAMES]) or "none yet") + more


def seat_key(node: str, seat: str) -> str:
    """Key of a seat in the roster."""
    return f"{slug(node)}.{slug(seat)}"


class GpuRecord(Record):
    """One GPU of a node."""

    node: str
    gpu: str
    """UUID; for a missing GPU the name that the configuration uses."""
    index: int
    """Host index; -1 where unknown."""
    name: str = ""
    memory_bytes: int = 0
    numa_node: int | None = None
    groups: tuple[str, ...] = ()
    """Groups that contain it."""
    healthy: bool = True
    """False: no seat of these groups is allocated; pods that have one keep running."""
    reason: str = ""
    """Why it is not healthy."""
    since: float = Field(default=0.0)
    """Unix seconds of the last health change that the plugin knows."""

    @property
    def key(self) -> str:
        """Key in the bucket."""
        return f"{slug(self.node)}.{slug(self.gpu)}"
