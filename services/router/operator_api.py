"""The operator's API: state of the cluster, seat events as a stream, and commands to the managers.

Every command is published as an audit record.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusDownError, BusError
from kybernate.logs import get_logger
from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    Command,
    CommandReply,
    GpuHealthChanged,
    ParkSeat,
    PinSeat,
    SeatEvent,
    UnpinSeat,
)
from kybernate.roster import SeatRecord
from services.router.api import RouterError, cause_of
from services.router.auth import caller_of
from services.router.core.reports import Loads, SeatNameError, by_model, model_state, overview, resolve
from services.router.core.traffic import Traffic
from services.router.roster_sync import GpuInventory

VERBS: Mapping[str, type[Command]] = {"activate": ActivateSeat, "park": ParkSeat, "pin": PinSeat, "unpin": UnpinSeat}
COMMAND_TIMEOUT_SECONDS = 3.0
WHY_TIMEOUT_SECONDS = 3.0
RECENT_EVENTS = 1024
"""Events kept in memory for readers that reconnect soon; older ones are read from the bus's stream."""
BACKLOG = 1024
"""Events that may wait for one reader; a slower reader is disconnected and can resume with its Last-Event-ID."""
KEEP_ALIVE_SECONDS = 15.0

Event = SeatEvent | GpuHealthChanged


class OperatorApi:
    """``/v1/seats``, ``GET /v1/why`` and ``GET /v1/models``."""

    def __init__(
        self, bus: Bus, traffic: Traffic, loads: Loads, inventory: GpuInventory, http: aiohttp.ClientSession
    ) -> None:
        self._bus, self._traffic, self._loads, self._inventory, self._http = bus, traffic, loads, inventory, http

    async def seats(self, _: web.Request) -> web.StreamResponse:
        """Return all seats, models and nodes with their present load."""
        return web.json_response(overview(self._records(), self._loads, time.monotonic(), self._inventory.gpus))

    async def why(self, _: web.Request) -> web.StreamResponse:
        """Return each manager's explanation of its decisions, or why it is missing."""
        urls = {record.node: record.manager_url for record in self._records() if record.manager_url}
        nodes = await asyncio.gather(*(self._why(node, url) for node, url in sorted(urls.items())))
        return web.json_response({"nodes": nodes})

    async def _why(self, node: str, url: str) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=WHY_TIMEOUT_SECONDS)
            async with self._http.get(f"{url}/v1/why", timeout=timeout) as answer:
                answer.raise_for_status()
                return {"node": node, **await answer.json()}
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            return {"node": node, "unanswered": f"its manager at {url} does not answer: {error!r}"}

    async def models(self, _: web.Request) -> web.StreamResponse:
        """Return all models in OpenAI's list shape, each with its state."""
        models = by_model(self._records())
        return web.json_response({"object": "list", "data": [_row(name, of) for name, of in models.items()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Return one model."""
        name = request.match_info["model"]
        models = by_model(self._records())
        if name not in models:
            known = ", ".join(models) or "none yet"
            raise RouterError(404, "model_not_found", f"model {name!r} does not exist; known models: {known}")
        return web.json_response(_row(name, models[name]))

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Send activate, park, pin or unpin to the seat's manager: 202 accepted, 409 refused, 503 no manager."""
        verb, name = request.match_info["verb"], request.match_info["seat"]
        try:
            record = resolve(name, self._records())
        except SeatNameError as error:
            status, code = (409, "ambiguous_name") if error.candidates else (404, "seat_not_found")
            raise RouterError(status, code, str(error)) from error
        actor = caller_of(request) or "operator"
        command = VERBS[verb](cause=cause_of(request), node=record.node, seat=record.seat, actor=actor)
        try:
            reply = await self._bus.request(command, CommandReply, timeout=COMMAND_TIMEOUT_SECONDS)
        except BusError as error:
            await self._audit(command, verb, False, str(error), request)
            code = "bus_down" if isinstance(error, BusDownError) else "manager_unanswered"
            text = f"the manager of node {record.node} did not answer: {error}; it may have received the command or not"
            raise RouterError(503, code, text, 2) from error
        await self._audit(command, verb, reply.accepted, reply.reason, request)
        if not reply.accepted:
            why = reply.reason or reply.code
            text = why if record.seat in why else f"seat {record.seat}: {why}"
            raise RouterError(409, reply.code or "refused", text)
        body = {"accepted": True, "op": reply.op, "epoch": reply.epoch, "node": record.node, "seat": record.seat}
        body |= {"model": record.model, "cause": command.cause, "reason": reply.reason}
        return web.json_response(body, status=202)

    def _records(self) -> list[SeatRecord]:
        return [upstream.record for upstream in self._traffic.upstreams.values()]

    async def _audit(self, command: Command, verb: str, accepted: bool, reason: str, request: web.Request) -> None:
        record = AuditRecord(
            cause=command.cause,
            actor=command.actor,
            verb=verb,
            node=command.node,
            seat=command.seat,
            accepted=accepted,
            reason=reason,
            remote=request.remote or "",
        )
        get_logger().info("command.answered", **record.model_dump(exclude={"id", "at"}))
        try:
            await self._bus.publish(record)
        except BusError as error:
            get_logger().warning("audit.publish_failed", cause=command.cause, error=str(error))


def _row(name: str, records: list[SeatRecord]) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(min(record.since for record in records)),
        "owned_by": "kybernate",
        "state": model_state(records),
        "seats": len(records),
    }


def as_sse(event: Event) -> bytes:
    """Return an event as it is sent: its id, and its JSON with the CloudEvents type."""
    body = event.body()
    return b"id: %s\ndata: %s\n\n" % (event.id.encode(), b'{"type":"' + event.kind().encode() + b'",' + body[1:])


class EventLog:
    """``GET /v1/events``: events of seats and GPUs as server-sent events, resumable with ``Last-Event-ID``."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._readers: set[asyncio.Queue[Event | None]] = set()

    def add(self, event: Event) -> None:
        """Send a new event to all readers."""
        self._recent.append(event)
        for reader in list(self._readers):
            try:
                reader.put_nowait(event)
            except asyncio.QueueFull:
                self._disconnect(reader)

    def stop(self) -> None:
        """End every stream, because the router stops."""
        for reader in list(self._readers):
            self._disconnect(reader)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Stream events until the caller leaves. ``Last-Event-ID`` (or ``?after=``) continues after that event."""
        after = request.headers.get("Last-Event-ID") or request.query.get("after")
        reader: asyncio.Queue[Event | None] = asyncio.Queue(BACKLOG)
        self._readers.add(reader)  # before the past is read, so that no event is lost between
        try:
            past = await self._past(after) if after else []
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            await response.write(b": events of seats\n\n")
            sent = set()
            for event in past:
                sent.add(event.id)
                await response.write(as_sse(event))
            async for piece in self._live(reader, sent):
                await response.write(piece)
        except ConnectionResetError:
            return web.Response(status=499)
        finally:
            self._readers.discard(reader)
        await response.write_eof()
        return response

    def _disconnect(self, reader: "asyncio.Queue[Event | None]") -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)

    async def _past(self, after: str) -> list[Event]:
        recent = list(self._recent)
        ids = [event.id for event in recent]
        if after in ids:
            return recent[ids.index(after) + 1 :]
        try:
            return [event async for event in self._bus.replay(after_id=after) if isinstance(event, Event)]
        except BusError as error:
            raise RouterError(503, "events_unavailable", f"past events cannot be read: {error}", 2) from error

    async def _live(self, reader: "asyncio.Queue[Event | None]", sent: set[str]) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    event = await reader.get()
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            if event is None:
                return
            if event.id not in sent:
                yield as_sse(event)
