"""The operators' API: the state of the cluster, and commands to the managers.

Every command is published as an audit record. A command that begins an operation has a name (``op``); the same name
again answers how far that operation is.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusDownError, BusError, NoAnswerError
from kybernate.http_api import ApiError, body_of, json_of, printable, unanswered
from kybernate.key_guard import caller_of, request_cause
from kybernate.logs import get_logger
from kybernate.messages import (
    ActivateSeat,
    AuditRecord,
    Command,
    CommandReply,
    DrainNode,
    MigrateSeat,
    OrderCommand,
    ParkSeat,
    PinSeat,
    ResumeNode,
    SeatCommand,
    UnpinSeat,
)
from kybernate.roster import SeatRecord, some
from services.console.core.cluster import Cluster
from services.console.core.overview import SeatNameError, SeatQuery, node_of, overview, resolve, resolve_group

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


class OperatorApi:
    """The state of the cluster, and commands."""

    def __init__(self, bus: Bus, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self._bus, self._cluster, self._http = bus, cluster, http

    async def seats(self, request: web.Request) -> web.StreamResponse:
        """Return seats, models and nodes with their present load: those that the query selects, a page at a time."""
        unknown = sorted(request.query.keys() - {"node", "model", "state", "after", "limit"})
        if unknown:
            text = f"unknown parameters {', '.join(unknown)}: use node, model, state, after, limit"
            raise ApiError(400, "invalid_query", text)
        given: dict[str, Any] = dict(request.query)
        limit = given.pop("limit", "1000")
        if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
            raise ApiError(400, "invalid_query", f"limit={limit!r}: write a number from 1 to 1000")
        return web.json_response(overview(self._cluster, time.monotonic(), SeatQuery(**given, limit=int(limit))))

    async def why(self, request: web.Request) -> web.StreamResponse:
        """Return each manager's explanation of its decisions, or why it is missing; ``?node=…``: of these nodes."""
        return web.json_response({"nodes": await self.explained(request.query.getall("node", None))})

    async def explained(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Each manager's explanation, or why it is missing; of these nodes, or of all."""
        known = self._cluster.seats.nodes
        nodes = {node: known[node] for node in names or known if node in known}
        urls = dict[str, str]()
        for node, seats in sorted(nodes.items()):
            if url := next((seat.manager_url for seat in reversed(seats.values()) if seat.manager_url), ""):
                urls[node] = url
        return await asyncio.gather(*(self._why(node, url) for node, url in urls.items()))

    async def _why(self, node: str, url: str) -> dict[str, Any]:
        try:
            timeout = aiohttp.ClientTimeout(total=WHY_TIMEOUT_SECONDS)
            async with self._http.get(f"{url}/v1/why", timeout=timeout) as answer:
                answer.raise_for_status()
                return {"node": node, **await answer.json()}
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as error:
            return {"node": node, "unanswered": f"its manager at {url} does not answer ({unanswered(error)})"}

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Send activate, park, pin or unpin to the seat's manager: 202; 409 refused; 503 no answer, or not ready."""
        verb, record = request.match_info["verb"], self._record(request)
        command = VERBS[verb](node=record.node, seat=record.seat, **_caller(request))
        reply = await self._send(command, verb, record, request)
        body = {"accepted": True, "op": reply.op, "epoch": reply.epoch, "node": record.node, "seat": record.seat}
        body |= {"model": record.model, "cause": command.cause, "reason": reply.reason}
        return web.json_response(body, status=202)

    async def migrate(self, request: web.Request) -> web.StreamResponse:
        """Begin to move a seat to another group, or answer how far the move of this name is."""
        record, given = self._record(request), await self._order_of(request, "to")
        to = given.pop("to", "")
        if not to:
            raise ApiError(400, "group_missing", 'name the group that the seat moves to: {"to": "G1"}')
        to = str(to).removeprefix("group/").removeprefix(f"{record.node}/")
        command = MigrateSeat(node=record.node, seat=record.seat, to=to, **given, **_caller(request))
        return await self._order(command, "migrate", record, request, {"seat": record.seat, "model": record.model})

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
            raise ApiError(400, "purpose_unknown", "a drain is for maintenance or for upgrade")
        command = SCOPE_VERBS[verb](node=node, group=group, **given, **_caller(request))
        return await self._order(command, verb, None, request, {"group": group})

    async def _order(
        self, command: OrderCommand, verb: str, about: SeatRecord | None, request: web.Request, facts: dict[str, str]
    ) -> web.StreamResponse:
        reply = await self._send(command, verb, about, request)
        body: dict[str, Any] = {"accepted": True, "op": reply.op, "node": command.node, **facts, "cause": command.cause}
        body |= {"repeated": reply.repeated, "dry_run": command.dry_run, "plan": list(reply.plan)}
        body["operation"] = reply.order.model_dump(mode="json") if reply.order is not None else None
        return web.json_response(body, status=202)

    def _record(self, request: web.Request) -> SeatRecord:
        """The seat that a request names. Raises ApiError."""
        try:
            return resolve(request.match_info["seat"], self._records())
        except SeatNameError as error:
            raise _unresolved(error, "seat_not_found") from error

    async def _send(self, command: Command, verb: str, about: SeatRecord | None, request: web.Request) -> CommandReply:
        """Send a command with its audit record; what changes nothing has none. Raises ApiError."""
        seat = about.seat if about is not None else ""
        try:
            reply = await self._bus.request(command, CommandReply, timeout=COMMAND_TIMEOUT_SECONDS)
        except BusError as error:
            nodes = self._cluster.seats.nodes.keys() | self._cluster.gpus.nodes.keys()
            if isinstance(error, NoAnswerError) and command.node not in nodes:
                text = f"no node is called {command.node!r}; known: {some(sorted(nodes), 'kyb status')}"
                raise ApiError(404, "node_not_found", text) from error
            await self._audit(command, verb, seat, False, str(error), request)
            code = "bus_down" if isinstance(error, BusDownError) else "manager_unanswered"
            text = (
                f"the manager of node {command.node} did not answer: {error}; it may have received the command or not"
            )
            raise ApiError(503, code, text, 2) from error
        if not (reply.repeated or (isinstance(command, OrderCommand) and command.dry_run)):
            await self._audit(command, verb, seat, reply.accepted, reply.reason, request)
        if not reply.accepted:
            code, retry = reply.code or "refused", reply.retry_after_seconds
            status = 503 if code == "not-ready" else 409
            raise ApiError(status, code, reply.reason or code, None if retry is None else math.ceil(retry))
        return reply

    async def _order_of(self, request: web.Request, *more: str) -> dict[str, Any]:
        """The fields of a command that begins an operation. Raises ApiError 400 for any other one."""
        body = await body_of(request, COMMAND_BYTES)
        parsed = json_of(body) if body.strip() else {}
        if not isinstance(parsed, dict):
            raise ApiError(400, "invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
        known = {"op": str, "dry_run": bool, **dict.fromkeys(more, str)}
        for name, value in parsed.items():
            if name not in known or not isinstance(value, known[name]) or (name == "op" and not printable(str(value))):
                raise ApiError(400, "invalid_field", f"{name}: {value!r} cannot be used; known: {', '.join(known)}")
        return parsed

    def _records(self) -> list[SeatRecord]:
        return list(self._cluster.seats.rows.values())

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
    return {"cause": request_cause(request), "actor": caller_of(request) or "operator"}


def _unresolved(error: SeatNameError, missing: str) -> ApiError:
    status, code = (409, "ambiguous_name") if error.candidates else (404, missing)
    return ApiError(status, code, str(error))
