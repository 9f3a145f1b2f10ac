"""What an answer is worth: ok, retryable or error. Pure; the rules are those of the fakes' world.

* ok: complete, and the text is the expected one.
* retryable: 429 or 503 with Retry-After; an error event in a stream; a connection refused, reset or cut short while a
  service is down (which happens only under ``--chaos``).
* error: everything else.
"""

from dataclasses import dataclass
from enum import StrEnum


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
    said = " ".join(body.split())[:200]
    if status in (429, 503) and retry_after is not None:
        seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
        return Ruling(Verdict.RETRYABLE, f"status {status}: {said}", seconds)
    missing = " without Retry-After" if status in (429, 503) else ""
    return Ruling(Verdict.ERROR, f"status {status}{missing}: {said}")


def of_stream_error(code: str, message: str) -> Ruling:
    """A stream that ended with an error event."""
    return Ruling(Verdict.RETRYABLE, f"stream error {code or 'without code'}: {message[:200]}")


def of_broken(what: str, service_down: bool) -> Ruling:
    """A connection that was refused, reset or cut short."""
    if service_down:
        return Ruling(Verdict.RETRYABLE, f"{what} while a service was down")
    return Ruling(Verdict.ERROR, f"{what} while every service was up")


def of_text(text: str, expected: str, finished: bool) -> Ruling:
    """An answer that came to its end; ``finished``: it said so itself (finish reason, [DONE])."""
    if not finished:
        return Ruling(Verdict.ERROR, "the answer ended without saying so")
    if text != expected:
        place = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), None)
        where = f"at character {place}" if place is not None else f"{len(text)} characters for {len(expected)}"
        return Ruling(Verdict.ERROR, f"the text is not the expected one ({where})")
    return OK


class Outages:
    """When services were down, in seconds of the monotonic clock. Nothing is down until somebody says so."""

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
