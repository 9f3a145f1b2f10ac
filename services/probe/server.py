"""Answers kubelet: for a parked engine by itself, for a running one with what the engine says."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.probe import grpc
from services.probe.manager import Manager, Seat
from services.probe.settings import ProbeSettings, Target
from services.probe.wire import Answer, Request, WireError, connected, fetch, read_request

if TYPE_CHECKING:
    import ssl

ASK_SHARE = 0.2
"""Of kubelet's timeout: how long the manager may think."""
ENGINE_SHARE = 0.8
"""When the engine must have answered."""
LAST_SHARE = 0.92
"""When everything must be answered."""
_GRACE_SECONDS = 5.0
"""A caller that sends nothing is let go after so long."""


@dataclass(slots=True)
class ProbeServer:
    """One listener per probe of kubelet, and one for its own health."""

    settings: ProbeSettings
    manager: Manager = field(init=False)
    ports: list[int] = field(default_factory=list)
    """Where it listens: its own health, then the targets in order."""
    _tls: "ssl.SSLContext | None" = None

    def __post_init__(self) -> None:
        self.manager = Manager(self.settings.host_ip, self.settings.manager_port, self.settings.pod_uid)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ProbeServer"]:
        """Listen on all ports. Raises OSError when one is taken."""
        host = self.settings.listen_host
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.manager.close)
            for target in (None, *self.settings.targets):
                handle = _Listener(self, target)
                port = target.listen if target is not None else self.settings.health_port
                server = await asyncio.start_server(handle, host, port, backlog=64)
                stack.callback(server.close)
                stack.push_async_callback(handle.close)
                self.ports.append(server.sockets[0].getsockname()[1])
            yield self

    def runs(self, seat: Seat, target: Target) -> bool:
        """Whether the engine is to answer for itself. An engine that starts is not called started before it says so."""
        if target.kind == "startup":
            return not (seat.frozen or (not seat.state and self.manager.last_known.frozen))
        return seat.runs

    async def judge(self, target: Target, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to one probe, before kubelet gives up."""
        begun = time.monotonic()

        def left(share: float) -> float:
            return max(0.001, begun + target.timeout * share - time.monotonic())

        seat = await self.manager.seat(left(ASK_SHARE))
        if not self.runs(seat, target):
            return _fine(seat)
        try:
            async with asyncio.timeout(left(ENGINE_SHARE)):
                answer = await ask()
        except (OSError, TimeoutError, WireError) as error:
            why = str(error) or "it did not answer in time"
            answer = Answer(503, f"the engine at port {target.port}: {why}\n".encode())
        if 200 <= answer.status < 400:
            return answer
        # It may have been parked while it was asked.
        again = await self.manager.seat(left(LAST_SHARE), fresh=0.0)
        moved = target.kind != "startup" and again.since != seat.since
        if moved or not self.runs(again, target):
            return _fine(again)
        return answer

    async def engine_http(self, target: Target, request: Request) -> Answer:
        """The engine's own answer. Raises OSError, WireError."""
        tls = self._unverified() if target.scheme == "HTTPS" else None
        return await fetch(
            self.settings.pod_ip, target.port, request.path, method=request.method, headers=request.headers, tls=tls
        )

    async def engine_tcp(self, target: Target) -> Answer:
        """Whether it accepts connections. Raises OSError."""
        async with connected(self.settings.pod_ip, target.port):
            return Answer(200, b"it accepts connections\n")

    def _unverified(self) -> "ssl.SSLContext":
        """As kubelet: certificates of probes are not verified."""
        if self._tls is None:
            import ssl

            self._tls = ssl.create_default_context()
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        return self._tls


class _Listener:
    """One port."""

    def __init__(self, probe: ProbeServer, target: Target | None) -> None:
        self._probe, self._target = probe, target
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self._target
        patience = _GRACE_SECONDS + (target.timeout if target is not None else 0.0)
        try:
            async with asyncio.timeout(patience):
                if target is not None and target.scheme == "GRPC":
                    await self._grpc(target, reader, writer)
                    return
                try:
                    answer = await self._http(target, await read_request(reader))
                except WireError as error:
                    answer = Answer(400, f"{error}\n".encode())
                writer.write(answer.bytes())
                await writer.drain()
        except (OSError, TimeoutError, grpc.FrameError):
            pass  # the caller left, or never was one
        finally:
            writer.close()

    async def _http(self, target: Target | None, request: Request) -> Answer:
        if target is None:
            return Answer(200, b"ok\n") if request.path.partition("?")[0] == "/healthz" else Answer(404)
        if target.scheme == "TCP":
            return await self._probe.judge(target, lambda: self._probe.engine_tcp(target))
        return await self._probe.judge(target, lambda: self._probe.engine_http(target, request))

    async def _grpc(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Nobody can be asked twice here: what kubelet sends goes to the engine, or is answered."""
        seat = await self._probe.manager.seat(target.timeout * ASK_SHARE)
        if not self._probe.runs(seat, target):
            await grpc.say_serving(reader, writer)
            return
        async with connected(self._probe.settings.pod_ip, target.port) as (from_engine, to_engine):
            both = [asyncio.create_task(_pour(reader, to_engine)), asyncio.create_task(_pour(from_engine, writer))]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in both:
                    one.cancel()
                await asyncio.wait(both)


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()


def _fine(seat: Seat) -> Answer:
    why = f"its seat is {seat.state}" if seat.state else "nobody says what its seat does"
    return Answer(200, f"the engine is not asked: {why}\n".encode())
