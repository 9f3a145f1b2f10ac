"""Connections to engines: when one is used again, and that a caller who does not read slows its engine down."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

import pytest

from kybernate.http.deadline import Deadline
from kybernate.http.framing import Body
from kybernate.http.head import Head
from services.router.engines import EngineConnection, EngineError, EnginePools
from tests.until import until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Received:
    """An exchange that keeps what it gets."""

    def __init__(self) -> None:
        self.sent_at: float | None = None
        self.connection: asyncio.Future[EngineConnection] = asyncio.get_running_loop().create_future()
        self.answers: list[bytes] = []
        self.errors: list[EngineError] = []
        self.failures: list[Exception] = []
        self.done = asyncio.Event()

    def connected(self, connection: EngineConnection) -> None:
        self.connection.set_result(connection)

    def refused(self, error: EngineError) -> None:
        self.connection.set_exception(error)

    def whole(self, head: Head, body: bytes) -> None:
        assert head.status == 200
        self.answers.append(body)
        self.done.set()

    def began(self, head: Head, body: Body) -> None:
        assert head.status == 200
        assert body.chunked

    def piece(self, raw: bytes, payload: bytes, *, last: bool) -> None:
        assert payload in raw
        self.answers.append(payload)
        if last:
            self.done.set()

    def silent(self, connection: EngineConnection) -> None:
        connection.drop()

    def broke(self, error: EngineError) -> None:
        self.errors.append(error)
        self.done.set()

    def failed(self, error: Exception) -> None:
        self.failures.append(error)
        self.done.set()


@asynccontextmanager
async def engine(answer: Callable[[], bytes]) -> AsyncIterator[tuple[EnginePools, str]]:
    """An engine that answers each request with these bytes, and pools to reach it."""
    open_ones: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        while await reader.read(65536):
            writer.write(answer())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pools = EnginePools()
    try:
        yield pools, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await pools.close()
        server.close()
        for writer in open_ones:
            writer.close()


async def ask(pools: EnginePools, endpoint: str, received: Received | None = None) -> Received:
    received = received or Received()
    pool = pools.pool("n1.s0", endpoint)
    connection = pools.take(pool)
    if connection is None:
        pools.connect(pool, received)
        connection = await received.connection
    connection.send(received, b"POST / HTTP/1.1\r\n\r\n", b"")
    await received.done.wait()
    return received


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (OK, 1),
        (OK + OK, 0),
        (OK + b"x", 0),
        (OK.replace(b"200 OK\r\n", b"200 OK\r\nConnection: close\r\n"), 0),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", 1),
    ],
)
async def test_a_connection_is_used_again_only_after_exactly_one_answer(answer: bytes, kept: int) -> None:
    async with engine(lambda: answer) as (pools, endpoint):
        received = await ask(pools, endpoint)
        assert (b"".join(received.answers), received.errors) == (b"hi", [])
        assert len(pools.pool("n1.s0", endpoint).idle) == kept


async def test_an_answer_that_came_before_the_request_was_sent_ends_the_connection() -> None:
    """What the engine reads later may be answered again: the next caller would get that."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(OK.replace(b"hi", b"h"))
        await until(lambda: len(received.connections) > 0 and received.began_early, what="the head has arrived")
        await reader.readexactly(32 * 2**20)
        writer.write(b"i")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        ended.set()

    class Early(Received):
        connections: ClassVar[list[EngineConnection]] = []

        @property
        def began_early(self) -> bool:
            return self.connections[0]._early

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pools, received, ended = EnginePools(), Early(), asyncio.Event()
    pool = pools.pool("n1.s0", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        pools.connect(pool, received)
        received.connections.append(await received.connection)
        received.connections[0].send(received, b"POST / HTTP/1.1\r\n\r\n", b"x" * (32 * 2**20))
        await received.done.wait()
        assert (b"".join(received.answers), pool.idle) == (b"hi", [])
    finally:
        await pools.close()
        await ended.wait()
        server.close()


class Failing(Received):
    def whole(self, head: Head, body: bytes) -> None:
        raise KeyError("whole")

    def piece(self, raw: bytes, payload: bytes, *, last: bool) -> None:
        raise KeyError("piece")


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ],
)
async def test_an_error_of_the_routers_own_reaches_the_call_whose_answer_it_concerns(answer: bytes) -> None:
    async with engine(lambda: answer) as (pools, endpoint):
        failing = await ask(pools, endpoint, Failing())
        assert isinstance(failing.failures[0], KeyError)
        assert not failing.errors


async def test_unexpected_bytes_end_an_idle_connection() -> None:
    async with engine(lambda: OK) as (pools, endpoint):
        await ask(pools, endpoint)
        pool = pools.pool("n1.s0", endpoint)
        (connection,) = pool.idle
        connection.data_received(OK)
        await until(lambda: not pool.idle, what="the connection is closed")


async def test_connections_are_opened_before_they_are_needed() -> None:
    async with engine(lambda: OK) as (pools, endpoint):
        pools.prepare("n1.s0", endpoint, 3)
        pool = pools.pool("n1.s0", endpoint)
        await until(lambda: len(pool.idle) == 3, what="three connections are open")
        assert (await ask(pools, endpoint)).answers == [b"hi"]
        assert len(pool.idle) == 3
        pools.disconnect("n1.s0")
        assert pool.closed
        assert not pool.idle


async def test_a_deadline_rings_at_the_last_time_that_was_set() -> None:
    loop, rung = asyncio.get_running_loop(), asyncio.Event()
    deadline = Deadline(loop, rung.set)
    deadline.set(1000)
    deadline.set(0.01)
    await asyncio.wait_for(rung.wait(), 60)
    rung.clear()
    began = loop.time()
    deadline.set(0.01)
    deadline.set(0.1)
    await asyncio.wait_for(rung.wait(), 60)
    assert loop.time() >= began + 0.1
    rung.clear()
    deadline.set(0.01)
    deadline.end()
    await asyncio.sleep(0.05)
    assert not rung.is_set()


async def test_an_error_while_connecting_is_a_failed_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> ssl.SSLContext:
        raise RuntimeError("no certificates")

    monkeypatch.setattr(ssl, "create_default_context", broken)
    pools, received = EnginePools(), Received()
    await pools.connect(pools.pool("n1.s0", "https://127.0.0.1:9"), received)
    with pytest.raises(EngineError):
        await received.connection
    await pools.close()
