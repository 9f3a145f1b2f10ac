"""Asyncio client of the fake GPU driver; many calls may be under way on one connection."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from os import PathLike
from typing import Any, Self


class DriverError(Exception):
    """The driver refused a call. ``code`` and ``name`` are CUresult's."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(f"fake GPU driver: {call} answered {name} ({code}){': ' if text else ''}{text}")
        self.code, self.name, self.text = code, name, text


class DriverGoneError(ConnectionError):
    """The daemon closed the connection or cannot be reached."""


class FakeDriverClient(asyncio.Protocol):
    """One connection; the daemon takes the calling process from the kernel, so each process needs its own."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._on_event = on_event
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0
        self._buffer = b""
        self._gone = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls,
        path: str | PathLike[str],
        *,
        wait_seconds: float = 0.0,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> Self:
        """Connect, trying again for ``wait_seconds`` of wall time. Raises DriverGoneError naming socket and remedy.

        ``on_event`` gets what the driver says unasked (see ``attach`` with ``watch``).
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        while True:
            try:
                _, client = await loop.create_unix_connection(lambda: cls(on_event), str(path))
            except OSError as error:
                if loop.time() < deadline:
                    await asyncio.sleep(0.02)
                    continue
                text = (
                    f"no fake GPU driver at {path} ({error.strerror or error}); start python -m kybernate.dev.fakes.gpu"
                )
                raise DriverGoneError(text) from error
            return client

    async def call(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The result of a call. Raises DriverError when the code is not SUCCESS, DriverGoneError when it is lost."""
        reply = await self.request(name, **arguments)
        if reply["code"] != 0:
            raise DriverError(name, reply["code"], reply["name"], reply.get("text", ""))
        return reply

    async def request(self, name: str, **arguments: Any) -> dict[str, Any]:
        """The reply whatever its code. Cancelling drops the reply, not the call. Raises DriverGoneError."""
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        number = self._send(name, arguments)
        self._waiting[number] = future
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def post(self, name: str, **arguments: Any) -> None:
        """Send a call and ignore its reply; does nothing on a lost connection."""
        with contextlib.suppress(DriverGoneError):
            self._send(name, arguments)

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._gone.done()

    async def wait_closed(self) -> None:
        """Return when the connection is gone."""
        await asyncio.shield(self._gone)

    async def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()
            await self.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes came."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            if "id" not in reply:
                if self._on_event is not None:
                    self._on_event(reply)
                continue
            future = self._waiting.get(reply["id"])
            if future is not None and not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Asyncio: the connection is gone."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(DriverGoneError("the fake GPU driver closed the connection"))
        if not self._gone.done():
            self._gone.set_result(None)

    def _send(self, name: str, arguments: dict[str, Any]) -> int:
        if self._transport is None or self.closed or self._transport.is_closing():
            raise DriverGoneError("the connection to the fake GPU driver is closed")
        self._last_id += 1
        self._transport.write(json.dumps({"id": self._last_id, "call": name, **arguments}).encode() + b"\n")
        return self._last_id
