"""The roster: the state of every seat, in the bucket ``kyb_seats``. Only the seat's manager writes its row.

Readers that missed events read it. Keys are ``<node>.<seat>`` as slugs; values are the JSON of SeatRecord.
"""

from pydantic import BaseModel, ConfigDict, Field

from kybernate.seat import SeatState
from kybernate.slugs import slug

BUCKET = "kyb_seats"


class SeatRecord(BaseModel):
    """One row of the roster."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    seat: str
    state: SeatState
    epoch: int = 0
    seq: int = 0
    """As in SeatEvent: with the epoch, it orders the rows and events of this seat."""
    model: str = ""
    endpoint: str | None = None
    """``http://host:port`` of the engine; None until its pod has an address."""
    group: str = ""
    """Group it runs on now."""
    home_group: str = ""
    """Group that its seat ID belongs to."""
    gpus: tuple[int, ...] = ()
    """Host indices of the group's GPUs."""
    resource: str = ""
    """The extended resource, e.g. ``kyb.ai/gpu-1x-seat``."""
    pod: str = ""
    """``namespace/name``."""
    pod_uid: str = ""
    tier: str = "standard"
    pinned: bool = False
    vram_bytes: int = 0
    """Its footprint when active, over all its GPUs; 0 until seen."""
    host_bytes: int = 0
    """Host memory that its parked copy takes."""
    reason: str = ""
    blocked: str = ""
    """Why it cannot be started or activated at present: a refused pod, a foreign process on its GPUs."""
    fixed: str = ""
    """Why it is not moved to other groups although its profile rebalances; empty: it is, or its profile does not."""
    since: float = 0.0
    """Unix seconds at which it entered this state."""
    started: bool = False
    """It has been active at least once since its pod came."""
    activate_seconds: float = 0.0
    """Learned: seconds (model time) from the order to activate until it serves, eviction included."""
    manager_url: str = ""
    """Where the node's manager answers HTTP, for a router without NATS."""
    stall_seconds: float = 0.0
    """Above 0: its requests in flight are frozen with it, for at most so many wall seconds from this write."""
    reported_at: float = Field(default=0.0)
    """Unix seconds of this write."""

    @property
    def key(self) -> str:
        """Key in the bucket."""
        return seat_key(self.node, self.seat)


def seat_key(node: str, seat: str) -> str:
    """Key of a seat in the roster."""
    return f"{slug(node)}.{slug(seat)}"
