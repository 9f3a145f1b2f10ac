"""No call waits for the console: killed, stopped by a signal, flooded."""

import asyncio
import contextlib
import itertools
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest

from kybernate.dev.stack import Stack, StackOptions
from tests.until import until

REQUESTS = 80
AT_ONCE = 4
READERS = 12
PATHS = ("/v1/seats", "/v1/why", "/v1/history?since=0", "/ui/timeline", "/metrics")
FACTOR, SLACK_SECONDS = 3.0, 0.05
"""A machine under load doubles a latency by itself; a call that waited for the console would take seconds."""


@asynccontextmanager
async def alone(_: Stack) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def killed(stack: Stack) -> AsyncIterator[None]:
    """Again and again, as soon as it is back."""

    async def kill() -> None:
        while True:
            stack.kill("console")
            await asyncio.sleep(0.5)

    task = asyncio.create_task(kill())
    yield
    await until(lambda: stack.starts["console"] > 1, what="the console was killed again")
    task.cancel()

    async def back() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"{stack.console}/readyz") as answer:
                return answer.status == 200
        return False

    await until(back, what="the console is back", timeout=60)


@asynccontextmanager
async def stopped(stack: Stack) -> AsyncIterator[None]:
    stack.kill("console", signal.SIGSTOP)
    yield
    stack.kill("console", signal.SIGCONT)


@asynccontextmanager
async def flooded(stack: Stack) -> AsyncIterator[None]:
    """Readers without a pause, and pages that are not read."""
    answered = 0

    async def read(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal answered
        for path in itertools.islice(itertools.cycle(PATHS), number, None):
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(stack.console + path, timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    await answer.read()
                    answered += 1

    async with aiohttp.ClientSession() as http, contextlib.AsyncExitStack() as pages:
        for _ in range(READERS):
            await pages.enter_async_context(http.get(f"{stack.console}/ui/live"))
        readers = [asyncio.create_task(read(http, number)) for number in range(READERS)]
        yield
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert answered > READERS


Disturbance = Callable[[Stack], AbstractAsyncContextManager[None]]


async def latencies(stack: Stack, models: list[str], disturbed: Disturbance) -> list[float]:
    """Seconds of each call; fails where one fails."""
    seconds: list[float] = []
    asked = iter([models[number % len(models)] for number in range(REQUESTS)])

    async def ask(http: aiohttp.ClientSession) -> None:
        for model in asked:
            began = time.monotonic()
            body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
            async with http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            seconds.append(time.monotonic() - began)

    async with disturbed(stack), aiohttp.ClientSession() as http:
        await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
    assert len(seconds) == REQUESTS
    return seconds


@pytest.mark.timeout(240)
async def test_no_call_notices_a_console_that_is_killed_stopped_or_flooded() -> None:
    async with Stack(StackOptions(port=0, speed=16.0, announce=False)) as stack:
        seats = await stack.ready(120)
        active = sorted(seat["model"] for seat in seats if seat["state"] == "active")
        parked = next(seat["model"] for seat in seats if seat["state"] == "parked")
        medians = {}
        for disturbed in (alone, killed, stopped, flooded, alone):
            found = await latencies(stack, active, disturbed)
            medians[disturbed.__name__] = statistics.median(found), max(found)
        stack.kill("console", signal.SIGSTOP)
        await latencies(stack, [parked, *active], alone)  # also switches need no console
        stack.kill("console", signal.SIGCONT)
    most = FACTOR * medians.pop("alone")[0] + SLACK_SECONDS
    assert {name: found for name, found in medians.items() if found[0] > most} == {}, medians
