"""The operator's calls: what is there, and commands to the managers. Every command leaves an audit record."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.bus.port import Bus, BusDownError, BusError
from kybernate.logs import get_logger
from kybernate.messages import ActivateSeat, AuditRecord, Command, CommandReply, ParkSeat, PinSeat, UnpinSeat
from kybernate.roster import SeatRecord
from services.router.answers import ApiError
from services.router.auth import caller_of
from services.router.calls import cause_of
from services.router.fleet import UnclearNameError, by_model, model_state, overview, resolve
from services.router.inventory import Inventory
from services.router.loads import Loads
from services.router.traffic import Traffic

VERBS: Mapping[str, type[Command]] = {
    "activate": ActivateSeat,
    "park": ParkSeat,
    "pin": PinSeat,
    "unpin": UnpinSeat,
}
COMMAND_TIMEOUT_SECONDS = 3.0
WHY_TIMEOUT_SECONDS = 3.0


class Admin:
    """``/v1/seats``, ``GET /v1/why`` and ``GET /v1/models``."""

    def __init__(
        self, bus: Bus, traffic: Traffic, loads: Loads, inventory: Inventory, http: aiohttp.ClientSession
    ) -> None:
        self._bus, self._traffic, self._loads, self._inventory, self._http = bus, traffic, loads, inventory, http

    async def seats(self, _: web.Request) -> web.StreamResponse:
        """All seats, models and nodes with their present load."""
        return web.json_response(overview(self._records(), self._loads, time.monotonic(), self._inventory.gpus))

    async def why(self, _: web.Request) -> web.StreamResponse:
        """What each node's manager says about its decisions; one that does not answer is named with the reason."""
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
        """All models in OpenAI's list shape, each with its state."""
        models = by_model(self._records())
        return web.json_response({"object": "list", "data": [_row(name, of) for name, of in models.items()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        """One model."""
        name = request.match_info["model"]
        models = by_model(self._records())
        if name not in models:
            known = ", ".join(models) or "none yet"
            raise ApiError(404, "model_not_found", f"model {name!r} does not exist; known models: {known}")
        return web.json_response(_row(name, models[name]))

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Send activate, park, pin or unpin to the seat's manager: 202 accepted, 409 refused, 503 no manager."""
        verb, name = request.match_info["verb"], request.match_info["seat"]
        try:
            record = resolve(name, self._records())
        except UnclearNameError as error:
            status, code = (409, "ambiguous_name") if error.candidates else (404, "seat_not_found")
            raise ApiError(status, code, str(error)) from error
        actor = caller_of(request) or "operator"
        command = VERBS[verb](cause=cause_of(request), node=record.node, seat=record.seat, actor=actor)
        try:
            reply = await self._bus.request(command, CommandReply, timeout=COMMAND_TIMEOUT_SECONDS)
        except BusError as error:
            await self._audit(command, verb, False, str(error), request)
            code = "bus_down" if isinstance(error, BusDownError) else "manager_unanswered"
            text = f"the manager of node {record.node} did not answer: {error}; it may have heard the command or not"
            raise ApiError(503, code, text, 2) from error
        await self._audit(command, verb, reply.accepted, reply.reason, request)
        if not reply.accepted:
            why = reply.reason or reply.code
            text = why if record.seat in why else f"seat {record.seat}: {why}"
            raise ApiError(409, reply.code or "refused", text)
        body = {"accepted": True, "op": reply.op, "epoch": reply.epoch, "node": record.node, "seat": record.seat}
        body |= {"model": record.model, "cause": command.cause, "reason": reply.reason}
        return web.json_response(body, status=202)

    def _records(self) -> list[SeatRecord]:
        return [lane.record for lane in self._traffic.lanes.values()]

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
        get_logger().info("operator.asked", **record.model_dump(exclude={"id", "at"}))
        try:
            await self._bus.publish(record)
        except BusError as error:
            get_logger().warning("audit.unsent", cause=command.cause, error=str(error))


def _row(name: str, records: list[SeatRecord]) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(min(record.since for record in records)),
        "owned_by": "kybernate",
        "state": model_state(records),
        "seats": len(records),
    }
