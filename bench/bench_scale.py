"""What a large cluster costs a real router, a real manager and nats-server when nothing is asked of them.

A stack with fake GPUs is one node. The messages of all others are played (``bench.cluster``): their rows, presence,
switches, and 20 signals a second and node from ten routers. The largest size has three nats-servers. The longest step
of the router's event loop is CPU time (``bench.loop_steps``); a stall is how late ``/healthz`` answers, waits for a
core included.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.cluster import SIGNALS_PER_NODE, SimulatedCluster, level
from bench.processes import cpu_seconds
from kybernate.bus.nats import NatsBus
from kybernate.dev.stack import Stack, StackOptions
from kybernate.dev.stack.options import NODE

SIZES = (64, 1024, 16_384, 65_536)
SETTLE_SECONDS = 5.0
SETTLED = 0.05
"""Share of a core below which the router has read all."""
SECONDS = 65.0
"""Longer than the minute after which a watch compares itself."""
SHORT_SECONDS = 15.0
SHOWN_NODES, WHY_SECONDS = 20, 5.0
"""Nodes that an open page shows, and how often it asks why their seats wait."""


async def run(seats: int = 0) -> dict[str, float]:
    """Figures by number of seats; ``seats``: of this number only."""
    sizes = (seats,) if seats else SIZES
    return {f"{size} seats: {name}": value for size in sizes for name, value in (await _measured(size)).items()}


async def _measured(seats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kyb-bench-") as folder:
        steps = Path(folder) / "steps"
        options = StackOptions(
            port=0,
            announce=False,
            servers=3 if seats == SIZES[-1] else 1,
            settings={"router": {"PYTHONPATH": str(Path(__file__).parents[1])}},
            replace={"router": (sys.executable, "-m", "bench.loop_steps", str(steps), "services.router")},
        )
        async with Stack(options) as stack, aiohttp.ClientSession() as http:
            own = await stack.ready(300.0)
            url = stack.layout.nats_url
            async with NatsBus(url, source="kyb/bench", name="bench").opened() as bus:
                await bus.until_connected()
                cluster = SimulatedCluster(bus, seats)
                await cluster.fill()
                return await _Scene(stack, http, cluster, steps).measure(url.split(",")[0], own)


class _Scene:
    def __init__(self, stack: Stack, http: aiohttp.ClientSession, cluster: SimulatedCluster, steps: Path) -> None:
        self._stack, self._http, self._cluster, self._steps = stack, http, cluster, steps
        self.figures: dict[str, float] = {"signals per second": float(cluster.signals)}

    async def measure(self, nats_url: str, own: Sequence[dict[str, Any]]) -> dict[str, float]:
        await self._start_again()
        await self._connect_again()
        active = [seat for seat in own if seat["state"] == "active"]
        extra = [
            level(NODE, seat["seat"], seat["model"], f"simulated-{number}")
            for number in range(SIGNALS_PER_NODE // len(active))
            for seat in active
        ]
        async with self._cluster.alive(nats_url, extra):
            await self._settle()
            await self._phase("", SECONDS)
            async with self._cluster.switching():
                await self._phase("switching: ", SHORT_SECONDS)
                async with self._page():
                    await asyncio.sleep(SETTLE_SECONDS)
                    await self._phase("page open: ", SHORT_SECONDS)
            await self._read("first read ms")
            await self._phase("read: ", SHORT_SECONDS, read=True)
            await self._all_seats()
        return self.figures

    @asynccontextmanager
    async def _page(self) -> AsyncIterator[None]:
        """What a browser asks for that shows the nodes: everything once, then changes, and explanations each 5 s."""
        page = self._stack.layout.page
        self._begin()
        before, began = self._cpu()["router"], time.monotonic()
        async with self._http.get(f"{page}live", timeout=aiohttp.ClientTimeout(total=None)) as stream:
            size = 0
            async for line in stream.content:
                size += len(line)
                if line == b"\n":
                    break
            self.figures["page: MB of its first answer"] = size / 1e6
            self.figures["page: first answer, wall s"] = time.monotonic() - began
            self.figures["page: first answer, CPU s"] = self._cpu()["router"] - before
            self.figures["page: first answer, longest step, CPU ms"] = self._longest()
            tasks = [asyncio.create_task(each) for each in (_follow(stream), self._why(f"{page}why"))]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _why(self, url: str) -> None:
        """Ask why, as often as the page does, for the nodes that it shows."""
        nodes = [("node", node) for node in self._cluster.nodes[:SHOWN_NODES]]
        while True:
            async with self._http.get(url, params=nodes) as answer:
                await answer.read()
            await asyncio.sleep(WHY_SECONDS)

    async def _all_seats(self) -> None:
        """Read all seats, page after page."""
        self._begin()
        before, began, seats, after = self._cpu()["router"], time.monotonic(), 0, ""
        while True:
            async with self._http.get(f"{self._stack.console}/v1/seats", params={"after": after}) as answer:
                body = await answer.json()
            seats += len(body["seats"])
            if not (after := body.get("next", "")):
                break
        self.figures["all seats read: seats"] = float(seats)
        self.figures["all seats read: wall s"] = time.monotonic() - began
        self.figures["all seats read: CPU s"] = self._cpu()["router"] - before
        self.figures["all seats read: longest step, CPU ms"] = self._longest()

    async def _start_again(self) -> None:
        """The router reads the whole roster."""
        before, first = self._stack.pids["router"], True
        self._stack.kill("router")
        async with asyncio.timeout(300.0):
            while first or self._stack.pids.get("router", before) == before or not await self._ready():
                await asyncio.sleep(0.05)
                first = False
        self.figures["start: CPU s"] = cpu_seconds(self._stack.pids["router"])
        await self._settle()
        self.figures["start: longest step, CPU ms"] = self._longest()

    async def _connect_again(self) -> None:
        """All nats-servers end and are started again: the router, which goes on, reads the whole roster."""
        self._begin()
        before, pids = self._cpu()["router"], dict(self._stack.pids)
        servers = list(self._stack.of_kind("nats"))
        for name in servers:
            self._stack.kill(name, signal.SIGTERM)
        async with asyncio.timeout(300.0):
            await self._started_again(servers, pids)  # one that still ends could take the change and show it
            await self._cluster.change()
            await self._until_changed()
        await self._settle()
        self.figures["reconnect: CPU s"] = self._cpu()["router"] - before
        self.figures["reconnect: longest step, CPU ms"] = self._longest()

    async def _started_again(self, services: list[str], pids: dict[str, int]) -> None:
        """Return when each service has another pid than in ``pids``."""
        while True:
            if all(self._stack.pids.get(name, pids[name]) != pids[name] for name in services):
                return
            await asyncio.sleep(0.05)

    async def _until_changed(self) -> None:
        """Return when the console shows the row that ``change`` wrote."""
        url, node = f"{self._stack.console}/v1/seats", self._cluster.nodes[-1]
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.get(url, params={"node": node}) as answer:
                    seats = (await answer.json())["seats"]
                if any(seat["reason"] == self._cluster.changed for seat in seats):
                    return
            await asyncio.sleep(0.2)

    async def _settle(self) -> None:
        """Return when the router has read what it reads at once."""
        async with asyncio.timeout(300.0):
            while True:
                before = self._cpu()["router"]
                await asyncio.sleep(SETTLE_SECONDS)
                if self._cpu()["router"] - before < SETTLE_SECONDS * SETTLED:
                    return

    async def _phase(self, name: str, seconds: float, *, read: bool = False) -> None:
        self._begin()
        before, began = self._cpu(), time.monotonic()
        stall = await self._stalls(seconds, read=read)
        share = 100 / (time.monotonic() - began)
        for process, cpu in self._cpu().items():
            self.figures[f"{name}{process}, % of a core"] = (cpu - before[process]) * share
        self.figures[f"{name}longest step, CPU ms"] = self._longest()
        self.figures[f"{name}longest stall, wall ms"] = stall

    def _cpu(self) -> dict[str, float]:
        """CPU seconds so far; all nats-servers together."""
        pids = self._stack.pids
        found = {name: cpu_seconds(pids[name]) for name in ("router", "gpu_manager", "console")}
        return found | {"nats": sum(cpu_seconds(pids[name]) for name in self._stack.of_kind("nats"))}

    def _begin(self) -> None:
        """The longest step from now on."""
        os.kill(self._stack.pids["router"], signal.SIGUSR2)

    def _longest(self) -> float:
        step = self._steps.read_text().rstrip()
        sys.stderr.write(f"longest step: {step}\n")
        return float(step.partition(" ")[0])

    async def _stalls(self, seconds: float, *, read: bool) -> float:
        """Milliseconds of the slowest answer of ``/healthz``; ``read``: with ``GET /v1/seats`` each second."""
        slowest, until, page_at = 0.0, time.monotonic() + seconds, 0.0
        while (began := time.monotonic()) < until:
            if read and began >= page_at:
                page_at = began + 1.0
                await self._read("page ms")
                began = time.monotonic()
            async with self._http.get(f"{self._stack.url}/healthz") as answer:
                await answer.read()
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.1)
        return slowest * 1e3

    async def _read(self, name: str) -> None:
        """Read a page, and check that the levels of the simulated routers are in it."""
        began = time.monotonic()
        async with self._http.get(
            f"{self._stack.console}/v1/seats", params={"node": self._cluster.nodes[-1]}
        ) as answer:
            body = await answer.json()
        self.figures[name] = (time.monotonic() - began) * 1e3
        self.figures[f"{name}: in flight"] = sum(seat["in_flight"] for seat in body["seats"])

    async def _ready(self) -> bool:
        try:
            async with self._http.get(f"{self._stack.url}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


async def _follow(stream: aiohttp.ClientResponse) -> None:
    """Read until the stream ends."""
    async for _ in stream.content.iter_any():
        pass
