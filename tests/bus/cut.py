"""Three nats-servers whose routes go through proxies, so that one can be cut off while its clients stay connected."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer, free_port

HOST = "127.0.0.1"
NOWHERE = f"{HOST}:1"
"""What the servers tell each other of where they are: so that no route goes beside the proxies."""


@dataclass
class Route:
    """A proxy between two servers. While it is cut, it takes bytes and passes none on."""

    ends: frozenset[int]
    target: int
    cut: bool = False
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        """The port on which it listens."""
        server = await asyncio.start_server(self._pass, HOST, 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
            writers.append(far_writer)
            copies = self._copy(reader, far_writer), self._copy(far_reader, writer)
            pair = [asyncio.create_task(copy) for copy in copies]
            try:
                await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in pair:
                    one.cancel()
                await asyncio.gather(*pair, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one_way in writers:
                one_way.close()
                with suppress(OSError):
                    await one_way.wait_closed()
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            while self.cut:
                await asyncio.sleep(0.05)
            writer.write(data)
            await writer.drain()


@dataclass
class Servers:
    """A cluster of three."""

    servers: list[NatsServer]
    monitors: list[int]
    routes: list[Route]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def names(self) -> list[str]:
        """As the servers introduce themselves."""
        return [server.name for server in self.servers]

    def isolate(self, server: int) -> None:
        """Cut it off from the two others."""
        for route in self.routes:
            route.cut = server in route.ends

    def heal(self) -> None:
        for route in self.routes:
            route.cut = False

    async def clients(self, server: int) -> list[str]:
        """The names of the connections of a server."""

        def read() -> list[str]:
            with urllib.request.urlopen(f"http://{HOST}:{self.monitors[server]}/connz", timeout=5) as answer:
                return sorted(one.get("name", "") for one in json.load(answer)["connections"])

        return await asyncio.to_thread(read)

    async def leader(self, stream: str, *, seen_by: int) -> int | None:
        """The server that leads a stream, by the word of one; None: it knows none."""

        def read() -> str:
            url = f"http://{HOST}:{self.monitors[seen_by]}/jsz?streams=1&acc=$G"
            with urllib.request.urlopen(url, timeout=5) as answer:
                accounts = json.load(answer).get("account_details", [])
            streams = [one for account in accounts for one in account["stream_detail"] if one["name"] == stream]
            return str(streams[0]["cluster"].get("leader", "")) if streams else ""

        name = await asyncio.to_thread(read)
        return self.names.index(name) if name else None

    async def server_of(self, name: str) -> int:
        """Where a client is connected."""
        (found,) = [server for server in range(3) if name in await self.clients(server)]
        return found


@asynccontextmanager
async def three_servers(folder: Path) -> AsyncIterator[Servers]:
    """Three servers with streams and buckets that each of them keeps."""
    found = set[int]()
    while len(found) < 9:
        found.add(free_port())
    ports, clusters, monitors = sorted(found)[:3], sorted(found)[3:6], sorted(found)[6:]
    routes, listening = [], dict[tuple[int, int], int]()
    servers = []
    async with AsyncExitStack() as stack:
        for one in range(3):
            for other in {0, 1, 2} - {one}:
                route = Route(frozenset((one, other)), clusters[other])
                routes.append(route)
                listening[one, other] = await stack.enter_async_context(route.opened())
        for number in range(3):
            ways = ",".join(f"nats://{HOST}:{port}" for (one, _), port in listening.items() if one == number)
            cluster = ["--cluster", f"nats://{HOST}:{clusters[number]}", "--cluster_name", "kyb", "--no_advertise"]
            cluster += ["--cluster_advertise", NOWHERE, "--routes", ways]
            more = (*cluster, "--http_port", str(monitors[number]))
            servers.append(NatsServer(folder / f"nats-{number}", ports[number], arguments=more))
        for server in servers:
            await stack.enter_async_context(server)
        await init(",".join(server.url for server in servers), 3, wait=45)
        yield Servers(servers, monitors, routes)
