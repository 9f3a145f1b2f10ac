"""Waiting for a condition: one helper for all tests, whose failure says what it waited for and what it last saw."""

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

TIME_FACTOR = float(os.environ.get("KYB_TEST_TIME_FACTOR", "1"))
"""Multiplies every time-out of the tests; above 1 on a slow or loaded machine."""
TIMEOUT_SECONDS = 30.0
"""The default; a mutated run of scripts/mutants.py has less."""
_LONGEST_VALUE = 600


async def until(
    condition: Callable[[], Any],
    *,
    what: str,
    timeout: float | None = None,
    saw: Callable[[], object] | None = None,
    interval: float | None = None,
) -> Any:
    """Poll ``condition``, a function or a coroutine function, until its value is true; returns that value.

    ``what`` completes "not within 30 s: …". A failure also shows the last value, ``saw()`` where it is given, and
    otherwise the variables that the condition reads. Raises AssertionError after ``timeout`` seconds (None:
    TIMEOUT_SECONDS), multiplied by KYB_TEST_TIME_FACTOR; exceptions of the condition are not caught. ``interval``:
    seconds between two looks (None: ``pause``).
    """
    seconds = _seconds(timeout)
    began = time.monotonic()
    deadline = began + seconds
    while True:
        value = condition()
        if inspect.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(condition, what, seconds, value, saw))
        await asyncio.sleep(pause(time.monotonic() - began) if interval is None else interval)


def until_blocking(
    condition: Callable[[], Any],
    *,
    what: str,
    timeout: float | None = None,
    saw: Callable[[], object] | None = None,
    interval: float | None = None,
) -> Any:
    """The same as ``until``, for a test without an event loop."""
    seconds = _seconds(timeout)
    began = time.monotonic()
    deadline = began + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(condition, what, seconds, value, saw))
        time.sleep(pause(time.monotonic() - began) if interval is None else interval)
    return value


async def until_equal(read: Callable[[], Awaitable[Any]], expected: object, *, what: str) -> None:
    """Wait until the coroutine function returns this value."""
    seen: list[object] = []

    async def equal() -> bool:
        seen[:] = [await read()]
        return seen == [expected]

    await until(equal, what=f"{what}: {expected}", saw=lambda: seen)


async def until_logged(logs: Iterable[Mapping[str, Any]], event: str) -> None:
    """Wait until structlog's captured lines have this event."""
    await until(lambda: any(line["event"] == event for line in logs), what=f"the log event {event}", saw=lambda: logs)


def pause(waited: float) -> float:
    """Seconds until the next look: a look at a stack costs its processes CPU, and one that takes long takes longer."""
    return min(max(0.01, waited / 100), 0.1)


def _seconds(timeout: float | None) -> float:
    return (TIMEOUT_SECONDS if timeout is None else timeout) * TIME_FACTOR


def _failure(
    condition: Callable[[], Any], what: str, seconds: float, value: object, saw: Callable[[], object] | None
) -> str:
    lines = [f"not within {seconds:g} s: {what}", f"  the condition was last {_short(value)}"]
    if saw is not None:
        lines.append(f"  last seen: {_short(saw())}")
    elif inspect.isfunction(condition):
        defaults = zip(inspect.signature(condition).parameters, condition.__defaults__ or (), strict=False)
        variables = inspect.getclosurevars(condition).nonlocals | dict(defaults)
        lines += [f"  {name} = {_short(variable)}" for name, variable in sorted(variables.items())]
    return "\n".join(lines)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"… {text[-_LONGEST_VALUE:]}"
