"""The hot path: find the model, hold while it is parked, forward, answer."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

LONGEST_NAME = 512
"""Characters of a model's name, and of a caller's id."""
MOST_BREAKS = 3
"""A call that so many engines took and broke off is not given to another one: it may be what breaks them."""


def sayable(text: str) -> bool:
    """Whether others can be told this: on the bus, in logs, as a label. Bytes that are no UTF-8 cannot be said."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def cause_of(request: web.Request) -> str:
    """The caller's own id of this request, or a new one: the cause of everything that follows from it."""
    told = request.headers.get("X-Request-Id", "")
    return told if sayable(told) else uuid.uuid4().hex


async def body_of(request: web.Request) -> bytes:
    """The whole body, unpacked. Raises ApiError 413 when it is too large, 400 when it cannot be unpacked."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"the body is larger than {request.client_max_size} bytes (KYB_BODY_BYTES)"
        raise ApiError(413, "body_too_large", text) from error
    except web.RequestPayloadError as error:
        text = f"the body cannot be read as its headers say (Content-Encoding, Transfer-Encoding): {error}"
        raise ApiError(400, "invalid_body", " ".join(text.split())) from error


def json_of(body: bytes) -> Any:
    """What a body says. Raises ApiError 400."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error


def object_of(body: bytes) -> dict[str, object]:
    """The JSON object that a body is. Raises ApiError 400."""
    parsed = json_of(body)
    if not isinstance(parsed, dict):
        raise ApiError(400, "invalid_json", f"the body must be a JSON object, not {type(parsed).__name__}")
    return parsed


def model_of(parsed: Mapping[str, object], how: str = 'the body must name its model: {"model": "…"}') -> str:
    """Which model the call is for; ``how`` it is said. Raises ApiError 400."""
    model = parsed.get("model")
    if not isinstance(model, str) or not sayable(model):
        raise ApiError(400, "model_missing", f"{how}, in at most {LONGEST_NAME} printable characters")
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
        model, code = "", "499"
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
            return await self._fail(answer, error, cause)
        except CallerGoneError:
            return web.Response(status=499)
        except Exception:
            code = "500"
            raise
        finally:
            label = model if self.dispatcher.traffic.serves(model) else "unknown"
            self.metrics.requests.labels(label, code).inc()
            get_logger().debug("request.answered", model=model, code=code, cause=cause)

    async def _fail(self, answer: Answer, error: ApiError, cause: str) -> web.StreamResponse:
        """Say what went wrong. The call has ended: no seat waits for a caller who reads slowly."""
        if answer.first_byte and error.code == "seat_evicted":
            self.metrics.cuts.labels("after_first_byte").inc()
        try:
            return await answer.fail(error, {"X-Kyb-Cause": cause})
        except CallerGoneError:
            return web.Response(status=499)

    async def _serve(
        self, request: web.Request, body: bytes, ticket: Ticket, answer: Answer, arrived_at: float, stream: bool
    ) -> web.StreamResponse:
        retried, breaks = False, 0
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
                elif sent.sent_at is not None:
                    breaks += 1
                self.metrics.retries.inc()
                get_logger().info("engine.refused", seat=to.seat, error=str(error), cause=ticket.cause)
                if breaks == MOST_BREAKS:
                    raise _breaks(to, error) from error
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


def _breaks(to: Forward, error: RefusedError) -> ApiError:
    text = f"{MOST_BREAKS} times an engine took this request and broke off before it answered, last seat {to.seat}"
    return ApiError(503, "upstream_failed", f"{text}: {error}; try again", 1)
