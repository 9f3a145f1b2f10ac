"""The hot path: find the model, hold while it is parked, forward, answer."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from kybernate.clock import Clock
from kybernate.logs import get_logger
from services.router.answers import Answer, ApiError, CallerGoneError
from services.router.dispatch import Dispatcher, SeatCutError, Ticket
from services.router.happenings import Forward, Refused, Reject
from services.router.metrics import Metrics
from services.router.proxy import RefusedError, Sent, forward
from services.router.settings import RouterSettings
from services.router.upstream import Upstreams


def cause_of(request: web.Request) -> str:
    """The caller's own id of this request, or a new one: the cause of everything that follows from it."""
    return request.headers.get("X-Request-Id") or uuid.uuid4().hex


async def body_of(request: web.Request) -> bytes:
    """The whole body. Raises ApiError 413 when it is too large."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"the body is larger than {request.client_max_size} bytes (KYB_BODY_BYTES)"
        raise ApiError(413, "body_too_large", text) from error


def object_of(body: bytes) -> dict[str, object]:
    """The JSON object that a body is. Raises ApiError 400."""
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


def model_of(parsed: dict[str, object]) -> str:
    """Which model the call is for. Raises ApiError 400."""
    model = parsed.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model_missing", 'the body must name its model: {"model": "…"}')
    return model


@dataclass
class Calls:
    """``POST /v1/…`` with a model in its JSON body."""

    settings: RouterSettings
    clock: Clock
    dispatcher: Dispatcher
    upstreams: Upstreams
    metrics: Metrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Hold if the model is parked, then pass the engine's answer through byte for byte."""
        arrived_at = time.time()
        cause = cause_of(request)
        model, code = "unknown", "499"
        answer = Answer(request)
        try:
            body = await body_of(request)
            parsed = object_of(body)
            model = model_of(parsed)
            ticket = self.dispatcher.arrive(model, cause, size=len(body))
            try:
                reply = await self._serve(request, body, ticket, answer, arrived_at, parsed.get("stream") is True)
            finally:
                self.dispatcher.end(ticket)
            code = str(reply.status)
            return reply
        except ApiError as error:
            code = str(error.status)
            model = "unknown" if error.code == "model_not_found" else model
            return await answer.fail(error, {"X-Kyb-Cause": cause})
        except CallerGoneError:
            return web.Response(status=499)
        finally:
            self.metrics.requests.labels(model, code).inc()
            get_logger().debug("request.answered", model=model, code=code, cause=cause)

    async def _serve(
        self, request: web.Request, body: bytes, ticket: Ticket, answer: Answer, arrived_at: float, stream: bool
    ) -> web.StreamResponse:
        retried = False
        while True:
            to = await self._outcome(ticket, answer, stream)
            if isinstance(to, Reject):
                raise ApiError.of(to)
            extra = _Headers(self, ticket, to, arrived_at)
            sent = Sent()
            try:
                reply = await forward(request, body, to, ticket, self.upstreams, answer, extra, sent)
            except SeatCutError:
                ticket.renew()  # nothing went out yet: it can wait for its model again
                self.metrics.cuts.labels("before_first_byte").inc()
                self.dispatcher.feed(Refused(ticket.request, suspect=False))
            except RefusedError as error:
                again = error.stale and not retried
                retried = True
                if again:
                    self.upstreams.disconnect(to.key)
                self.metrics.retries.inc()
                get_logger().info("engine.refused", seat=to.seat, error=str(error), cause=ticket.cause)
                self.dispatcher.feed(Refused(ticket.request, suspect=not again))
            else:
                self._measure(to, sent, arrived_at)
                return reply

    async def _outcome(self, ticket: Ticket, answer: Answer, stream: bool) -> Forward | Reject:
        """Wait for the decision; a waiting stream hears a comment now and then, if that is wanted."""
        every = self.settings.keepalive_seconds if stream and self.settings.keepalive_seconds > 0 else None
        while True:
            outcome = await ticket.outcome(timeout=every)
            if outcome is not None:
                return outcome
            await answer.keep_alive()

    def _measure(self, to: Forward, sent: Sent, arrived_at: float) -> None:
        if to.held_seconds > 0:
            self.metrics.hold_seconds.observe(to.held_seconds)
        if sent.first_byte_at is not None:
            self.metrics.first_byte_seconds.observe(sent.first_byte_at - arrived_at)

    def control(self, ticket: Ticket, to: Forward, sent: Sent, arrived_at: float) -> tuple[float | None, float | None]:
        """(overhead, release) of a hold that an activation ended, wall seconds; None where there is nothing to tell.

        Release is last backend call to sent upstream, for every call that waited. Overhead is for the one that caused
        the switch: arrival to accepted, decision to journaled (the manager's part), and its release.
        """
        event = self.dispatcher.traffic.activation(to.key, to.epoch) if to.opened else None
        if event is None or event.last_call_at is None or sent.sent_at is None or event.last_call_at < arrived_at:
            return None, None
        release = max(0.0, sent.sent_at - event.last_call_at)
        self.metrics.release_seconds.observe(release)
        if ticket.cause != event.cause:
            return None, release
        parts = {
            "accept": ticket.accepted_at - arrived_at if ticket.accepted_at is not None else 0.0,
            "journal": event.seconds.get("control", 0.0),
            "send": release,
        }
        for part, seconds in parts.items():
            self.metrics.control_part_seconds.labels(part).observe(seconds)
        overhead = sum(parts.values())
        self.metrics.control_seconds.observe(overhead)
        return overhead, release


@dataclass(frozen=True, slots=True)
class _Headers:
    """The ``x-kyb-*`` headers of an answer, made when it begins."""

    calls: Calls
    ticket: Ticket
    to: Forward
    arrived_at: float

    def __call__(self, sent: Sent) -> Mapping[str, str]:
        calls, to = self.calls, self.to
        headers = {
            "X-Kyb-Seat": to.seat,
            "X-Kyb-Held-Seconds": f"{calls.clock.to_model(to.held_seconds):.3f}",
            "X-Kyb-Cause": self.ticket.cause,
        }
        overhead, release = calls.control(self.ticket, to, sent, self.arrived_at)
        if overhead is not None:
            headers["X-Kyb-Overhead-Seconds"] = f"{overhead:.6f}"
        if release is not None:
            headers["X-Kyb-Release-Seconds"] = f"{release:.6f}"
        return headers
