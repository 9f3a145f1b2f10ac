"""Following the stack's events through the router: switches, their phases, and which seats are in a switch now."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from pydantic import ValidationError

from kybernate.messages import SeatEvent
from kybernate.seat import COMING, SeatState

IN_SWITCH = frozenset({SeatState.DRAINING, SeatState.PARKING}) | COMING
_AGAIN_SECONDS = 0.1
_LONGEST_SECONDS = 3.0
"""Wall seconds after which a switch counts as ended without an event: the event may be lost."""


@dataclass(frozen=True, slots=True)
class ObservedSwitch:
    """A group was given to a seat."""

    group: str
    seat: str
    model: str
    seconds: dict[str, float]
    """Wall seconds by phase."""
    way: str = ""
    """How it came from another group; empty: it was there."""

    @property
    def moved(self) -> bool:
        """It was on another group before."""
        return bool(self.way)


class ObservedStep(NamedTuple):
    """A seat left a state of a switch for the next one."""

    seat: str
    left: SeatState
    entered: SeatState
    seconds: float
    """Wall; in the state that it left."""


@dataclass
class Watch:
    """Seat states and switches, from the events received so far."""

    switches: list[ObservedSwitch] = field(default_factory=list)
    states: dict[tuple[str, str], SeatState] = field(default_factory=dict)
    """The last known state of each seat, by node and seat."""
    steps: list["ObservedStep"] = field(default_factory=list)
    spills: int = 0
    """How often a seat went without a copy for lack of host memory."""
    cold_starts: int = 0
    """How often a container of a seat has started and serves."""
    began_at: float = field(default_factory=time.time)
    _spans: list[list[float]] = field(default_factory=list)
    _open: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _entered: dict[tuple[str, str], tuple[SeatState, float]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _last_id: str | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: SeatEvent) -> None:
        """Add one event; the same event again changes nothing."""
        if event.id in self._seen or event.at < self.began_at:
            return
        self._seen.add(event.id)
        seat = event.node, event.seat
        if seat in self._entered:
            before, at = self._entered[seat]
            self.steps.append(ObservedStep(event.seat, before, event.state, event.at - at))
        self._entered[seat] = event.state, event.at
        self.states[seat] = event.state
        self.spills += event.state is SeatState.PARKED and "(hostMemory)" in event.reason
        self.cold_starts += event.state is SeatState.ACTIVE and event.previous is SeatState.STARTING
        if event.state in IN_SWITCH:
            if seat not in self._open:
                self._open[seat] = span = [event.at, float("inf")]
                self._spans.append(span)
        elif seat in self._open:
            self._open.pop(seat)[1] = event.at
        if event.state is SeatState.ACTIVE and event.previous in (*COMING, SeatState.STARTING):
            way = "" if event.previous is SeatState.ACTIVATING else event.way
            self.switches.append(ObservedSwitch(event.group, event.seat, event.model, dict(event.seconds), way))
        self._news.set()
        self._news = asyncio.Event()

    def was_switching(self, at: float) -> bool:
        """Whether some seat was in a switch at this moment (unix seconds), by what is known now."""
        return any(begin <= at <= min(end, begin + _LONGEST_SECONDS) for begin, end in self._spans)

    async def entered(self, state: SeatState, timeout: float) -> bool:
        """Until some seat newly enters this state; False when none did in time."""
        try:
            async with asyncio.timeout(timeout):
                before = {seat for seat, now in self.states.items() if now is state}
                while True:
                    await self._news.wait()
                    now = {seat for seat, value in self.states.items() if value is state}
                    if now - before:
                        return True
                    before = now
        except TimeoutError:
            return False

    async def switch_under_way(self, timeout: float) -> bool:
        """Until some seat is in a switch, as far as is known; False when none was in time."""
        try:
            async with asyncio.timeout(timeout):
                while not self._open:
                    await self._news.wait()
                return True
        except TimeoutError:
            return False

    async def follow(self, session: aiohttp.ClientSession, url: str, ready: asyncio.Event) -> None:
        """Read the router's event stream until cancelled; after a break go on from the last event."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                headers = {"Last-Event-ID": self._last_id} if self._last_id else {}
                async with session.get(url + "/v1/events", headers=headers) as response:
                    if response.status == 200:
                        ready.set()
                        await self._read(response)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        async for number, data in _blocks(response):
            if number:
                self._last_id = number
            event = _seat_event(data)
            if event is not None:
                self.take(event)


async def _blocks(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each server-sent event."""
    number, data = "", ""
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if not line:
            if data:
                yield number, data
            number, data = "", ""
        elif line.startswith("id:"):
            number = line[3:].strip()
        elif line.startswith("data:"):
            data += line[5:].strip()


def _seat_event(data: str) -> SeatEvent | None:
    """The seat event in this JSON, alone or inside a CloudEvent; None for anything else."""
    value: Any = json.loads(data)
    if isinstance(value, dict) and "specversion" in value:
        value = value.get("data")
    try:
        return SeatEvent.model_validate(value)
    except ValidationError:
        return None
