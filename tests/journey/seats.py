"""Looking at a stack through its router."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp

from tests.journey.conftest import Up
from tests.until import until

Seat = dict[str, Any]


async def seats(url: str) -> dict[str, Seat]:
    """Rows of the roster by model."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/seats") as answer:
        return {seat["model"]: seat for seat in (await answer.json())["seats"]}


async def until_seats(url: str, holds: Callable[[dict[str, Seat]], bool], *, what: str) -> dict[str, Seat]:
    """Wait until the condition holds for the roster's rows by model; returns these."""
    found: dict[str, Seat] = {}

    async def read() -> bool:
        found.clear()
        found.update(await seats(url))
        return holds(found)

    def states() -> dict[str, str]:
        return {model: f"{seat['state']}, {seat['waiting']} waiting" for model, seat in found.items()}

    await until(read, what=what, saw=states, interval=0.05)
    return found


class Addresses(Protocol):
    """Of a stack."""

    url: str
    console: str


async def calm(url: str) -> dict[str, Seat]:
    """Wait until nothing moves: every seat is active or parked and no request waits."""
    return await until_seats(
        url,
        lambda found: all(s["state"] in ("active", "parked") and not s["waiting"] for s in found.values()),
        what="every seat is active or parked and no request waits",
    )


async def held(up: Addresses, group: str) -> dict[str, Seat]:
    """The same, and a seat of the group is active: the policy parks who is idle and unlikely to be the next."""
    found = await calm(up.console)
    for _ in range(5):
        if any(seat["group"] == group and seat["state"] == "active" for seat in found.values()):
            break
        await complete(up.url, parked(found, group))
        found = await calm(up.console)
    return found


def parked(found: dict[str, Seat], group: str) -> str:
    """A parked model of a group."""
    return next(model for model, seat in sorted(found.items()) if seat["group"] == group and seat["state"] == "parked")


def active(found: dict[str, Seat], group: str) -> str:
    """The active model of a group."""
    return next(model for model, seat in sorted(found.items()) if seat["group"] == group and seat["state"] == "active")


async def complete(
    url: str, model: str, prompt: str = "Hello", tokens: int = 8, **headers: str
) -> tuple[int, str, float]:
    """Ask without streaming: status, text, wall seconds."""
    body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]}
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        data = await answer.json()
        text = data["choices"][0]["message"]["content"] if answer.status == 200 else str(data)
        return answer.status, text, time.monotonic() - began


async def typed(up: Up, *argv: str) -> subprocess.CompletedProcess[str]:
    """A command on this stack."""
    command = [sys.executable, "-c", "from kybernate.cli import main; main()", *argv]
    return await asyncio.to_thread(subprocess.run, command, env=up.env, capture_output=True, text=True, timeout=30)


async def kyb(up: Up, *argv: str) -> str:
    """Standard output of a command on this stack, once it succeeds: the record of a request follows its answer."""
    done: list[subprocess.CompletedProcess[str]] = []

    async def succeeds() -> bool:
        done[:] = [await typed(up, *argv)]
        return done[0].returncode == 0

    await until(succeeds, what=f"kyb {' '.join(argv)} succeeds", saw=lambda: done)
    return done[0].stdout
