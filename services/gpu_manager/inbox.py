"""What waits for the board: one queue, bounded by what each kind of message can bear. No I/O.

The board may stand still for seconds (its ledger is on a disk that hangs), and messages arrive meanwhile.
"""

import asyncio
import time
from collections import OrderedDict, deque

from kybernate.logs import get_logger
from kybernate.messages import CommandReply, DrainAck, JobProgress, Presence, TrafficSignal

LEVELS = 8192
"""Levels that wait; their sources repeat them every one or two seconds."""
OTHERS = 1024
"""Further messages that wait before their senders do."""

Reply = asyncio.Future[CommandReply]
_Level = TrafficSignal | Presence | DrainAck


class BoardInbox:
    """The queue of the board, in order of arrival.

    (1) Of too many levels (signals, presences, acknowledgements) the oldest are dropped and counted. (2) The status of
    a job is the whole truth about it: a newer one takes the place of one that waits. (3) No other message is ever
    dropped: ``receive`` waits until there is room. (4) A command that was not begun can be withdrawn, and is then
    answered as busy.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, tuple[object, Reply | None, float]] = OrderedDict()
        self._levels: deque[int] = deque()
        """Keys of the levels that wait, oldest first."""
        self._statuses: dict[str, int] = {}
        """Op → key of the job status that waits."""
        self._last = 0
        self._arrived, self._taken = asyncio.Event(), asyncio.Event()
        self.dropped = 0
        """Levels dropped since the start."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, message: object, reply: Reply | None = None) -> int:
        """Add a message, whatever waits already; returns its key."""
        self._last += 1
        self._queue[self._last] = (message, reply, time.monotonic())
        self._arrived.set()
        if isinstance(message, _Level):  # (1)
            self._levels.append(self._last)
            if len(self._levels) > LEVELS:
                self._drop_level()
        elif isinstance(message, JobProgress):  # (2)
            self._queue.pop(self._statuses.pop(message.status.op, 0), None)
            self._statuses[message.status.op] = self._last
        return self._last

    async def receive(self, message: object) -> None:
        """Add a message. One that must not be lost waits here for room."""
        if not isinstance(message, _Level):
            while len(self._queue) - len(self._levels) >= OTHERS:
                self._taken.clear()
                await self._taken.wait()
        self.put(message)

    async def get(self) -> tuple[object, Reply | None, float]:
        """Take the oldest message, and when it arrived (CLOCK_MONOTONIC); waits for one."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        _, (message, reply, arrived) = self._queue.popitem(last=False)
        if isinstance(message, _Level):
            self._levels.popleft()
        elif isinstance(message, JobProgress):
            self._statuses.pop(message.status.op, None)
        self._taken.set()
        return message, reply, arrived

    def withdraw(self, key: int) -> bool:
        """Take a message back; False if the board has it already."""
        return self._queue.pop(key, None) is not None

    def _drop_level(self) -> None:
        self._queue.pop(self._levels.popleft())
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # a flood must not flood the log
            get_logger().warning(
                "level.dropped", dropped=self.dropped, meaning="the board stands still; it is repeated"
            )
