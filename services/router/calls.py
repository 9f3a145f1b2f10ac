"""The request path: parse the model, hold while it is parked, forward, respond."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from kybernate.clock import Clock
from kybernate.logs import get_logger
from services.router.api import (
    LONGEST_NAME,
    CallerGoneError,
    CallerResponse,
    RouterError,
    cause_of,
    model_of,
    patience_of,
    priority_of,
)
from services.router.auth import highest_priority
from services.router.core.step import CallReturned, Forward, Reject
from services.router.dispatch import CallTicket, Dispatcher, SeatCutError
from services.router.intake import Intake
from services.router.metrics import Metrics
from services.router.proxy import CallTimes, ConnectionPools, EngineClock, UpstreamRefusedError, forward
from services.router.request_log import WAITED_IN_VAIN, CallRecord, RequestLog
from services.router.settings import RouterSettings

MOST_BREAKS = 3
"""A call that engines accepted and then dropped this often is not forwarded again: the call itself may crash them."""


@dataclass
class Calls:
    """``POST /v1/…`` with a model in its JSON body."""

    settings: RouterSettings
    clock: Clock
    dispatcher: Dispatcher
    pools: ConnectionPools
    metrics: Metrics
    intake: Intake
    log: RequestLog
    paths: frozenset[str]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Hold if the model is parked, then stream the engine's response byte for byte."""
        cause = cause_of(request)
        call = CallRecord(time.time(), cause)
        code = "499"
        response = CallerResponse(request)
        try:
            self._check_path(request)
            priority, patience = priority_of(request, highest_priority(request)), patience_of(request)
            with self.intake.body(request, self.settings.body_bytes) as received:
                body = await received.read()
                fields = await received.fields(body)
                call.model = model_of(fields.model)
                ticket = self.dispatcher.arrive(call.model, cause, hold_seconds=patience, priority=priority)
                answered: bool | None = None
                try:
                    reply = await self._serve(request, body, ticket, response, call, fields.stream is True)
                    answered = True if 200 <= reply.status < 300 else None
                except (CallerGoneError, asyncio.CancelledError):
                    answered = response.answered
                    code = "200" if answered else code
                    raise
                finally:
                    self.dispatcher.end(ticket, answered=answered)
            code = str(reply.status)
            return reply
        except RouterError as error:
            code, call.reason = str(error.status), error.code
            if error.code == "queue_full":
                self.intake.rejected("queue")
            return await self._fail(response, error, cause)
        except CallerGoneError:
            return web.Response(status=499)
        except Exception:
            code = "500"
            raise
        finally:
            known = self.dispatcher.traffic.serves(call.model)
            self.metrics.requests.labels(call.model if known else "unknown", code).inc()
            self.log.note(call, int(code), known=known)
            if known:
                self.metrics.slo.labels(call.model, "", "missed").inc(call.reason in WAITED_IN_VAIN)

    async def _fail(self, response: CallerResponse, error: RouterError, cause: str) -> web.StreamResponse:
        """Report an error. The call has ended already, so a slow caller keeps no seat from being parked."""
        if response.first_byte and error.code == "seat_evicted":
            self.metrics.cuts.labels("after_first_byte").inc()
        try:
            return await response.fail(error, {"X-Kyb-Cause": cause})
        except CallerGoneError:
            return web.Response(status=499)

    async def _serve(
        self,
        request: web.Request,
        body: bytes,
        ticket: CallTicket,
        response: CallerResponse,
        call: CallRecord,
        stream: bool,
    ) -> web.StreamResponse:
        retried, breaks = False, 0
        silent: RouterError | None = None
        while True:
            to = await self._outcome(ticket, response, stream)
            if isinstance(to, Reject):
                raise silent or RouterError.of(to)
            call.to = to
            headers, times = partial(self._headers, ticket, to, call.arrived_at), CallTimes()
            clock = EngineClock(ticket, self.settings.first_byte_seconds, self.settings.silence_seconds)
            clock.frozen = partial(self.dispatcher.traffic.frozen, to.key)
            try:
                reply = await forward(request, body, to, ticket, self.pools, response, headers, times, clock)
            except SeatCutError as error:
                ticket.renew()  # nothing was sent to the caller: it can wait for its model again
                late = error.code == "engine_silent"
                if late and silent is not None:
                    raise silent from error
                if late:
                    silent = _silent(to, self.settings.first_byte_seconds)
                    self.metrics.rejections.labels("engine_silent").inc()
                self.metrics.cuts.labels("before_first_byte").inc()
                self.dispatcher.feed(CallReturned(ticket.request, suspect=late))
            except UpstreamRefusedError as error:
                again = error.stale and not retried
                retried = True
                if again:
                    self.pools.disconnect(to.key)
                elif times.sent_at is not None:
                    breaks += 1
                self.metrics.retries.inc()
                get_logger().info("engine.refused", seat=to.seat, error=str(error), cause=ticket.cause)
                if breaks == MOST_BREAKS:
                    raise _breaks(to, error) from error
                self.dispatcher.feed(CallReturned(ticket.request, suspect=not again))
            except (CallerGoneError, asyncio.CancelledError):
                if response.answered:
                    self._count_waits(call, to, times)
                raise
            else:
                self._count_waits(call, to, times)
                return reply

    def _count_waits(self, call: CallRecord, to: Forward, times: CallTimes) -> None:
        """Count a call that was served: its wait, the time to its first byte, and whether it waited too long."""
        call.first_byte_at = times.first_byte_at
        known = self.dispatcher.traffic.table.upstreams.get(to.key)
        labels = (call.model, known.record.tier if known is not None else "")
        if to.held_seconds > 0:
            self.metrics.hold_seconds.labels(*labels).observe(to.held_seconds)
        if call.first_byte_at is not None:
            self.metrics.first_byte_seconds.labels(*labels).observe(call.first_byte_at - call.arrived_at)
        slo = known.record.slo_seconds if known is not None else 0.0
        missed = 0 < slo < self.clock.to_model(to.held_seconds)
        self.metrics.slo.labels(*labels, "missed").inc(missed)  # both: a series that begins at 1 has no increase
        self.metrics.slo.labels(*labels, "met").inc(not missed)

    def _check_path(self, request: web.Request) -> None:
        """Raise RouterError 404 for a path that is no inference call: engines have others that are not for callers."""
        path = request.rel_url.raw_path
        if path not in self.paths:
            text = (
                f"POST {path[:LONGEST_NAME]} is not forwarded to engines; allow it with KYB_ENGINE_PATHS if it is safe"
            )
            raise RouterError(404, "not_found", text)

    async def _outcome(self, ticket: CallTicket, response: CallerResponse, stream: bool) -> Forward | Reject:
        """Wait for the decision; a waiting stream gets a comment every ``keepalive_seconds``, if that is set."""
        every = self.settings.keepalive_seconds if stream and self.settings.keepalive_seconds > 0 else None
        while True:
            outcome = await ticket.outcome(timeout=every)
            if outcome is not None:
                return outcome
            await response.keep_alive()

    def _headers(self, ticket: CallTicket, to: Forward, arrived_at: float, times: CallTimes) -> Mapping[str, str]:
        """Return the ``x-kyb-*`` headers of a response that begins now."""
        headers = {
            "X-Kyb-Seat": to.seat,
            "X-Kyb-Held-Seconds": f"{self.clock.to_model(to.held_seconds):.3f}",
            "X-Kyb-Cause": ticket.cause,
        }
        overhead, release = self._control(ticket, to, times, arrived_at)
        if overhead is not None:
            headers["X-Kyb-Overhead-Seconds"] = f"{overhead:.6f}"
        if release is not None:
            headers["X-Kyb-Release-Seconds"] = f"{release:.6f}"
        return headers

    def _control(
        self, ticket: CallTicket, to: Forward, times: CallTimes, arrived_at: float
    ) -> tuple[float | None, float | None]:
        """Return (overhead, release) of a hold that an activation ended, in wall seconds; None where not applicable.

        Release is the time from the last backend call to sent upstream, for every call that waited. Overhead is for the
        call that caused the switch: arrival to accepted, decision to journaled (the manager's part), and its release.
        """
        event = self.dispatcher.traffic.activation(to.key, to.epoch) if to.opened else None
        if event is None or event.last_call_at is None or times.sent_at is None or event.last_call_at < arrived_at:
            return None, None
        release = max(0.0, times.sent_at - event.last_call_at)
        self.metrics.release_seconds.observe(release)
        if ticket.cause != event.cause:
            return None, release
        parts = {
            "accept": max(0.0, ticket.accepted_at - arrived_at) if ticket.accepted_at is not None else 0.0,
            "journal": event.seconds.get("control", 0.0),
            "send": release,
        }
        for part, seconds in parts.items():
            self.metrics.control_part_seconds.labels(part).observe(seconds)
        overhead = sum(parts.values())
        self.metrics.control_seconds.observe(overhead)
        return overhead, release


def _silent(to: Forward, seconds: float) -> RouterError:
    text = f"the engine of seat {to.seat} sent nothing within {seconds:g} s (KYB_FIRST_BYTE_SECONDS), twice"
    return RouterError(504, "engine_timeout", f"{text}; try again later", 10)


def _breaks(to: Forward, error: UpstreamRefusedError) -> RouterError:
    text = f"an engine dropped this request {MOST_BREAKS} times before responding: the request itself may crash it"
    return RouterError(503, "upstream_failed", f"{text}; last seat {to.seat}: {error}; try again", 1)
