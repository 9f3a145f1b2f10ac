"""Connections to engines: one pool per seat, so that a seat's idle connections can be closed when it is parked."""

import asyncio
import time

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

CONNECT_SECONDS = 5.0


class Body(Payload):
    """A request body in memory that notes when it was handed to the socket."""

    _value: bytes

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self._size = len(value)
        self.sent_at: float | None = None
        """Unix seconds."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Hand it to the socket."""
        await self.write_with_length(writer, None)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """Hand it to the socket; the length was sent as its header."""
        await writer.write(self._value if content_length is None else self._value[:content_length])
        self.sent_at = time.time()


class Pool:
    """The connections to one engine. Closed when it is detached and nobody uses it."""

    def __init__(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        self.users = 0
        self.detached = False


class Upstreams:
    """Pools by seat. All engines speak plain HTTP/1.1 inside the cluster."""

    def __init__(self) -> None:
        self._pools: dict[str, Pool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, key: str) -> Pool:
        """The pool of a seat, in use until it is given back."""
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool()
        pool.users += 1
        return pool

    def give_back(self, pool: Pool) -> None:
        """Its user is done."""
        pool.users -= 1
        if pool.detached and pool.users == 0:
            self._close(pool)

    def disconnect(self, key: str) -> None:
        """Close a seat's connections: at once if none is in use, else when the last user is done.

        An idle connection would keep the engine's port established, which a manager takes for work going on.
        """
        pool = self._pools.pop(key, None)
        if pool is not None:
            pool.detached = True
            if pool.users == 0:
                self._close(pool)

    async def close(self) -> None:
        """Close everything."""
        for key in list(self._pools):
            self.disconnect(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, pool: Pool) -> None:
        task = asyncio.create_task(pool.session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
