"""The operator's API: state of the cluster, events as a stream, and commands to the managers.

Every command is published as an audit record. A command that begins an operation has a name (``op``); the same name
again answers how far that operation is.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.follow import Slices
from kybernate.bus.port import Bus, BusDownError, BusError, NoAnswerError
from kybernate.http_api import body_of, json_of, number, printable
from kybernate.key_guard import request_cause
from kybernate.logs import get_logger
from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    Command,
    CommandReply,
    DrainNode,
    GpuHealthChanged,
    GroupDecided,
    MigrateSeat,
    OrderChanged,
    OrderCommand,
    ParkSeat,
    PinSeat,
    ResumeNode,
    SeatCommand,
    SeatEvent,
    UnpinSeat,
)
from kybernate.roster import SeatRecord
from services.router.api import RouterError
from services.router.auth import sender_of
from services.router.core.reports import (
    SeatNameError,
    SeatQuery,
    model_state,
    node_of,
    overview,
    resolve,
    resolve_group,
)
from services.router.core.traffic import Traffic
from services.router.core.upstreams import some
from services.router.level_watch import LevelWatch
from services.router.limits import TenantLimits
from services.router.roster_sync import GpuInventory

VERBS: Mapping[str, type[SeatCommand]] = {
    "activate": ActivateSeat,
    "park": ParkSeat,
    "pin": PinSeat,
    "unpin": UnpinSeat,
}
SCOPE_VERBS: Mapping[str, type[DrainNode | ResumeNode]] = {"drain": DrainNode, "resume": ResumeNode}
COMMAND_BYTES = 64 * 1024
COMMAND_TIMEOUT_SECONDS = 3.0
WHY_TIMEOUT_SECONDS = 3.0
RECENT_EVENTS = 1024
"""Events kept in memory for readers that reconnect soon; older ones are read from the bus's stream."""
BACKLOG = 1024
"""Events that may wait for one reader; a slower reader is disconnected and can resume with its Last-Event-ID."""
KEEP_ALIVE_SECONDS = 15.0

Event = SeatEvent | GpuHealthChanged | OrderChanged | GroupDecided


class OperatorApi:
    """``/v1/seats``, ``GET /v1/why`` and ``GET /v1/models``."""

    def __init__(
        self,
        bus: Bus,
        traffic: Traffic,
        levels: LevelWatch,
        inventory: GpuInventory,
        http: aiohttp.ClientSession,
        limits: TenantLimits,
    ) -> None:
        self._bus, self._traffic, self._levels, self._inventory, self._http = bus, traffic, levels, inventory, http
        self._limits = limits

    async def seats(self, request: web.Request) -> web.StreamResponse:
        """Return seats, models and nodes with their present load: those that the query selects, a page at a time."""
        unknown = sorted(request.query.keys() - {"node", "model", "state", "after", "limit"})
        if unknown:
            text = f"unknown parameters {', '.join(unknown)}: use node, model, state, after, limit"
            raise RouterError(400, "invalid_query", text)
        given: dict[str, Any] = dict(request.query)
        limit = given.pop("limit", "1000")
        if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
            raise RouterError(400, "invalid_query", f"limit={limit!r}: write a number from 1 to 1000")
        query = SeatQuery(**given, limit=int(limit))
        body, slices = bytearray(), Slices()
        for piece in overview(
            self._traffic.table, self._levels.loads, time.monotonic(), self._inventory.machines, query
        ):
            body += piece
            await slices.pause()
        body += b',"levels_since":%s}' % json.dumps(self._levels.since).encode()
        return web.Response(body=bytes(body), content_type="application/json", charset="utf-8")

    async def why(self, request: web.Request) -> web.StreamResponse:
        """Return each manager's explanation of its decisions, or why it is missing; ``?node=…``: of these nodes."""
        known = self._traffic.table.nodes
        nodes = {node: known[node] for node in request.query.getall("node", known) if node in known}
        urls = dict[str, str]()
        for node, seats in sorted(nodes.items()):
            if url := next((seat.record.manager_url for seat in reversed(seats.values())), ""):
                urls[node] = url
        found = await asyncio.gather(*(self._why(node, url) for node, url in urls.items()))
        body = b'{"nodes":[' + b",".join(found) + b"]}"
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async def _why(self, node: str, url: str) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=WHY_TIMEOUT_SECONDS)
            async with self._http.get(f"{url}/v1/why", timeout=timeout) as answer:
                answer.raise_for_status()
                return json.dumps({"node": node, **await answer.json()}).encode()
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            return json.dumps({"node": node, "unanswered": f"its manager at {url} does not answer: {error!r}"}).encode()

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Return all models that the caller may use in OpenAI's list shape, each with its state."""
        table, sender, slices = self._traffic.table, sender_of(request), Slices()
        models = {name for name, of in table.models.items() if of.upstreams and self._limits.sees(sender, name)}
        aliases = {alias: model for alias, model in self._limits.aliases.items() if model in models}
        rows = []
        for name, model in [*((name, name) for name in sorted(models - aliases.keys())), *sorted(aliases.items())]:
            if records := table.records_of(model):  # else its seats have gone meanwhile
                rows.append(_row(name, records, model))
            await slices.pause()
        return web.json_response({"object": "list", "data": rows})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Return one model."""
        name, sender = request.match_info["model"], sender_of(request)
        model = self._limits.resolve(sender, name)
        records = self._traffic.table.records_of(model)
        if not records:
            raise self._limits.not_found(sender, name)
        return web.json_response(_row(name, records, model))

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Send activate, park, pin or unpin to the seat's manager: 202; 409 refused; 503 no answer, or not ready."""
        verb, record = request.match_info["verb"], self._record(request)
        command = VERBS[verb](node=record.node, seat=record.seat, **_caller(request))
        reply = await self._send(command, verb, record.seat, request)
        body = {"accepted": True, "op": reply.op, "epoch": reply.epoch, "node": record.node, "seat": record.seat}
        body |= {"model": record.model, "cause": command.cause, "reason": reply.reason}
        return web.json_response(body, status=202)

    async def migrate(self, request: web.Request) -> web.StreamResponse:
        """Begin to move a seat to another group, or answer how far the move of this name is."""
        record, given = self._record(request), await self._order_of(request, "to")
        to = given.pop("to", "")
        if not to:
            raise RouterError(400, "group_missing", 'name the group that the seat moves to: {"to": "G1"}')
        to = str(to).removeprefix("group/").removeprefix(f"{record.node}/")
        command = MigrateSeat(node=record.node, seat=record.seat, to=to, **given, **_caller(request))
        return await self._order(command, "migrate", record.seat, request, {"seat": record.seat, "model": record.model})

    async def group(self, request: web.Request) -> web.StreamResponse:
        """Begin to drain a group, or resume it, or answer how far the operation of this name is."""
        try:
            node, group = resolve_group(request.match_info["group"], self._records())
        except SeatNameError as error:
            raise _unresolved(error, "group_not_found") from error
        return await self._scope(node, group, request)

    async def node(self, request: web.Request) -> web.StreamResponse:
        """Begin to drain a node, or resume it, or answer how far the operation of this name is."""
        return await self._scope(node_of(request.match_info["node"]), "", request)

    async def _scope(self, node: str, group: str, request: web.Request) -> web.StreamResponse:
        verb = request.match_info["verb"]
        given = await self._order_of(request, *(("purpose",) if verb == "drain" else ()))
        if given.get("purpose", "maintenance") not in ("maintenance", "upgrade"):
            raise RouterError(400, "purpose_unknown", "a drain is for maintenance or for upgrade")
        command = SCOPE_VERBS[verb](node=node, group=group, **given, **_caller(request))
        return await self._order(command, verb, "", request, {"group": group})

    async def _order(
        self, command: OrderCommand, verb: str, seat: str, request: web.Request, facts: dict[str, str]
    ) -> web.StreamResponse:
        reply = await self._send(command, verb, seat, request)
        body: dict[str, Any] = {"accepted": True, "op": reply.op, "node": command.node, **facts, "cause": command.cause}
        body |= {"repeated": reply.repeated, "dry_run": command.dry_run, "plan": list(reply.plan)}
        body["operation"] = reply.order.model_dump(mode="json") if reply.order is not None else None
        return web.json_response(body, status=202)

    def _record(self, request: web.Request) -> SeatRecord:
        """The seat that a request names. Raises RouterError."""
        try:
            return resolve(request.match_info["seat"], self._records())
        except SeatNameError as error:
            raise _unresolved(error, "seat_not_found") from error

    async def _send(self, command: Command, verb: str, seat: str, request: web.Request) -> CommandReply:
        """Send a command with its audit record; what changes nothing has none. Raises RouterError."""
        try:
            reply = await self._bus.request(command, CommandReply, timeout=COMMAND_TIMEOUT_SECONDS)
        except BusError as error:
            nodes = {record.node for record in self._records()} | {gpu.node for gpu in self._inventory.gpus}
            if isinstance(error, NoAnswerError) and command.node not in nodes:
                text = f"no node is called {command.node!r}; known: {some(sorted(nodes), 'kyb status')}"
                raise RouterError(404, "node_not_found", text) from error
            await self._audit(command, verb, seat, False, str(error), request)
            code = "bus_down" if isinstance(error, BusDownError) else "manager_unanswered"
            text = (
                f"the manager of node {command.node} did not answer: {error}; it may have received the command or not"
            )
            raise RouterError(503, code, text, 2) from error
        if not (reply.repeated or (isinstance(command, OrderCommand) and command.dry_run)):
            await self._audit(command, verb, seat, reply.accepted, reply.reason, request)
        if not reply.accepted:
            why = reply.reason or reply.code
            text = why if seat in why else f"seat {seat}: {why}"
            retry = reply.retry_after_seconds
            status = 503 if reply.code == "not-ready" else 409
            raise RouterError(status, reply.code or "refused", text, None if retry is None else math.ceil(retry))
        return reply

    async def _order_of(self, request: web.Request, *more: str) -> dict[str, Any]:
        """The fields of a command that begins an operation. Raises RouterError 400 for any other one."""
        body = await body_of(request, COMMAND_BYTES)
        parsed = json_of(body) if body.strip() else {}
        if not isinstance(parsed, dict):
            raise RouterError(400, "invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
        known = {"op": str, "dry_run": bool, **dict.fromkeys(more, str)}
        for name, value in parsed.items():
            if name not in known or not isinstance(value, known[name]) or (name == "op" and not printable(str(value))):
                raise RouterError(400, "invalid_field", f"{name}: {value!r} cannot be used; known: {', '.join(known)}")
        return parsed

    def _records(self) -> list[SeatRecord]:
        return [upstream.record for upstream in self._traffic.table.upstreams.values()]

    async def _audit(
        self, command: Command, verb: str, seat: str, accepted: bool, reason: str, request: web.Request
    ) -> None:
        record = AuditRecord(
            cause=command.cause,
            actor=command.actor,
            verb=verb,
            node=command.node,
            seat=seat,
            accepted=accepted,
            reason=reason,
            remote=request.remote or "",
        )
        get_logger().info("command.answered", **record.model_dump(exclude={"id", "at"}))
        try:
            await self._bus.publish(record)
        except BusError as error:
            get_logger().warning("audit.publish_failed", cause=command.cause, error=str(error))


def _caller(request: web.Request) -> dict[str, Any]:
    return {"cause": request_cause(request), "actor": sender_of(request).name or "operator"}


def _unresolved(error: SeatNameError, missing: str) -> RouterError:
    status, code = (409, "ambiguous_name") if error.candidates else (404, missing)
    return RouterError(status, code, str(error))


def _row(name: str, records: list[SeatRecord], model: str) -> dict[str, object]:
    """Return a model under its name or an alias."""
    return {
        "id": name,
        "root": model,
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
        """Stream events until the caller leaves. ``Last-Event-ID`` (or ``?after=``) continues after that event; without
        one ``?since=`` begins with the stored events since then, unix seconds."""
        after = request.headers.get("Last-Event-ID") or request.query.get("after")
        since = number(request.query, "since", 0.0)
        reader: asyncio.Queue[Event | None] = asyncio.Queue(BACKLOG)
        self._readers.add(reader)  # before the past is read, so that no event is lost between
        try:
            past = await self._past(after, since) if after or since > 0 else []
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

    async def _past(self, after: str | None, since: float) -> list[Event]:
        recent = list(self._recent)
        ids = [event.id for event in recent]
        if after in ids:
            return recent[ids.index(after) + 1 :]
        stored = self._bus.replay(after_id=after) if after else self._bus.replay(since=since)
        try:
            return [event async for event in stored if isinstance(event, Event)]
        except BusError as error:
            raise RouterError(503, "events_unavailable", f"past events cannot be read: {error}", 2) from error

    async def _live(self, reader: "asyncio.Queue[Event | None]", sent: set[str]) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    events = [await reader.get()]
            except TimeoutError:
                yield b": keep-alive\n\n"
                continue
            while not reader.empty():
                events.append(reader.get_nowait())
            if pieces := [as_sse(event) for event in events if event is not None and event.id not in sent]:
                yield b"".join(pieces)
            if events[-1] is None:
                return
