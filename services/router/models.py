"""``GET /v1/models``: the models that a caller may use, in OpenAI's shape; and paths that a router refuses."""

import json
import time
from typing import Any

from aiohttp import web

from kybernate.bus.follow import Slices
from kybernate.envelope import LONGEST_NAME
from kybernate.http_api import ApiError
from kybernate.roster import SeatRecord, model_state
from services.router.auth import sender_of
from services.router.core.traffic import Traffic
from services.router.limits import TenantLimits


class ModelsApi:
    """The handlers of ``/v1/models``."""

    def __init__(self, traffic: Traffic, limits: TenantLimits) -> None:
        self._traffic, self._limits = traffic, limits
        self._last: tuple[object, bytes] = None, b""
        """The last list, and what it was made of."""

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Return all models that the caller may use in OpenAI's list shape, each with its state; ``incomplete``: why
        more may exist."""
        table, sender, slices = self._traffic.table, sender_of(request), Slices()
        tenant = self._limits.tenants.of(sender.tenant)
        why = self._traffic.incomplete(time.monotonic())
        made_of = table.version, why, tenant and tenant.models
        if self._last[0] == made_of:
            return web.Response(body=self._last[1], content_type="application/json")
        models = {name for name, of in table.models.items() if of.upstreams and self._limits.sees(sender, name)}
        aliases = {alias: model for alias, model in self._limits.aliases.items() if model in models}
        rows = []
        for name, model in [*((name, name) for name in sorted(models - aliases.keys())), *sorted(aliases.items())]:
            if records := table.records_of(model):  # else its seats have gone meanwhile
                rows.append(_row(name, records, model))
            await slices.pause()
        listed = {"object": "list", "data": rows} | ({"incomplete": why} if why else {})
        self._last = made_of, json.dumps(listed).encode()
        return web.Response(body=self._last[1], content_type="application/json")

    async def model(self, request: web.Request) -> web.StreamResponse:
        """Return one model."""
        name, sender = request.match_info["model"], sender_of(request)
        model = self._limits.resolve(sender, name)
        records = self._traffic.table.records_of(model)
        if not records:
            raise self._limits.not_found(sender, name)
        return web.json_response(_row(name, records, model))


def _row(name: str, records: list[SeatRecord], model: str) -> dict[str, Any]:
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


AT_THE_CONSOLE = "/v1/{of:events|groups|history|nodes|requests|seats|slo|why}{rest:(/.*)?}"
"""The operators' API, which routers had until the console."""


async def at_the_console(request: web.Request) -> web.StreamResponse:
    """Refuse a request for the operators' API."""
    text = f"{request.path[:LONGEST_NAME]}: a router does not answer this; ask the console (kyb-console, port 8781)"
    raise ApiError(404, "at_the_console", f"{text}; kyb finds it by KYB_URL or --url")


async def not_forwarded(request: web.Request) -> web.StreamResponse:
    """Refuse a path that is no inference call: engines have others that are not for callers."""
    path = request.rel_url.raw_path[:LONGEST_NAME]
    text = f"POST {path} is not forwarded to engines; allow it with KYB_ENGINE_PATHS if it is safe"
    raise ApiError(404, "not_found", text)


async def no_websocket(request: web.Request) -> web.StreamResponse:
    """Refuse the realtime API."""
    text = f"{request.path}: WebSockets are not relayed, since a parked engine would end them"
    raise ApiError(501, "not_supported", f"{text}; send audio with POST /v1/audio/transcriptions")


async def not_stored(request: web.Request) -> web.StreamResponse:
    """Refuse what would have to outlive a request: neither a router nor a parked engine keeps it."""
    text = f"{request.path[:LONGEST_NAME]}: files, batches, threads and responses are not stored here"
    raise ApiError(404, "not_supported", f"{text}; send all input with each request")
