"""One inference call: parse its model, hold while it is parked, forward, relay the engine's answer byte for byte."""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from kybernate.clock import Clock
from kybernate.http.connection import CallerConnection
from kybernate.http.framing import Body
from kybernate.http.head import HOP_BY_HOP, Head
from kybernate.http.intake import BodyError, Intake, RequestBody
from kybernate.http_api import printable, random_id
from kybernate.lifecycle import spawn
from kybernate.logs import get_logger
from kybernate.messages import SeatActivated
from services.router.answer import Answer, no_stream
from services.router.api import RouterError, model_of, patience_of, priority_of
from services.router.auth import ApiKeyGuard, Caller
from services.router.core.body import RoutingFields, media_bytes, renamed, routing_fields
from services.router.core.step import Forward, Reject
from services.router.core.tenants import AnswerTokens, Tokens
from services.router.dispatch import Dispatcher
from services.router.engines import EngineConnection, EngineError, EnginePools
from services.router.limits import TenantLimits
from services.router.metrics import Metrics
from services.router.request_log import CallRecord, RequestLog
from services.router.settings import RouterSettings

if TYPE_CHECKING:
    from services.router.request_spans import RequestSpan, Tracer

P = ParamSpec("P")
MOST_BREAKS = 3
"""A call that engines accepted and then dropped this often is not forwarded again: the call itself may crash them."""
MOST_EVICTIONS = 3
"""A call whose seat was parked this often before the first byte is not forwarded again: it might go on for ever."""
ENDING = frozenset({500, 502, 503})
"""Statuses of an engine whose worker has died: its container ends, and the call is sent again."""
ENDING_SECONDS = 1.0
"""How long such an answer is held back: until the engine accepts no connections any more (vLLM: 35 ms, while its
process goes on for 1 s), or the manager has seen the container end."""
MEDIA = b"audio/", b"image/", b"video/", b"application/octet-stream"
"""Types of answers whose bytes are no tokens."""
NO_TEXT = b"/embeddings", b"/pooling", b"/images/generations", b"/images/edits", b"/images/variations"
"""Ends of paths whose answers are numbers or pictures, whose bytes are no tokens either."""
_NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"content-encoding", b"expect", b"x-request-id", b"origin"}
"""The body was read: its length is set anew, and it has no encoding."""
_NOT_RETURNED = HOP_BY_HOP | {
    b"content-length", b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-expose-headers", b"x-accel-buffering",
}  # fmt: skip
"""Which pages may read an answer is decided here, and whether nginx may keep a part of it."""


def cause_of(caller: Caller, given: str) -> str:
    """Return the id of a request: the given one, which belongs to the caller's tenant; a new one without it."""
    named = f"{caller.tenant}:{given}" if caller.tenant else given
    return named if given and printable(named) else random_id()


@dataclass
class Calls:
    """What all inference calls of a router use."""

    settings: RouterSettings
    clock: Clock
    dispatcher: Dispatcher
    pools: EnginePools
    metrics: Metrics
    intake: Intake
    records: RequestLog
    guard: ApiKeyGuard
    paths: frozenset[bytes]
    """Of engines, that are forwarded."""
    limits: TenantLimits
    tracer: "Tracer | None" = None

    def __post_init__(self) -> None:
        self.log = get_logger().bind()
        self.tasks: set[asyncio.Task[None]] = set()

    def under_way(self) -> list[CallRecord]:
        """Return those of the calls under way."""
        return [one._record for one in self.dispatcher.tickets if isinstance(one, Call)]

    def begin(self, connection: CallerConnection, head: Head) -> "Call":
        """Begin a call, whose body follows. Raises RouterError."""
        fields = head.fields()
        caller = self.guard.admit(fields, ("infer",), "POST", head.target.decode("latin-1"))
        try:
            return Call(self, connection, head, fields, caller)
        except RouterError as error:
            self.guard.release(caller)
            self.metrics.answered("unknown", str(error.status))
            raise


def _alone(method: Callable[Concatenate["Call", P], None]) -> Callable[Concatenate["Call", P], None]:
    """An unexpected error ends the call; the router and its other calls go on. (What gets an answer needs no such
    wrapper: the engine's connection reports its errors to ``failed``.)"""

    @functools.wraps(method)
    def run(call: "Call", /, *args: P.args, **more: P.kwargs) -> None:
        try:
            method(call, *args, **more)
        except Exception as error:
            call.failed(error)

    return run


class Call:
    """One call, from its head to its end."""

    __slots__ = (
        "_answer", "_body", "_breaks", "_caller", "_calls", "_comments", "_connection", "_engine", "_evictions",
        "_fields", "_head", "_held_back", "_lines", "_over", "_record", "_retried", "_silent", "_span", "_task", "_to",
        "_tokens", "accepted_at", "body", "cause", "request", "sent_at", "waiting",
    )  # fmt: skip

    def __init__(
        self, calls: Calls, connection: CallerConnection, head: Head, fields: Mapping[str, str], caller: Caller
    ) -> None:
        secret = b"x-request-id" in calls.guard.withheld(head)
        self.cause = cause_of(caller, "" if secret else fields.get("x-request-id", ""))
        self.request, self.waiting = 0, True
        self.accepted_at: float | None = None
        self._calls, self._connection, self._head, self._caller = calls, connection, head, caller
        self._record = CallRecord(time.time(), self.cause, traceparent=fields.get("traceparent"))
        self._answer = Answer(connection, head.version == "1.0")
        self.body = RequestBody(
            calls.intake,
            head,
            fields,
            caller.name or f"address {connection.address}",
            calls.settings.body_bytes,
            "KYB_BODY_BYTES",
        )
        self._body = b""
        """As engines get it."""
        self._fields = RoutingFields()
        self._over = False
        self._task: asyncio.Task[None] | asyncio.Task[bool] | None = None
        self._comments: asyncio.TimerHandle | None = None
        # At the engine:
        self._to: Forward | None = None
        self._lines = b""
        """The caller's header fields, as engines get them."""
        self._engine: EngineConnection | None = None
        self._held_back = False
        """Whether the task has its answer, which is sent only if the engine stays."""
        self.sent_at: float | None = None
        self._retried, self._breaks, self._evictions = False, 0, 0
        self._silent: RouterError | None = None
        self._tokens: AnswerTokens | None = None
        """Of the answer; None before the tenant's limits have admitted the call, and without keys."""
        self._span: RequestSpan | None = None
        if calls.tracer is not None:
            self._span = calls.tracer.begin(self._record, head, calls.guard.withheld(head), caller.tenant)
            self._record.traceparent = self._span.traceparent

    # --- the request --------------------------------------------------------------------------------------------------

    @_alone
    def ready(self, body: bytes) -> None:
        """The body is complete: find the model, and ask for a seat."""
        try:
            self._arrive(body)
        except RouterError as error:
            self.fail(error)

    def _arrive(self, body: bytes) -> None:
        self._body, given = body, self._head.fields()
        try:
            fields = self._fields = routing_fields(body, given.get("content-type", ""))
        except BodyError as error:
            raise self._calls.intake.refused(error) from error
        name = self._record.model = model_of(fields.model)
        calls, caller = self._calls, self._caller
        priority, (patience, by) = priority_of(given, caller.highest_priority), patience_of(given)
        model = self._record.model = calls.limits.begin(caller, name)
        if caller.tenant:
            self._tokens = AnswerTokens(media=self._head.target.partition(b"?")[0].endswith(NO_TEXT))
        if model != name:
            self._body = self.body.replaced(renamed(self._body, fields, model))
        self._wait()
        calls.dispatcher.arrive(self, model, hold_seconds=patience, by=by, priority=priority, tenant=caller.lane)

    def _wait(self) -> None:
        """Send a comment to a caller that waits for a stream every ``keepalive_seconds``, if that is set."""
        seconds = self._calls.settings.keepalive_seconds
        if seconds > 0 and self._fields.stream is True:
            self._comments = asyncio.get_running_loop().call_later(seconds, self._comment)

    @_alone
    def _comment(self) -> None:
        self._answer.comment()
        self._wait()

    # --- decisions ----------------------------------------------------------------------------------------------------

    @_alone
    def decide(self, outcome: Forward | Reject) -> None:
        """Forward or reject the call."""
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None
        if isinstance(outcome, Reject):
            self.fail(self._silent or self._calls.limits.error(self._caller, self._record.model, outcome))
        else:
            self._forward(outcome)

    @_alone
    def cut(self, code: str) -> None:
        """End the call at its seat: it waits again, unless the caller has got a part of the answer."""
        taken = self._engine is not None or self._held_back
        to = self._leave_engine()
        if to is None or self._over:
            return
        model = self._record.model
        if self._answer.first_byte:
            if code == "seat_evicted":
                self._calls.metrics.cuts.labels("after_first_byte").inc()
                text = f"model {model} was parked before the answer was complete; try again"
                self.fail(RouterError(503, "seat_evicted", text, 1))
            else:
                self._broke_off(to, "it was silent for too long" if code == "engine_silent" else "its seat was lost")
            return
        late = code == "engine_silent"
        if late:
            again, seconds = self._silent is not None, self._calls.settings.first_byte_seconds
            text = f"the engine of model {model} sent nothing within {seconds:g} s"
            text = f"{text}{', twice' if again else ''}; try again later"
            self._silent = RouterError(504, "engine_timeout", text, 10)
            if again:
                self.fail(self._silent)
                return
            self._calls.metrics.rejections.labels("engine_silent").inc()
        self._calls.metrics.cuts.labels("before_first_byte").inc()
        self._evictions += taken and code == "seat_evicted"
        self._breaks += taken and code == "upstream_failed"
        if self._evictions == MOST_EVICTIONS:
            text = f"model {model} was parked {MOST_EVICTIONS} times before it responded to this request; try again"
            self.fail(RouterError(503, "seat_evicted", text, 1))
        elif self._breaks == MOST_BREAKS:
            self._crashes("its seat was lost")
        else:
            self._again(suspect=late, taken=taken)

    def _again(self, *, suspect: bool, taken: bool) -> None:
        self.sent_at = None
        record = self._record
        if taken and record.forwarded_at is not None:
            record.lost_seconds += max(0.0, time.time() - record.forwarded_at)
        record.waits = True
        self._wait()
        self._calls.dispatcher.again(self, suspect=suspect, taken=taken)

    def _forward(self, to: Forward) -> None:
        record, self._to, self.sent_at = self._record, to, None
        record.to, record.forwarded_at, record.waits = to, time.time(), False
        without, withheld = _NOT_SENT, self._calls.guard.withheld(self._head)
        if withheld:
            without |= withheld
        self._lines = self._head.passed(without) if self._span is None else self._span.passed(self._head, without)
        pools = self._calls.pools
        pool = pools.pool(to.key, to.endpoint)
        connection = pools.take(pool)
        if connection is not None:
            self.connected(connection)
        else:
            self._task = pools.connect(pool, self)

    def _leave_engine(self) -> Forward | None:
        """End what is under way at an engine; return where that was."""
        to, self._to = self._to, None
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.drop()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._held_back = False
        return to

    # --- what the engine's connection calls ---------------------------------------------------------------------------

    @_alone
    def connected(self, connection: EngineConnection) -> None:
        """Send the request."""
        self._task, self._engine = None, connection
        pool, cause = connection.pool, self.cause.encode("utf-8", "surrogateescape")
        connection.clock.set(self._calls.settings.first_byte_seconds)
        connection.send(
            self,
            b"POST %b%b HTTP/1.1\r\nHost: %b\r\n%bX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n"
            % (pool.prefix, self._head.target, pool.authority, self._lines, cause, len(self._body)),
            self._body,
        )

    @_alone
    def silent(self, connection: EngineConnection) -> None:
        """Cut the call, unless its caller does not read."""
        settings = self._calls.settings
        if self._connection.slow:
            connection.clock.set(settings.silence_seconds if self._answer.first_byte else settings.first_byte_seconds)
        else:
            self.cut("engine_silent")

    @_alone
    def refused(self, error: EngineError) -> None:
        """Try again elsewhere."""
        self._task = None
        self.broke(error)

    @_alone
    def broke(self, error: EngineError) -> None:
        """Repeat the call if the caller has got nothing of an answer yet, and if it did not break too often."""
        taken, self._engine = self._engine is not None or self._held_back, None
        to = self._leave_engine()
        if to is None or self._over:
            return
        if self._answer.first_byte:
            self._broke_off(to, str(error))
            return
        again = error.stale and not self._retried
        self._retried = True
        if again:
            self._calls.pools.disconnect(to.key)
        elif taken:  # the whole request, or a part of a long one
            self._breaks += 1
        self._calls.metrics.retries.inc()
        self._calls.log.info("engine.refused", seat=to.seat, error=str(error), cause=self.cause)
        if self._breaks == MOST_BREAKS:
            self._crashes(str(error))
        else:
            self._again(suspect=not again, taken=taken)

    def _crashes(self, last: str) -> None:
        text = f"an engine dropped this request {MOST_BREAKS} times before responding: the request itself may crash it"
        self.fail(RouterError(503, "upstream_failed", f"{text}; at last {last}; try again", 1))

    def _broke_off(self, to: Forward, what: str) -> None:
        self._calls.log.info("engine.broke_off", seat=to.seat, error=what)
        text = f"the engine of model {self._record.model} broke off: {what}; try again"
        self.fail(RouterError(503, "upstream_failed", text, 1))

    def whole(self, head: Head, body: bytes) -> None:
        """Send a complete answer; one that a dying engine may have sent only if the engine stays."""
        self._engine = None
        if head.status in ENDING and self._to is not None:
            self._held_back = True
            self._task = spawn(self._calls.tasks, self._hold_back(self._to, head, body))
        else:
            self._send_back(head, body)

    async def _hold_back(self, to: Forward, head: Head, body: bytes) -> None:
        await asyncio.sleep(ENDING_SECONDS)
        pools = self._calls.pools
        stays = await pools.accepts(pools.pool(to.key, to.endpoint))
        self._task = None
        if stays:
            self._send_back(head, body)
        else:
            self.broke(EngineError(f"it ended after an answer with status {head.status}"))

    @_alone
    def _send_back(self, head: Head, body: bytes) -> None:
        if self._tokens is not None:
            self._tokens.media |= head.media.startswith(MEDIA)
            self._tokens.feed(body)
        self._answer.whole(head, self._own_lines(head), body)
        self._complete()

    def began(self, head: Head, body: Body) -> None:
        """Begin a streamed answer."""
        if not self._answer.fits(head):
            self.fail(no_stream(head.status))
            return
        if self._tokens is not None:
            self._tokens.media |= head.media.startswith(MEDIA)
        if self._connection.slow:
            self.pause()
        self._answer.begin(head, body, self._own_lines(head))

    def piece(self, raw: bytes, payload: bytes, *, last: bool) -> None:
        """Relay a piece of the answer."""
        if self._over:
            return  # beginning the answer has failed
        if last:
            self._engine = None  # it may serve another call already
        elif self._engine is not None:
            self._engine.clock.set(self._calls.settings.silence_seconds)
        if self._tokens is not None:
            self._tokens.feed(payload)
        self._answer.piece(raw, payload, last=last)
        if last:
            self._complete()

    # --- the end ------------------------------------------------------------------------------------------------------

    @property
    def unanswered(self) -> bool:
        """Whether an interim answer may be sent."""
        return not self._answer.began and self._head.version == "1.1"

    def _complete(self) -> None:
        """The answer is complete."""
        status = self._answer.status
        self._end(status, answered=True if 200 <= status < 300 else None, served=True)

    def fail(self, error: RouterError) -> None:
        """Report an error: as a response, as an event of the stream, or else by a reset of the connection."""
        if self._over:
            return
        if error.code == "queue_full":
            self._calls.intake.rejected("queue")
        self._record.reason = error.code
        self._end(error.status)  # first: a slow caller keeps no seat from being parked
        self._answer.fail(error, self.cause)

    def gone(self) -> None:
        """The caller has closed its connection."""
        if self._answer.done:
            self._end(200, answered=True, served=True)
        else:
            self._end(499, answered=None if self._answer.first_byte else False)

    def pause(self) -> None:
        """The caller reads too slowly: read no further from the engine."""
        if self._engine is not None:
            self._engine.pause()

    def resume(self) -> None:
        """Read from the engine again."""
        if self._engine is not None:
            self._engine.resume()

    def failed(self, error: Exception) -> None:
        """End the call after an error of the router's own."""
        self._calls.log.error("request.failed", path=self._head.target.decode("latin-1"), exc_info=error)
        if self._over:
            self._connection.abort()
        else:
            self.fail(RouterError(500, "internal_error", "the router failed at this request; see its log"))

    def _end(self, status: int, *, answered: bool | None = None, served: bool = False) -> None:
        """The call is over: give back all that it uses."""
        if self._over:
            return
        self._over = True
        if self._comments is not None:
            self._comments.cancel()
        # Errors cost nothing; one that leaves pays for its request once an engine has it, and for what has arrived.
        paid = self._answer.status < 400 if self._answer.first_byte else status == 499 and self._engine is not None
        self._leave_engine()
        calls, record = self._calls, self._record
        record.none = self._answer.none
        calls.guard.release(self._caller)
        calls.dispatcher.end(self, answered=answered)
        if self._tokens is not None:
            record.tokens = self._tokens.tokens(self._text_bytes, complete=answered is True) if paid else Tokens()
            calls.limits.end(self._caller, record.model, record.tokens)
        self._body = b""
        traffic = calls.dispatcher.traffic
        seat = traffic.table.upstreams.get(record.to.key) if record.to is not None else None
        known = seat is not None or traffic.serves(record.model)
        of = seat.record if seat is not None else None
        calls.metrics.ended(record, status, known=known, served=served, seat=of)
        calls.records.ended(record, status, known=known)
        if self._span is not None:
            self._span.end(record, status)

    def _text_bytes(self) -> int:
        """Return the bytes of text in the request, for the estimate of its tokens."""
        text = self._fields.text_bytes
        return len(self._body) - media_bytes(self._body) if text is None else text

    def _own_lines(self, head: Head) -> bytes:
        """Return the header lines of an answer that begins now: those of the engine, and Kybernate's own."""
        to = self._to
        assert to is not None
        self._record.first_byte_at = time.time()
        held, cause = self._calls.clock.to_model(to.held_seconds), self.cause.encode("utf-8", "surrogateescape")
        own = b"X-Kyb-Seat: %b\r\nX-Kyb-Held-Seconds: %.3f\r\nX-Kyb-Cause: %b\r\n" % (to.seat.encode(), held, cause)
        lines = head.passed(_NOT_RETURNED) + own
        if to.opened is not None:
            times = self._activation_seconds(to.opened)
            lines += b"".join(b"X-Kyb-%b-Seconds: %.6f\r\n" % (name, seconds) for name, seconds in times.items())
        return lines

    def _activation_seconds(self, event: SeatActivated) -> dict[bytes, float]:
        """Return the overhead and the release of a hold that an activation ended, as far as they are known.

        Release is the time from the last backend call to sent upstream, for every call that waited. Overhead is for the
        call that caused the switch: arrival to accepted, decision to journaled (the manager's part), and its release.
        """
        arrived_at, metrics = self._record.arrived_at, self._calls.metrics
        if event.last_call_at is None or self.sent_at is None or event.last_call_at < arrived_at:
            return {}
        release = max(0.0, self.sent_at - event.last_call_at)
        metrics.release_seconds.observe(release)
        if self.cause != event.cause:
            return {b"Release": release}
        parts = {
            "accept": max(0.0, self.accepted_at - arrived_at) if self.accepted_at is not None else 0.0,
            "journal": event.seconds.get("control", 0.0),
            "send": release,
        }
        for part, seconds in parts.items():
            metrics.control_part_seconds.labels(part).observe(seconds)
        overhead = sum(parts.values())
        metrics.control_seconds.observe(overhead)
        return {b"Overhead": overhead, b"Release": release}
