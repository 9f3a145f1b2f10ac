"""A stack and what its clients see of it: answers, the roster, kubelet's pods, what the fake driver counted."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack, StackOptions
from tests.until import until

Json = dict[str, Any]


@dataclass(frozen=True)
class Client:
    """One running stack."""

    stack: Stack
    session: aiohttp.ClientSession

    async def ask(self, model: str, tokens: int = 3, *, url: str = "", **more: Any) -> tuple[int, Any]:
        """Complete a prompt: status and body. ``url``: of an engine, past the router."""
        body = {"model": model, "prompt": "hi", "max_tokens": tokens} | more
        async with self.session.post(f"{url or self.stack.url}/v1/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def answered(self, *models: str, tokens: int = 3) -> None:
        """Ask them one after the other; each gives its own text."""
        for model in models:
            status, body = await self.ask(model, tokens)
            assert status == 200, body
            assert body["choices"][0]["text"] == expected_text(model, "hi", tokens)

    async def read(self, path: str) -> Json:
        """Of the console; empty before it answers."""
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with self.session.get(f"{self.stack.console}/v1/{path}") as answer:
                return dict(await answer.json())
        return {}

    async def seats(self) -> dict[str, Json]:
        """The roster by model."""
        return {row["model"]: row for row in (await self.read("seats")).get("seats", ()) if row["model"]}

    async def until_seats(self, holds: Callable[[dict[str, Json]], bool], what: str, timeout: float = 60) -> None:
        """Wait until the roster is so."""
        found: dict[str, Json] = {}

        async def look() -> bool:
            found.clear()
            found.update(await self.seats())
            return holds(found)

        def states() -> dict[str, str]:
            return {model: f"{row['state']} on {row['group']}: {row['reason']}" for model, row in found.items()}

        await until(look, what=what, saw=states, timeout=timeout, interval=0.02)

    async def until_state(self, model: str, *states: str, timeout: float = 60) -> None:
        """Wait until a model's seat has one of these states."""
        wanted = " or ".join(states)
        await self.until_seats(
            lambda rows: model in rows and rows[model]["state"] in states, f"{model} is {wanted}", timeout
        )

    async def order(self, path: str, **body: Any) -> Json:
        """An operator's command, or how far it is; while its manager is away, again."""
        answers: list[Json] = []

        async def taken() -> bool:
            async with self.session.post(f"{self.stack.console}/v1/{path}", json=body) as answer:
                answers.append(await answer.json())
                return answer.status in (202, 409)

        await until(taken, what=f"an answer to {path}", saw=lambda: answers[-1:], timeout=60)
        return answers[-1]

    async def pods(self) -> dict[str, Json]:
        """Those of kubelet, by name."""
        async with self.session.get(f"{self.stack.layout.kubelet_url}/pods") as answer:
            return {one["metadata"]["name"]: one for one in (await answer.json())["items"]}

    async def containers(self) -> dict[str, Json]:
        """Status of each pod's container."""
        return {name: one["status"]["containerStatuses"][0] for name, one in (await self.pods()).items()}

    async def runs(self) -> set[tuple[str, int]]:
        """ID of each container, and how often it was started again."""
        return {(one["containerID"], one["restartCount"]) for one in (await self.containers()).values()}

    async def kubelet(self, verb: str, body: Json | str) -> None:
        """Something that ``kubectl`` would do."""
        given = {"data": body} if isinstance(body, str) else {"json": body}
        async with self.session.post(f"{self.stack.layout.kubelet_url}/control/{verb}", **given) as answer:
            assert answer.status in (200, 201), await answer.text()

    async def driver(self, call: str, **arguments: Any) -> Json:
        """A call of the fake driver."""
        async with await FakeDriverClient.connect(self.stack.layout.driver_socket, wait_seconds=5.0) as driver:
            return await driver.call(call, **arguments)


@asynccontextmanager
async def running(options: StackOptions, ready: float = 90, *, strict: bool = True) -> AsyncIterator[Client]:
    """A stack whose seats are ready within so many seconds (0: not awaited). The driver has counted no violation when
    it ends, unless (not ``strict``) the test itself brings memory past the manager."""
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        if ready:
            await stack.ready(ready)
        client = Client(stack, session)
        yield client
        violations = (await client.driver("stats"))["violations"]
        assert not strict or violations["count"] == 0, violations
