"""The operators' API: the state of the cluster, and commands to the managers.

Every command is published as an audit record.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusDownError, BusError, NoAnswerError
from kybernate.http_api import ApiError, body_of, json_of, unanswered
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
from kybernate.seat import SeatState
from services.console.core.cluster import Cluster
from services.console.core.overview import SeatNameError, SeatQuery, overview, resolve, resolve_group

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
        if (state := given.get("state")) and state not in (states := [str(one) for one in SeatState]):
            raise ApiError(400, "invalid_query", f"state={state[:100]!r} is none of {', '.join(states)}")
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
            async with self._http.get(f"{url}/v1/why", timeout=timeout, allow_redirects=False) as answer:
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
        """Move a seat to another group; again: how far it is."""
        record, given = self._record(request), await self._order_of(request, "to")
        to = given.pop("to", "")
        if not to:
            raise ApiError(400, "group_missing", 'name the group that the seat moves to: {"to": "G1"}')
        to = str(to).removeprefix("group/").removeprefix(f"{record.node}/")
        command = MigrateSeat(node=record.node, seat=record.seat, to=to, **given, **_caller(request))
        return await self._order(command, "migrate", record, request, {"seat": record.seat, "model": record.model})

    async def group(self, request: web.Request) -> web.StreamResponse:
        """Drain a group, or resume it; again: how far it is."""
        try:
            node, group = resolve_group(request.match_info["group"], self._records())
        except SeatNameError as error:
            raise self._unresolved(error, "group_not_found") from error
        return await self._scope(node, group, request)

    async def node(self, request: web.Request) -> web.StreamResponse:
        """Drain a node, or resume it; again: how far it is."""
        return await self._scope(request.match_info["node"].removeprefix("node/"), "", request)

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
        body: dict[str, Any] = {"accepted": True, "node": command.node, **facts, "cause": command.cause}
        body["operation"] = reply.order.model_dump(mode="json") if reply.order is not None else None
        return web.json_response(body, status=202)

    def _record(self, request: web.Request) -> SeatRecord:
        """The seat that a request names. Raises ApiError."""
        try:
            return resolve(request.match_info["seat"], self._records())
        except SeatNameError as error:
            raise self._unresolved(error, "seat_not_found") from error

    async def _send(self, command: Command, verb: str, about: SeatRecord | None, request: web.Request) -> CommandReply:
        """Send a command with its audit record. Raises ApiError."""
        seat = about.seat if about is not None else ""
        try:
            reply = await self._bus.request(command, CommandReply, timeout=COMMAND_TIMEOUT_SECONDS)
        except BusError as error:
            nodes = self._cluster.seats.nodes.keys() | self._cluster.gpus.nodes.keys()
            if isinstance(error, NoAnswerError) and command.node not in nodes and self._cluster.complete:
                text = f"no node is called {command.node!r}; known: {some(sorted(nodes), 'kyb status')}"
                raise ApiError(404, "node_not_found", text) from error
            await self._audit(command, verb, seat, False, str(error), request)
            code = "bus_down" if isinstance(error, BusDownError) else "manager_unanswered"
            text = (
                f"the manager of node {command.node} did not answer: {error}; it may have received the command or not"
            )
            raise ApiError(503, code, text, 2) from error
        await self._audit(command, verb, seat, reply.accepted, reply.reason, request)
        if not reply.accepted:
            code, retry = reply.code or "refused", reply.retry_after_seconds
            status = 503 if code == "not-ready" else 409
            raise ApiError(status, code, reply.reason or code, None if retry is None else math.ceil(retry))
        return reply

    async def _order_of(self, request: web.Request, *more: str) -> dict[str, Any]:
        """The fields of such a command. Raises ApiError 400 for any other one."""
        body = await body_of(request, COMMAND_BYTES)
        parsed = json_of(body) if body.strip() else {}
        if not isinstance(parsed, dict):
            raise ApiError(400, "invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
        for name, value in parsed.items():
            if name not in more or not isinstance(value, str):
                text = f"{name}: {value!r} cannot be used; known: {', '.join(more) or 'none'}"
                raise ApiError(400, "invalid_field", text)
        return parsed

    def _unresolved(self, error: SeatNameError, missing: str) -> ApiError:
        """A name that is not in the roster does not exist only once all of it was read."""
        if not error.candidates and not self._cluster.complete:
            return ApiError(503, "roster_incomplete", f"{error}; the console still reads the roster: ask again", 1)
        status, code = (409, "ambiguous_name") if error.candidates else (404, missing)
        return ApiError(status, code, str(error))

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
