"""What the node's manager says about the seat of this pod, remembered for a moment."""

import asyncio
import json
import time
from dataclasses import dataclass

from services.probe.wire import WireError, fetch

FRESH_SECONDS = 1.0
"""How long an answer, or the lack of one, is good for."""
_RUNS = frozenset({"starting", "active", "draining"})
_FROZEN = frozenset({"parking", "parked", "activating", "migrating"})


@dataclass(frozen=True, slots=True)
class Seat:
    """One answer."""

    state: str = ""
    """Empty: the manager does not answer, or knows no seat of this pod."""
    since: float = 0.0
    """Unix seconds at which it entered this state."""

    @property
    def runs(self) -> bool:
        """The engine can answer for itself."""
        return self.state in _RUNS

    @property
    def frozen(self) -> bool:
        """The engine stands still, or may; it has been active before."""
        return self.state in _FROZEN


@dataclass(slots=True)
class Manager:
    """Asked at most once at a time, however many probes wait."""

    host: str
    port: int
    uid: str
    last: Seat = Seat()
    last_known: Seat = Seat()
    """The last answer that named a state."""
    _at: float = float("-inf")
    _asking: "asyncio.Task[Seat] | None" = None

    async def seat(self, timeout: float, *, fresh: float = FRESH_SECONDS) -> Seat:
        """What the seat does; an empty Seat when that cannot be known in time. ``fresh``: how old it may be."""
        if time.monotonic() - self._at < fresh:
            return self.last
        if not self.port:
            return Seat()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(timeout))
        done, _ = await asyncio.wait([self._asking], timeout=timeout)
        return self._asking.result() if done else Seat()

    def forget(self) -> None:
        """The next probe asks anew."""
        self._at = float("-inf")

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])

    async def _ask(self, timeout: float) -> Seat:
        try:
            async with asyncio.timeout(timeout):
                answer = await fetch(self.host, self.port, f"/v1/pods/{self.uid}")
            seat = _seat(answer.body) if answer.status == 200 else Seat()
        except (OSError, TimeoutError, WireError):
            seat = Seat()
        self.last, self._at = seat, time.monotonic()
        if seat.state:
            self.last_known = seat
        return seat


def _seat(body: bytes) -> Seat:
    try:
        record = json.loads(body)
        return Seat(str(record["state"]), float(record.get("since") or 0.0))
    except (ValueError, KeyError, TypeError):
        return Seat()
