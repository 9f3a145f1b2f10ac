"""Three nats-servers of which one after the other loses its routes (in `make test`: one of them), while clients ask two
routers for two models that share a GPU. KYB_CUT_SECONDS: how long each is cut off; docs/dev/operate.md has the waits of
60.
"""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.bus.cut import three_servers
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.thorough import part
from tests.until import TIME_FACTOR, until

CUT_SECONDS = float(os.environ.get("KYB_CUT_SECONDS", "20"))
BEFORE_SECONDS, AFTER_SECONDS = 10.0, 8.0
MOST_SECONDS = 15.0 * TIME_FACTOR
"""Beyond the longest wait before the first cut. A service that stays at a server without routes, or goes to one, waits
for as long as the cut lasts."""
IMPATIENT = ONE_GROUP + "policy: {name: kyb-balanced, settings: {capSlos: 0}}\n"


@dataclass
class Clients:
    """Ask each router in turn, one request at a time for each router."""

    urls: Sequence[str]
    slowest: float = 0.0
    answered: int = 0
    asked: dict[str, float] = field(default_factory=dict)
    """By router: since when its present request waits."""
    errors: list[str] = field(default_factory=list)
    stopped: bool = False

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for number, url in enumerate(self.urls):
                group.create_task(self._ask(session, url, random.Random(number)))

    @property
    def waits(self) -> float:
        """For how long the oldest request has waited."""
        return time.monotonic() - min(self.asked.values(), default=time.monotonic())

    async def _ask(self, session: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
        while not self.stopped:
            began = self.asked[url] = time.monotonic()
            body = {"model": chance.choice("ab"), "prompt": "hi", "max_tokens": 4}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    self.errors.append(await answer.text())
            del self.asked[url]
            self.answered += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            await asyncio.sleep(0.3)


@pytest.mark.timeout(300 + 4 * CUT_SECONDS)
async def test_no_request_is_sent_to_a_parked_engine_while_a_server_has_no_routes(tmp_path: Path) -> None:
    async with three_servers(tmp_path) as servers:
        url = ",".join(servers.urls)
        options = small_node(tmp_path, IMPATIENT, (pod(m) for m in "ab"), routers=2, speed=8, nats_url=url)
        async with running(options) as here:
            clients = Clients([router.url for router in here.stack.layout.routers])
            load = asyncio.create_task(clients.run())
            await asyncio.sleep(BEFORE_SECONDS)
            usual, rows = clients.slowest, []
            for server in part(range(3), 3):
                names = await servers.clients(server)
                clients.slowest, before = 0.0, clients.answered
                servers.isolate(server)
                await asyncio.sleep(CUT_SECONDS)
                stayed = await servers.clients(server)
                servers.heal()
                await asyncio.sleep(AFTER_SECONDS)
                # The servers elect leaders anew: a request that waits for them is none of the next cut.
                await until(lambda: clients.waits <= usual, what="no request waits any more")
                rows.append((names, stayed, clients.answered - before, round(clients.slowest, 1)))
            clients.stopped = True
            await load
            assert not clients.errors
            assert max(slowest for *_, slowest in rows) <= usual + MOST_SECONDS, (usual, rows)
