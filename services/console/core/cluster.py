"""What the console knows: rows of the roster and of the inventory, routers, traffic levels. Pure.

Times are wall seconds of CLOCK_MONOTONIC.
"""

from typing import Generic, TypeVar

from kybernate.levels import Loads
from kybernate.messages import Presence, SeatAllocated, SeatEvent
from kybernate.roster import GpuRecord, SeatRecord, after_event, seat_key
from kybernate.seat import SeatState

DEAD_SECONDS = 10.0
"""After the last presence of a router."""
R = TypeVar("R", SeatRecord, GpuRecord)


class Rows(Generic[R]):
    """The last row of each key of a bucket."""

    def __init__(self) -> None:
        self.rows: dict[str, R] = {}
        self.nodes: dict[str, dict[str, R]] = {}
        """By node, then by key."""
        self.touched: set[str] = set()
        """Keys of rows that were replaced or dropped, until a reader takes them."""

    def put(self, key: str, row: R) -> None:
        """Store a row."""
        self.touched.add(key)
        self.rows[key] = self.nodes.setdefault(row.node, {})[key] = row

    def drop(self, key: str) -> None:
        """Forget a row."""
        self.touched.add(key)
        if (gone := self.rows.pop(key, None)) is not None:
            del self.nodes[gone.node][key]
            if not self.nodes[gone.node]:
                del self.nodes[gone.node]

    def take(self) -> set[str]:
        """Return what was touched, and begin anew."""
        taken, self.touched = self.touched, set()
        return taken


class Seats(Rows[SeatRecord]):
    """The roster, also by model: seats without a pod have none."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, dict[str, SeatRecord]] = {}
        self._ahead: set[str] = set()
        """Keys of rows that an event has changed: an older row of the roster may still be on its way."""

    def read(self, key: str, row: SeatRecord) -> None:
        """Store a row of the roster, unless an event has reported something newer since."""
        known = self.rows.get(key)
        newer = key in self._ahead and known is not None and (row.epoch, row.seq) < (known.epoch, known.seq)
        self._ahead.discard(key)
        if not newer:
            self.put(key, row)

    def take_event(self, event: SeatEvent) -> None:
        """Change the row of a seat as its event says, but for the plugin's hint to the manager, and for another group:
        only the roster's row names its GPUs."""
        key = seat_key(event.node, event.seat)
        row = self.rows.get(key)
        if isinstance(event, SeatAllocated):
            return
        if row is None or event.group not in ("", row.group):
            return
        if (event.epoch, event.seq) > (row.epoch, row.seq):
            self._ahead.add(key)
            self.put(key, after_event(row, event))

    def put(self, key: str, row: SeatRecord) -> None:
        """Store a row."""
        self._unlist(key)
        super().put(key, row)
        if row.model and row.state is not SeatState.FREE:
            self.models.setdefault(row.model, {})[key] = row

    def drop(self, key: str) -> None:
        """Forget a row."""
        self._unlist(key)
        super().drop(key)

    def of_model(self, model: str) -> list[SeatRecord]:
        """Return the rows of a model's seats."""
        return list(self.models.get(model, {}).values())

    def _unlist(self, key: str) -> None:
        before = self.rows.get(key)
        if before is not None and (of := self.models.get(before.model)) is not None:
            of.pop(key, None)
            if not of:
                del self.models[before.model]


class Cluster:
    """The one state that all views read; the reader writes it."""

    def __init__(self) -> None:
        self.seats, self.gpus, self.loads = Seats(), Rows[GpuRecord](), Loads()
        self._routers: dict[str, tuple[float, Presence]] = {}
        self.complete = False
        """The whole roster was read once."""

    def present(self, presence: Presence, now: float) -> None:
        """Take the presence of a router."""
        if presence.leaving:
            self._routers.pop(presence.instance, None)
        else:
            self._routers[presence.instance] = now + DEAD_SECONDS, presence

    def routers(self, now: float) -> list[Presence]:
        """Return the routers that are alive, by name."""
        self._routers = {name: at for name, at in self._routers.items() if now < at[0]}
        return [presence for _, (_, presence) in sorted(self._routers.items())]
