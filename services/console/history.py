"""``GET /v1/history``: what happened since a point in time. ``GET /v1/requests/ID``: the story of one request.
Both are read from the bus's streams.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

from aiohttp import web

from kybernate.bus.port import ALL_EVENTS, Bus, BusError
from kybernate.envelope import Message, Pattern, slug
from kybernate.http_api import ApiError, number
from kybernate.messages import DecisionKind, GroupDecided, RequestEnded, SeatActivated, SeatEvent
from kybernate.seat import COMING, SeatState

LONGEST_READ_SECONDS = 8.0
MOST_EVENTS = 10_000
DEFAULT_EVENTS = 1_000
STORED_SECONDS = 10.0
"""By so much later, or earlier, an event may be stored than it happened: clocks of nodes differ."""
SINCE_SECONDS = 600.0
KINDS = {*get_args(DecisionKind), *(last for family, _, last in Message.registry if family == "evt" and last)}
"""What ``kind`` may be."""
ON_THE_WAY = (*COMING, SeatState.DRAINING, SeatState.PARKING, SeatState.STARTING, SeatState.RELEASING, SeatState.LOST)
"""States in which a seat keeps others of its group waiting."""
BEFORE_SECONDS = 120.0
"""A switch that served a request may have begun so long before it arrived."""


class History:
    """Reads stored events and records; one reader at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._turn = asyncio.Semaphore(1)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Return the newest events of ``since`` (unix seconds, ten minutes ago) to ``until`` (now), oldest first.

        ``kind``: a decision (``switch``, ``stay``) or the last word of a subject (``activated``, ``decided``,
        ``pinned``); ``model``, ``group``, ``op``; ``limit``. ``complete`` is false where older ones were left out.
        """
        query = request.query
        since = _since(query, SINCE_SECONDS)
        limit = _limit(query)
        if (kind := query.get("kind")) and kind not in KINDS:
            raise ApiError(400, "invalid_field", f"kind: {kind[:100]!r} is none of {', '.join(sorted(KINDS))}")
        wanted = {name: query[name] for name in ("kind", "model", "group", "op") if query.get(name)}
        async with self.reading("events", "ask for less time or one kind"):
            events = await self._read(since, number(query, "until", time.time()), wanted, limit + 1)
        return web.json_response({"since": since, "events": events[-limit:], "complete": len(events) <= limit})

    async def request(self, request: web.Request) -> web.StreamResponse:
        """Return the record of a request that was held or failed, the steps to its end, and the events behind them."""
        name = request.match_info["request"]
        async with self.reading("events", "try again"):
            record = await self._bus.ended(name)
            if record is None:
                text = "it waits still, was served at once, or ended more than a day ago; see kyb why MODEL"
                raise ApiError(404, "no_record", f"no record of request {name!r}: {text}")
            past, end = self._bus.replay(since=record.arrived_at - BEFORE_SECONDS), record.arrived_at + record.seconds
            # also of other seats, which may have been in the same switch
            events = [one async for one in past if one.at <= end and isinstance(one, SeatEvent | GroupDecided)]
        return web.json_response(story(record, [*events]))

    async def requests(self, request: web.Request) -> web.StreamResponse:
        """Return the records of requests that were held or failed and ended since then (unix seconds, an hour ago): the
        newest ``limit``, newest first; ``model`` selects. ``complete`` is false where older ones were left out."""
        query = request.query
        since, limit, model = _since(query, 3600.0), _limit(query), query.get("model") or None
        kept: deque[RequestEnded] = deque(maxlen=limit + 1)
        async with self.reading("requests", "ask for less time"):
            async for record in self._bus.replay(since=since, pattern=RequestEnded.pattern()):
                if isinstance(record, RequestEnded) and model in (None, record.model):
                    kept.append(record)
        newest = sorted(kept, key=lambda record: record.arrived_at + record.seconds, reverse=True)
        rows = [record.model_dump(mode="json", exclude_none=True) for record in newest[:limit]]
        return web.json_response({"since": since, "requests": rows, "complete": len(newest) <= limit})

    @asynccontextmanager
    async def reading(self, what: str, remedy: str) -> AsyncIterator[None]:
        """One reader at a time, for ``LONGEST_READ_SECONDS``; so long it waits for its turn. Raises ApiError 503."""
        reads = False
        try:
            async with asyncio.timeout(LONGEST_READ_SECONDS) as limit, self._turn:
                reads = True
                limit.reschedule(asyncio.get_running_loop().time() + LONGEST_READ_SECONDS)
                yield
        except TimeoutError:
            if not reads:
                text = "another reader of the past has the turn; try again"
                raise ApiError(503, "history_busy", text, 2) from None
            text = f"too many {what} to be read in {LONGEST_READ_SECONDS:g} s; {remedy}"
            raise ApiError(503, "history_too_long", text, 2) from None
        except BusError as error:
            raise ApiError(503, "events_unavailable", f"past {what} cannot be read: {error}", 2) from error

    async def _read(self, since: float, until: float, wanted: dict[str, str], most: int) -> list[dict[str, Any]]:
        kept: deque[dict[str, Any]] = deque(maxlen=most)
        stored = max(0.0, since - STORED_SECONDS)
        async for event in self._bus.replay(since=stored, pattern=_pattern(wanted.get("kind", ""))):
            if event.at > until + STORED_SECONDS:
                break
            if event.at > until:
                continue
            if event.at >= since and _matches(event, wanted):
                kept.append(_as_json(event))
        return list(kept)


def _since(query: Mapping[str, str], before: float) -> float:
    """Unix seconds: what the query says, else so many before now."""
    now = time.time()
    return max(0.0, min(now, number(query, "since", now - before)))


def _limit(query: Mapping[str, str]) -> int:
    limit = int(number(query, "limit", DEFAULT_EVENTS))
    if not 1 <= limit <= MOST_EVENTS:
        raise ApiError(400, "invalid_field", f"limit: {limit} is not between 1 and {MOST_EVENTS}")
    return limit


def story(record: RequestEnded, events: list[Message]) -> dict[str, Any]:
    """The request, its steps with the seconds since its arrival, and the seconds of each phase. Pure.

    The events are those of its seat and the decisions about its model; the switch that brought the seat adds the others
    with the same ``op``.
    """
    end = record.arrived_at + (record.seconds if record.first_byte_seconds is None else record.first_byte_seconds)
    mine = [event for event in events if isinstance(event, SeatEvent) and event.seat == record.seat]
    came = [event for event in mine if isinstance(event, SeatActivated) and record.arrived_at <= event.at <= end]
    op = came[-1].op if came else ""
    shown = [event for event in events if _shown(event, record, op, end)]
    phases = {"hold": record.held_seconds, **_before_it(record, events, op, end), **(came[-1].seconds if came else {})}
    phases.pop("total", None)
    forwarded = record.held_seconds if record.forwarded_seconds is None else record.forwarded_seconds
    if record.first_byte_seconds is not None:
        phases["first_byte"] = max(0.0, record.first_byte_seconds - forwarded)
    steps = [_step(event, event.at - record.arrived_at) for event in shown]
    steps.append({"step": "arrived", "at": 0.0, "router": record.router, "model": record.model})
    if record.seat:  # the hold begins a little after the arrival: what it was activated for came before
        at = max(forwarded, came[-1].at - record.arrived_at if came else 0.0)
        steps.append({"step": "forwarded", "at": at, "seat": record.seat, "model": record.model})
    if record.first_byte_seconds is not None:
        steps.append({"step": "first-byte", "at": record.first_byte_seconds})
    steps.append({"step": "ended", "at": record.seconds, "status": record.status, "reason": record.reason})
    steps.sort(key=lambda step: float(step["at"]))
    return {
        "request": record.model_dump(mode="json"),
        "phases": {name: round(seconds, 4) for name, seconds in phases.items()},
        "steps": steps,
        "events": [_as_json(event) for event in shown],
    }


def _before_it(record: RequestEnded, events: list[Message], op: str, end: float) -> dict[str, float]:
    """What other switches and starts of its group took while it waited: the seconds of each phase that was at least a
    tenth of the wait, as ``parking qwen3-32b``."""
    about = [event for event in events if isinstance(event, SeatEvent | GroupDecided) and event.model == record.model]
    group = about[-1].group if about else ""
    took = defaultdict[str, float](float)
    seats: dict[str, SeatEvent] = {}
    here = [event for event in events if isinstance(event, SeatEvent) and event.group == group]
    for event in sorted(here, key=lambda one: one.at):
        before, seats[event.seat] = seats.get(event.seat), event
        _add(took, before, event.at, record, op)
    for event in seats.values():
        _add(took, event, end, record, op)
    return {name: seconds for name, seconds in took.items() if seconds >= 0.1 * record.held_seconds}


def _add(took: dict[str, float], event: SeatEvent | None, until: float, record: RequestEnded, op: str) -> None:
    """A seat was in the state of this event until then."""
    if event is None or event.state not in ON_THE_WAY or (op and event.op == op):
        return
    forwarded = record.arrived_at + record.held_seconds
    seconds = min(until, forwarded) - max(event.at, record.arrived_at)
    if seconds > 0:
        took[f"{event.state} {event.model}"] += seconds


def _shown(event: Message, record: RequestEnded, op: str, end: float) -> bool:
    if event.at > end:
        return False
    if op and getattr(event, "op", "") == op:
        return True
    if event.at < record.arrived_at:
        return False
    if isinstance(event, GroupDecided):
        return event.model == record.model
    return isinstance(event, SeatEvent) and bool(record.seat) and event.seat == record.seat


def _step(event: Message, at: float) -> dict[str, Any]:
    word = event.subject.rpartition(".")[2]
    step: dict[str, Any] = {"step": word, "at": at}
    facts = ["decision", "group", "model", "victim_model", "reason"]
    if not isinstance(event, GroupDecided):
        facts = ["seat", "model", "reason", "seconds"]
    return step | {name: value for name in facts if (value := getattr(event, name, None))}


def _as_json(event: Message) -> dict[str, Any]:
    return {"type": event.kind(), **event.model_dump(mode="json", exclude_none=True)}


def _pattern(kind: str) -> Pattern[Message]:
    if not kind:
        return ALL_EVENTS
    if kind in get_args(DecisionKind):
        return GroupDecided.pattern()
    return Pattern(f"kyb.v1.evt.*.*.{slug(kind)}", Message)


def _matches(event: Message, wanted: dict[str, str]) -> bool:
    kind, model = wanted.get("kind", ""), wanted.get("model")
    if isinstance(event, GroupDecided):
        models = {event.model, event.victim_model}
        if kind in get_args(DecisionKind) and event.decision != kind:
            return False
    else:
        models = {event.model} if isinstance(event, SeatEvent) else set()
    if model is not None and model not in models:
        return False
    return all(getattr(event, name, None) == wanted[name] for name in ("group", "op") if name in wanted)
