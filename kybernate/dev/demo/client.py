"""One request of the demo, sent and judged: ok, retryable or error.

* ok: complete, and the text is the expected one.
* retryable: 429 or 503 with Retry-After; an error event in a stream; a connection refused, reset or cut short while a
  service is down (which happens only under ``--chaos``).
* error: everything else.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import aiohttp

from kybernate.lab.traces import Arrival


class Verdict(StrEnum):
    """How one attempt ended."""

    OK = "ok"
    RETRYABLE = "retryable"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict and why."""

    verdict: Verdict
    reason: str = ""
    retry_after_seconds: float | None = None
    """What the router asked for, wall seconds."""


OK = Ruling(Verdict.OK)


def of_status(status: int, retry_after: str | None, body: str) -> Ruling:
    """An answer whose status is not 200."""
    text = " ".join(body.split())[:200]
    if status in (429, 503) and retry_after is not None:
        seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
        return Ruling(Verdict.RETRYABLE, f"status {status}: {text}", seconds)
    missing = " without Retry-After" if status in (429, 503) else ""
    return Ruling(Verdict.ERROR, f"status {status}{missing}: {text}")


def of_stream_error(code: str, message: str) -> Ruling:
    """A stream that ended with an error event."""
    return Ruling(Verdict.RETRYABLE, f"stream error {code or 'without code'}: {message[:200]}")


def of_broken(what: str, service_down: bool) -> Ruling:
    """A connection that was refused, reset or cut short."""
    if service_down:
        return Ruling(Verdict.RETRYABLE, f"{what} while a service was down")
    return Ruling(Verdict.ERROR, f"{what} while every service was up")


def of_text(text: str, expected: str, finished: bool) -> Ruling:
    """A complete answer; ``finished``: it carried an end mark (finish reason, [DONE])."""
    if not finished:
        return Ruling(Verdict.ERROR, "the answer ended without saying so")
    if text != expected:
        place = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)
        where = f"at character {place}" if place is not None else f"{len(text)} characters for {len(expected)}"
        return Ruling(Verdict.ERROR, f"the text is not the expected one ({where})")
    return OK


class Outages:
    """When services were down, in seconds of the monotonic clock. Nothing is down until ``begin``."""

    def __init__(self, grace_seconds: float = 1.0) -> None:
        self._grace_seconds = grace_seconds
        self._spans: list[list[float]] = []

    def begin(self, now: float) -> int:
        """A service went down; returns the number to end it with."""
        self._spans.append([now, float("inf")])
        return len(self._spans) - 1

    def end(self, number: int, now: float) -> None:
        """It is up again; what breaks within the grace after that is still its fault."""
        self._spans[number][1] = now + self._grace_seconds

    def overlap(self, since: float, until: float) -> bool:
        """Whether a service was down at some time between."""
        return any(begin <= until and end >= since for begin, end in self._spans)

    def seconds(self, since: float, until: float) -> float:
        """For how long a service was down between."""
        found, counted = 0.0, since
        for begin, end in sorted(self._spans):
            found += max(0.0, min(end, until) - max(begin, counted))
            counted = max(counted, end)
        return found


Expect = Callable[[str, str, int], str]
"""(model, prompt, tokens) → the only right answer."""

MOST_PROMPT_WORDS = 48
"""Prompts stay modest whatever the trace says: the fakes compute nothing from their length."""

_WORDS = ("seat", "group", "lease", "epoch", "park", "drain", "signal", "roster", "ledger", "hold", "ticket", "gate")


@dataclass(frozen=True, slots=True)
class Question:
    """One request. Its prompt follows from the row's number, so that no two answers are alike."""

    number: int
    model: str
    prompt: str
    tokens: int
    route: Literal["chat", "completion"]
    stream: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: its ruling and its measurements. None: not measured, or not in the response."""

    ruling: Ruling
    held_seconds: float | None = None
    """Model seconds in the router's queue, by ``x-kyb-held-seconds``."""
    first_byte_at: float | None = None
    """Monotonic seconds of the first streamed token."""
    overhead_seconds: float | None = None
    """Wall seconds of control, by ``x-kyb-overhead-seconds``."""
    release_seconds: float | None = None
    """Wall seconds from the last backend call until it was sent to its engine, by ``x-kyb-release-seconds``."""


def question(number: int, arrival: Arrival) -> Question:
    """What row ``number`` of a trace asks. Three of four stream; one of four is a plain completion."""
    words = min(MOST_PROMPT_WORDS, arrival.prompt_tokens)
    text = " ".join(_WORDS[(number * 7 + place) % len(_WORDS)] for place in range(words))
    route: Literal["chat", "completion"] = "completion" if number % 4 == 3 else "chat"
    return Question(number, arrival.model, f"row {number}: {text}", arrival.output_tokens, route, number % 4 != 1)


async def ask(
    session: aiohttp.ClientSession, url: str, q: Question, expect: Expect, outages: Outages, left: Callable[[], float]
) -> Attempt:
    """Send the question once and read the answer to its end; ``left``: for how many more wall seconds now."""
    began = time.monotonic()
    asking = asyncio.ensure_future(_ask(session, url, q, expect))
    try:
        while not asking.done() and (seconds := left()) > 0:
            await asyncio.wait((asking,), timeout=seconds)
        if not asking.done():
            return Attempt(Ruling(Verdict.ERROR, f"no complete answer within {time.monotonic() - began:.0f} s"))
        return asking.result()
    except (aiohttp.ClientError, ConnectionError) as error:
        broken = _how_broken(error)
        return Attempt(of_broken(broken, outages.overlap(began, time.monotonic())))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return Attempt(Ruling(Verdict.ERROR, f"the answer cannot be read ({type(error).__name__}: {error})"))
    finally:
        asking.cancel()


async def _ask(session: aiohttp.ClientSession, url: str, q: Question, expect: Expect) -> Attempt:
    path = "/v1/chat/completions" if q.route == "chat" else "/v1/completions"
    async with session.post(url + path, json=_body(q)) as response:
        if response.status != 200:
            ruling = of_status(response.status, response.headers.get("Retry-After"), await response.text())
            return Attempt(ruling, _seconds(response, "x-kyb-held-seconds"))
        first: float | None = None
        if q.stream:
            text, finished, first, broken = await _read_stream(response, q)
        else:
            text, finished, broken = *_read_whole(await response.read(), q), None
        return Attempt(
            broken or of_text(text, expect(q.model, q.prompt, q.tokens), finished),
            _seconds(response, "x-kyb-held-seconds"),
            first,
            _seconds(response, "x-kyb-overhead-seconds"),
            _seconds(response, "x-kyb-release-seconds"),
        )


def _body(q: Question) -> dict[str, Any]:
    body: dict[str, Any] = {"model": q.model, "max_tokens": q.tokens, "stream": q.stream}
    if q.route == "chat":
        return body | {"messages": [{"role": "user", "content": q.prompt}]}
    return body | {"prompt": q.prompt}


async def _read_stream(response: aiohttp.ClientResponse, q: Question) -> tuple[str, bool, float | None, Ruling | None]:
    """Text, whether it came to its end, when the first token came, and the ruling if it ended with an error event."""
    parts: list[str] = []
    first: float | None = None
    async for data in _events(response):
        if data == "[DONE]":
            return "".join(parts), True, first, None
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            return "", False, first, of_stream_error(str(error.get("code")), str(error.get("message")))
        piece = _piece(event, q)
        if piece and first is None:
            first = time.monotonic()
        parts.append(piece)
    # The body ended in order, so the connection did not break: the sender left out the end.
    return "".join(parts), False, first, None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event; comments (keep-alives) and other fields are passed over."""
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def _piece(event: dict[str, Any], q: Question) -> str:
    choices = event.get("choices") or [{}]
    if q.route == "chat":
        return str((choices[0].get("delta") or {}).get("content") or "")
    return str(choices[0].get("text") or "")


def _read_whole(body: bytes, q: Question) -> tuple[str, bool]:
    choice = json.loads(body)["choices"][0]
    text = choice["message"]["content"] if q.route == "chat" else choice["text"]
    return str(text), choice.get("finish_reason") is not None


def _seconds(response: aiohttp.ClientResponse, header: str) -> float | None:
    value = response.headers.get(header)
    return None if value is None else float(value)


def _how_broken(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "answer cut short"
    return f"connection lost ({type(error).__name__})"
