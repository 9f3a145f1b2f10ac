"""What the page shows of the past: which seat held which group, and requests that waited. Pure.

Built from events of seats, which may come twice (replayed and live): an event that is not newer than the last one of
its seat changes nothing. Times are unix seconds.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kybernate.messages import GroupDecided, SeatActivated, SeatEvent
from kybernate.roster import SeatRecord, seat_key
from kybernate.seat import COMING, HOLDING, SeatState

MOST_BLOCKS = 20_000
"""Ended blocks that are kept, of all groups."""
MOST_SAMPLES = 2_000
"""Changes of waiting requests per group that are kept."""


@dataclass(frozen=True, slots=True)
class Block:
    """A seat was in one state on a group. ``until`` None: it still is."""

    lane: str
    """``node/group``."""
    seat: str
    model: str
    state: SeatState
    since: float
    until: float | None = None
    reason: str = ""
    cause: str = ""
    op: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of the switch by phase, as the event that began the block reported them."""
    way: str = ""
    came_from: str = ""
    """How it came to this group, as in ``SeatEvent``."""

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is empty is left out."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value not in (None, "", {})}


class LastSwitch(NamedTuple):
    """How a model last came to VRAM."""

    at: float
    seconds: float
    reason: str
    cause: str


class Timeline:
    """Blocks by lane, from ``since`` on."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.switches: dict[str, LastSwitch] = {}
        """By model."""
        self._reasons: dict[str, str] = {}
        """By operation: why it was begun, as its decision, or the first event of it with a reason, says."""
        self._open: dict[str, Block | None] = {}
        """By seat key; None: it holds no GPU."""
        self._seen: dict[str, tuple[int, int]] = {}
        self._ended: deque[Block] = deque(maxlen=MOST_BLOCKS)

    def add(self, event: SeatEvent | GroupDecided) -> None:
        """Take the next event of a seat, or the decision that its operation follows."""
        reason = self._reason(event)
        if isinstance(event, GroupDecided):
            return
        key = seat_key(event.node, event.seat)
        if (event.epoch, event.seq) <= self._seen.get(key, (-1, -1)):
            return
        self._seen[key] = event.epoch, event.seq
        lane = f"{event.node}/{event.group}"
        if key not in self._open and event.previous in HOLDING:  # it held the group before what is known
            self._open[key] = Block(lane, event.seat, event.model, event.previous, min(self.since, event.at))
        block = self._open.get(key)
        started_away = event.previous is SeatState.STARTING and bool(event.way)
        if isinstance(event, SeatActivated) and (event.previous in COMING or started_away):
            took, begun = (0.0, "") if block is None else (event.at - block.since, block.reason)
            took = event.seconds.get("total", took)
            self.switches[event.model] = LastSwitch(event.at, took, reason or begun, event.cause)
        if block is not None and (block.state, block.lane) == (event.state, lane):
            return  # pinned, unpinned
        self._end(key, event.at)
        self._open[key] = None
        if event.state in HOLDING or (event.state is SeatState.RELEASING and block is not None):
            why = reason, event.cause, event.op, event.seconds, event.way, event.came_from
            self._open[key] = Block(lane, event.seat, event.model, event.state, event.at, None, *why)

    def adopt(self, record: SeatRecord) -> bool:
        """Take what the roster reports of a seat, if there is no event of it; return whether that is a new block."""
        if record.state not in HOLDING or (key := record.key) in self._open:
            return False
        lane = f"{record.node}/{record.group or record.home_group}"
        self._open[key] = Block(lane, record.seat, record.model, record.state, record.since, None, record.reason)
        return True

    @property
    def full(self) -> bool:
        """Whether older blocks were dropped."""
        return len(self._ended) == MOST_BLOCKS

    def blocks(self, since: float) -> Iterator[Block]:
        """Yield the blocks that did not end before ``since``, those that have ended first."""
        yield from (block for block in self._ended if (block.until or 0.0) >= since)
        yield from (block for block in self._open.values() if block is not None)

    def _reason(self, event: SeatEvent | GroupDecided) -> str:
        """The event's reason, else that of its operation."""
        if event.op and event.reason:
            self._reasons.setdefault(event.op, event.reason)
            if len(self._reasons) > MOST_SAMPLES:
                del self._reasons[next(iter(self._reasons))]
        return event.reason or self._reasons.get(event.op, "")

    def _end(self, key: str, at: float) -> None:
        block = self._open.get(key)
        if block is not None:
            self._ended.append(replace(block, until=max(at, block.since)))
            if self.full:
                self.since = max(self.since, self._ended[0].since)


class WaitingLines:
    """How many requests waited for each group; only changes are kept."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[float, int]]] = {}

    def sample(self, waiting: dict[str, int], now: float) -> dict[str, int]:
        """Store the numbers of now, and return those that changed. A lane that is not named has none."""
        changed = {}
        for lane in waiting.keys() | self._lanes.keys():
            line = self._lanes.get(lane)
            count = waiting.get(lane, 0)
            if count != (line[-1][1] if line else 0):
                self._lanes.setdefault(lane, deque(maxlen=MOST_SAMPLES)).append((now, count))
                changed[lane] = count
        return changed

    def lines(self, since: float) -> Iterator[tuple[str, list[tuple[float, int]]]]:
        """Yield the changes of each lane after ``since``, and the last one before it; it may be sampled meanwhile."""
        for lane, line in list(self._lanes.items()):
            first = next((at for at, (time, _) in enumerate(line) if time >= since), len(line))
            if kept := list(line)[max(0, first - 1) :]:
                yield lane, kept
