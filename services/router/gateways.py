"""Routes for other gateways, which forward calls themselves.

``GET /v1/hold`` waits until they may call the engine, ``POST /v1/wake`` requests an activation without waiting,
``POST /v1/signals`` publishes their load.
"""

import asyncio
import time
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kybernate.bus.follow import Slices
from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.http_api import Handler, body_of, json_of, printable
from kybernate.key_guard import request_cause
from kybernate.messages import TrafficSignal
from kybernate.roster import some
from kybernate.sizes import parse_seconds
from services.router.api import RouterError, model_of
from services.router.auth import Caller, sender_of
from services.router.calls import cause_of
from services.router.core.reports import SignalQuota, addressed, admits
from services.router.core.step import Reject
from services.router.core.tenants import Tokens
from services.router.dispatch import Dispatcher, WaitingTicket
from services.router.limits import TenantLimits
from services.router.settings import RouterSettings

SIGNAL_TYPES = ("application/cloudevents+json", "application/cloudevents-batch+json", "application/json")
SIGNAL_LIMIT = 1000
"""Signals in one call."""
SIGNAL_BYTES = 512 * 1024
"""Largest body of one call."""
SIGNAL_TTL_SECONDS = 15.0
"""Validity of a signal that names none."""
WAKE_BYTES = 64 * 1024
MOST_WAKING = 16
"""Models that a tenant without ``concurrency`` may wake at a time."""
WAKE_SECONDS = 60.0
"""Model seconds for which POST /v1/wake requests a model."""
MOST_REQUESTS = 1_000_000_000
"""Largest count in one signal; a higher one is a mistake. What counts of it: ``kybernate.messages.signals``."""


class SignalData(BaseModel):
    """``data`` of a signal. Milliseconds are accepted instead of seconds, ``inflight`` instead of ``in_flight``."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str = Field(min_length=1)
    seat: str | None = None
    tier: str = "standard"
    waiting: int = Field(0, ge=0, le=MOST_REQUESTS)
    in_flight: int = Field(0, ge=0, le=MOST_REQUESTS)
    inflight: int = Field(0, ge=0, le=MOST_REQUESTS)
    arrivals: int = Field(0, ge=0, le=MOST_REQUESTS)
    window_seconds: float | None = Field(None, gt=0)
    window_ms: float | None = Field(None, gt=0)
    oldest_wait_seconds: float | None = Field(None, ge=0)
    oldest_wait_ms: float | None = Field(None, ge=0)
    ttl_seconds: float | None = Field(None, gt=0, le=3600)


class GatewayApi:
    """The handlers of the three routes."""

    def __init__(
        self, settings: RouterSettings, clock: Clock, bus: Bus, dispatcher: Dispatcher, limits: TenantLimits
    ) -> None:
        self._settings, self._clock, self._bus = settings, clock, bus
        self._dispatcher, self._limits = dispatcher, limits
        self._quota = SignalQuota(settings.signals_per_second, SIGNAL_LIMIT, settings.signal_sources)
        self._seq = 0
        self._waking: dict[str, dict[str, float]] = {}
        """By tenant and model: until when it is wanted."""

    async def hold(self, request: web.Request) -> web.StreamResponse:
        """Wait until the model is active: 200 with its endpoint, valid for ``valid_ms``; else 404, 429 or 503."""
        if request.headers.get("User-Agent", "").startswith("Mozilla/") and not any(
            name.lower().startswith("x-") for name in request.headers
        ):  # an image of any page, of which a browser marks nothing where this port has no TLS
            text = "a browser takes no permits; a gateway that passes its User-Agent on sends a header X-Model, too"
            raise RouterError(403, "wrong_origin", text)
        model = model_of(request.query.get("model"), "name the model: GET /v1/hold?model=…&timeout=30s")
        timeout = _duration(request.query.get("timeout"))
        sender = sender_of(request)
        ticket = WaitingTicket(cause_of(sender, request_cause(request)))
        model = self._limits.begin(sender, model)
        priority = min(0, sender.highest_priority)
        self._dispatcher.arrive(
            ticket, model, kind="permit", hold_seconds=timeout, by="timeout", priority=priority, tenant=sender.lane
        )
        try:
            outcome = await ticket.outcome
            if isinstance(outcome, Reject):
                raise self._limits.error(sender, model, outcome)
        except BaseException:
            self._dispatcher.end(ticket)
            self._limits.end(sender, model, Tokens())
            raise
        self._dispatcher.forget(ticket)
        # Until it expires it is a request of its tenant, used or not.
        valid = self._settings.permit_seconds
        asyncio.get_running_loop().call_later(valid, self._limits.end, sender, model, Tokens())
        return web.json_response(
            {
                "model": model,
                "endpoint": outcome.endpoint,
                "seat": outcome.seat,
                "epoch": outcome.epoch,
                "valid_ms": round(self._settings.permit_seconds * 1000),
                "held_seconds": round(self._clock.to_model(outcome.held_seconds), 3),
            },
            headers={"X-Kyb-Cause": ticket.cause, "X-Kyb-Endpoint": outcome.endpoint, "X-Kyb-Model": model},
        )

    async def wake(self, request: web.Request) -> web.StreamResponse:
        """Request the activation of a model: 202, or 200 if it is active already."""
        parsed: Any = json_of(await body_of(request, WAKE_BYTES))
        model = model_of(parsed.get("model") if isinstance(parsed, dict) else None)
        sender = sender_of(request)
        cause = cause_of(sender, request_cause(request))
        model = self._limits.begin(sender, model)
        self._limits.end(sender, model, Tokens())  # it waits for nothing
        self._wakes(sender, model)
        ticket = WaitingTicket(cause)
        seconds = self._clock.to_wall(WAKE_SECONDS)
        self._dispatcher.arrive(ticket, model, kind="wake", hold_seconds=seconds)
        self._dispatcher.forget(ticket)
        outcome = ticket.outcome.result() if ticket.outcome.done() else None
        if isinstance(outcome, Reject):
            raise self._limits.error(sender, model, outcome)
        body = {"model": model, "state": "waking" if outcome is None else "active", "cause": cause}
        return web.json_response(body, status=202 if outcome is None else 200)

    def _wakes(self, sender: Caller, model: str) -> None:
        """Note that a tenant wakes a model. Raises RouterError 429 where it wakes too many others already."""
        if not sender.tenant:
            return
        tenant = self._limits.tenants.of(sender.tenant)
        most = (tenant and tenant.concurrency) or MOST_WAKING
        now, waking = time.monotonic(), self._waking.setdefault(sender.tenant, {})
        if not admits(waking, model, most, now, now + self._clock.to_wall(WAKE_SECONDS)):
            self._limits.rejected("tenant")
            text = f"the tenant {sender.tenant!r} wakes {len(waking)} other models; try again in 10 s"
            raise RouterError(429, "tenant_limit", text, 10)

    async def signals(self, request: web.Request) -> web.StreamResponse:
        """Publish another gateway's traffic levels: CloudEvents JSON, one or an array."""
        if request.content_type not in SIGNAL_TYPES:
            text = f"content type {request.content_type}: send application/cloudevents+json or application/json"
            raise RouterError(415, "unsupported_content_type", text)
        parsed: Any = json_of(await body_of(request, SIGNAL_BYTES))
        items = parsed if isinstance(parsed, list) else [parsed]
        if len(items) > SIGNAL_LIMIT:
            raise RouterError(413, "too_many_signals", f"{len(items)} signals in one call; at most {SIGNAL_LIMIT}")
        sender = sender_of(request)
        caller = sender.name or f"address {request.remote}"
        wait = self._quota.take(caller, len(items), time.monotonic())
        if wait:
            self._limits.rejected("signal_rate")
            text = f"more than {self._settings.signals_per_second:g} signals per second"
            raise RouterError(429, "too_many_signals", f"{text}; try again in {wait} s", wait)
        errors, slices = list[dict[str, Any]](), Slices()
        for index, item in enumerate(items):
            await slices.pause()
            try:
                signal = self._signal(item, sender, caller)
                for one in addressed(signal, self._dispatcher.traffic.table):
                    await self._bus.publish(one)
            except RouterError as error:
                if not isinstance(parsed, list):
                    raise
                errors.append({"index": index, "status": error.status, **error.body()["error"]})
            except BusError as error:
                raise RouterError(503, "bus_down", f"{index} of {len(items)} signals taken: {error}", 1) from error
        accepted = len(items) - len(errors)
        status = 202 if not errors else 207 if accepted else int(errors[0]["status"])
        return web.json_response({"accepted": accepted, "errors": errors}, status=status)

    def _signal(self, item: Any, sender: Caller, caller: str) -> TrafficSignal:
        if not isinstance(item, dict) or not isinstance(item.get("data"), dict):
            raise RouterError(
                400, "invalid_signal", 'a signal is a CloudEvent: {"specversion", "id", "source", "data": {…}}'
            )
        source = item.get("source")
        if not isinstance(source, str) or not printable(source):
            text = "the CloudEvent needs a source in printable characters, which identifies the gateway"
            raise RouterError(400, "invalid_signal", text)
        try:
            data = SignalData.model_validate(item["data"])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RouterError(400, "invalid_signal", f"data.{place}: {first['msg']}") from error
        data.model = self._limits.resolve(sender, data.model)
        ttl = data.ttl_seconds or SIGNAL_TTL_SECONDS
        if not self._quota.admits(caller, source, time.monotonic(), ttl):
            self._limits.rejected("signal_sources")
            text = f"signals of this caller name {self._settings.signal_sources} sources already"
            raise RouterError(429, "too_many_sources", f"{text}; try again when some have expired", 1)
        oldest = data.oldest_wait_seconds
        if oldest is None and data.oldest_wait_ms is not None:
            oldest = data.oldest_wait_ms / 1000
        self._seq = max(self._seq + 1, time.time_ns() // 1_000_000)
        return TrafficSignal(
            cause=cause_of(sender, given if printable(given := str(item.get("id") or "")) else source),
            source=source,
            **data.model_dump(include={"model", "tier", "waiting", "arrivals"}),
            seat=self._seat(data, sender),
            in_flight=data.in_flight or data.inflight,
            window_seconds=data.window_seconds or (data.window_ms or 1000.0) / 1000,
            oldest_wait_seconds=oldest,
            seq=self._seq,
            ttl_seconds=ttl,
        )

    def _seat(self, data: SignalData, sender: Caller) -> str | None:
        """Return the seat of the signal, or the model's only seat; None: the manager chooses. Raises RouterError."""
        seats = [record.seat for record in self._dispatcher.traffic.table.records_of(data.model)]
        if not seats:
            raise self._limits.not_found(sender, data.model)
        if data.seat is not None and data.seat not in seats:
            text = f"seat {data.seat!r} does not run {data.model}; it has {some(seats, 'kyb status')}"
            raise RouterError(404, "seat_not_found", text)
        return data.seat or (seats[0] if len(seats) == 1 else None)


def for_auth_request(hold: Handler) -> Handler:
    """Wrap the guarded handler of ``/v1/hold`` for nginx's auth_request, which knows 2xx, 401 and 403 only.

    With ``auth=1`` any error but a missing key becomes a 403 with the other status in ``X-Kyb-Status``.
    """

    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await hold(request)
        except RouterError as error:
            if request.query.get("auth") != "1" or error.status == 401:
                raise
            forbidden = error.response({"X-Kyb-Status": str(error.status), "X-Kyb-Code": error.code})
            forbidden.set_status(403)
            return forbidden

    return answered


def _duration(text: str | None) -> float | None:
    """Parse wall seconds: ``30``, ``30s`` or ``500ms``. Raises RouterError 400."""
    if text is None:
        return None
    try:
        return parse_seconds(text)
    except ValueError:
        raise RouterError(400, "invalid_timeout", f"timeout={text!r}: write seconds such as 30s, or 500ms") from None
