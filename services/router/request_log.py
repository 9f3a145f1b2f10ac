"""What is reported of each call: an access line, the record of one that was held or failed."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.logs import get_logger
from kybernate.messages import EngineFaults, RequestEnded
from services.router.core.step import Forward
from services.router.core.tenants import Tokens

MOST_WAITING = 1_000
"""Records that wait to be published; further ones are dropped."""
PAUSE_SECONDS = 0.01
"""Between two records: a router publishes at most a hundred in a second."""
ACCESS_FIELDS = {"cause", "model", "node", "seat", "held_seconds", "first_byte_seconds", "seconds", "status", "reason"}
"""Fields of an access line."""
OF_ENGINES = ("", "upstream_failed", "engine_timeout")
"""Reasons of answers that are their engine's, or missing because of it."""
LAST = 20
"""Answers of a model in which errors are looked for."""
FEWEST = 3
"""Errors among them that are reported; of a model that has answered, one request without a byte is, and of another one
after ``FIRST_SECONDS``."""
FIRST_SECONDS = 300.0
FORGET_SECONDS = 3600.0
"""After the last error."""
SILENT_SECONDS = 60.0
"""Without a byte of an answer; ``SILENT_TIMES`` the usual time where that is longer."""
SILENT_TIMES = 10
SILENT = f"without a byte for more than {SILENT_SECONDS:g} s"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(slots=True)
class CallRecord:
    """What is known of one call so far."""

    arrived_at: float
    """Unix seconds."""
    cause: str
    model: str = ""
    to: Forward | None = None
    """Where it was forwarded last."""
    forwarded_at: float | None = None
    """When, unix seconds."""
    waits: bool = True
    """For a seat, for the first time or again."""
    lost_seconds: float = 0.0
    """At engines that took it and were lost before they responded: that was no wait."""
    first_byte_at: float | None = None
    """Unix seconds."""
    reason: str = ""
    """Code of the error, if it failed."""
    none: str = ""
    """What its engine sent in place of an answer."""
    traceparent: str | None = None
    """Of the router's span, else of the caller's, which may be invalid."""
    tokens: Tokens | None = None
    """Counted for its caller's tenant; None: not counted."""

    def held_seconds(self, now: float) -> float:
        """Wall seconds of all its waits: until it was forwarded last, or until ``now`` (unix seconds) if it waits."""
        if self.to is not None and not self.waits:
            return self.to.held_seconds
        return max(0.0, now - self.arrived_at - self.lost_seconds)


class Faults:
    """Answers of models: of each from its first 5xx until its last ones are all good, and those in a row that were
    none. Times are unix seconds."""

    def __init__(self) -> None:
        self._none: dict[str, EngineFaults] = {}
        """By model whose last answer was none: how many in a row were the same."""
        self._usual: dict[str, tuple[float, float]] = {}
        """By model: usual seconds until the first byte of an answer, and when the last answer ended."""
        self._models: dict[str, tuple[float, deque[float]]] = {}
        """By model: when the first error was, and when each of the last answers was one; 0 for a good one."""

    def answered(self, model: str, status: int, now: float, none: str = "", took: float = 0.0) -> None:
        """Take the status of an answer, what was in its place, and the seconds until its first byte."""
        if none == "429" and now - self._usual.get(model, (0.0, 0.0))[1] < SILENT_SECONDS:
            return  # it is full, and answers others
        if none:
            self._none[model] = _one_more(self._none.get(model), model, none, now)
            return
        if status < 500:
            self._none.pop(model, None)
            usual, _ = self._usual.get(model, (took, now))
            self._usual[model] = usual + (took - usual) / 4, now
        if status >= 500 or model in self._models:
            _, answers = self._models.setdefault(model, (now, deque(maxlen=LAST)))
            answers.append(now if status >= 500 else 0.0)
            if not any(answers):
                del self._models[model]

    def silent(self, call: CallRecord, now: float) -> bool:
        """Return whether an engine has the call, and has answered nothing for longer than usual."""
        if call.waits or call.forwarded_at is None or call.first_byte_at is not None:
            return False
        usual, last = self._usual.get(call.model, (0.0, 0.0))
        return now - max(call.forwarded_at, last) > max(SILENT_SECONDS, SILENT_TIMES * usual)

    def report(self, now: float, calls: Collection[CallRecord] = ()) -> tuple[EngineFaults, ...]:
        """Return the models of which enough answers were errors, or none. ``calls``: those under way."""
        none, begun = dict(self._none), {call.model for call in calls if call.first_byte_at is not None}
        for call in calls:
            if call.forwarded_at is not None and call.model not in begun and self.silent(call, now):
                none[call.model] = _one_more(none.get(call.model), call.model, SILENT, call.forwarded_at)
        rows = [
            EngineFaults(
                model=model, failed=len(answers) - answers.count(0.0), of=len(answers), first=first, last=max(answers)
            )
            for model, (first, answers) in self._models.items()
        ]
        long = {row.model for row in none.values() if now - row.first > FIRST_SECONDS} | self._usual.keys()
        every = [(row, 1 if row.were == SILENT and row.model in long else FEWEST) for row in (*rows, *none.values())]
        return tuple(row for row, fewest in every if row.failed >= fewest and now - row.last < FORGET_SECONDS)


def _one_more(before: EngineFaults | None, model: str, were: str, now: float) -> EngineFaults:
    if before is None or before.were != were:
        before = EngineFaults(model=model, failed=0, of=0, first=now, last=now, were=were)
    return before.model_copy(update={"failed": before.failed + 1, "of": before.of + 1, "last": now})


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id of a W3C ``traceparent``; None if there is no valid one."""
    found = _TRACEPARENT.match(traceparent or "")
    return found[1] if found is not None else None


class RequestLog:
    """``ended`` may be called from any task of the loop; ``run`` publishes."""

    def __init__(self, bus: Bus, router: str, *, access_log: bool = False) -> None:
        self._bus, self._router, self._access_log = bus, router, access_log
        self._queue: asyncio.Queue[RequestEnded] = asyncio.Queue(MOST_WAITING)
        self.faults = Faults()
        self.dropped = 0
        """Records that were not published: too many, or the bus was away."""

    def ended(self, call: CallRecord, status: int, *, known: bool) -> None:
        """The call has ended. ``known``: its model exists. One that was served at once, or whose model is not known,
        leaves no record."""
        now = time.time()
        none = SILENT if status == 499 and self.faults.silent(call, now) else call.none
        if known and not call.waits and (status != 499 or none) and call.reason in OF_ENGINES:
            took = (call.first_byte_at or now) - (call.forwarded_at or now)
            self.faults.answered(call.model, status, now, none, took)
        seconds = max(0.0, now - call.arrived_at)
        held = call.to is None or call.to.held_seconds > 0
        kept = known and (status >= 429 or held)
        if not kept and not self._access_log:
            return
        first, forwarded = call.first_byte_at, call.forwarded_at
        record = RequestEnded(
            cause=call.cause,
            request=call.cause,
            trace_id=trace_id_of(call.traceparent),
            router=self._router,
            model=call.model,
            node=call.to.key.partition(".")[0] if call.to is not None else "",
            seat=call.to.seat if call.to is not None else "",
            epoch=call.to.epoch if call.to is not None else 0,
            arrived_at=call.arrived_at,
            held_seconds=call.held_seconds(now),
            forwarded_seconds=None if forwarded is None else max(0.0, forwarded - call.arrived_at),
            first_byte_seconds=None if first is None else max(0.0, first - call.arrived_at),
            seconds=seconds,
            status=status,
            reason=call.reason,
            prompt_tokens=call.tokens.prompt if call.tokens is not None else None,
            completion_tokens=call.tokens.completion if call.tokens is not None else None,
        )
        if self._access_log:
            trace = {} if record.trace_id is None else {"trace_id": record.trace_id}
            get_logger().info("request.ended", **record.model_dump(include=ACCESS_FIELDS), **trace)
        if not kept:
            return
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> NoReturn:
        """Publish until cancelled."""
        while True:
            record = await self._queue.get()
            try:
                await self._bus.publish(record)
            except BusError:
                self.dropped += 1
            await asyncio.sleep(PAUSE_SECONDS)
