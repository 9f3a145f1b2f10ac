"""Answers kubelet's probes: a parked engine's itself, a running engine's with the engine's own response."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from services.probe.settings import ProbeSettings, ProbeTarget
from services.probe.wire import (
    ProbeRequest,
    ProbeResponse,
    WireError,
    connected,
    fetch,
    read_request,
    serve_grpc_health,
)

if TYPE_CHECKING:
    import ssl

ASK_SHARE = 0.2
"""Fraction of kubelet's timeout after which the manager's answer is too late."""
ENGINE_SHARE = 0.8
"""Fraction after which the engine's response is too late."""
LAST_SHARE = 0.92
"""Fraction after which the manager's second answer is too late."""
_GRACE_SECONDS = 5.0
"""Time after which an idle connection is closed, in addition to the probe's timeout."""
FRESH_SECONDS = 1.0
"""How long an answer, or a missing answer, is valid."""
MOST_CONNECTIONS = 64
"""With 60 kB of a head each, 7 MiB. Then one of the address with the most of them ends: its oldest without a request,
else its oldest."""
STOP_SECONDS = 10.0
STOP_POLL_SECONDS = 0.2
_FROZEN = frozenset({"draining", "parking", "parked", "activating", "migrating"})


# --- the manager ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SeatStatus:
    """The manager's answer about the seat of this pod."""

    state: str = ""
    """Empty: the manager does not answer, or has no seat for this pod."""
    since: float = 0.0
    """Unix seconds at which it entered this state."""
    started: bool = False
    """It has been active before: kyb-run may start it again, in a container whose startup probe has passed."""

    @property
    def runs(self) -> bool:
        """True if the engine runs and answers probes itself."""
        return self.state == "active" or (self.state == "starting" and not self.started)

    @property
    def frozen(self) -> bool:
        """True if the engine is frozen or ended, or may be in a moment; it has been active before."""
        return self.state in _FROZEN or (self.state == "waiting" and self.started)


@dataclass(slots=True)
class ManagerClient:
    """Requests the status of this pod's seat from the node's manager; concurrent probes share one request."""

    host: str
    port: int
    uid: str
    last: SeatStatus = SeatStatus()
    last_known: SeatStatus = SeatStatus()
    """The last answer that named a state."""
    _at: float = float("-inf")
    _request: "asyncio.Task[SeatStatus] | None" = None

    async def seat(self, timeout: float, *, fresh: float = FRESH_SECONDS) -> SeatStatus:
        """Return the seat's status, at most ``fresh`` seconds old; an empty one if it is not known in time.

        One that lets the engine answer is requested each time: a probe that computes ends an engine that sleeps.
        """
        if not self.last.runs and time.monotonic() - self._at < fresh:
            return self.last
        if not self.port:
            return SeatStatus()
        if self._request is None or self._request.done():
            self._request = asyncio.create_task(self._fetch(timeout))
        done, _ = await asyncio.wait([self._request], timeout=timeout)
        return self._request.result() if done else SeatStatus()

    async def wait_before_stop(self) -> None:
        """Return when kubelet may signal the engine: the checkpointer has ended its processes or will not, or for
        STOP_SECONDS the manager has seen no deletion (kubelet restarts the container) or has not answered."""
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    response = await fetch(self.host, self.port, f"/v1/pods/{self.uid}/stop")
                answer = json.loads(response.body)
                if response.status != 200 or not answer["wait"]:
                    return
                if answer["deleted"]:
                    deadline = time.monotonic() + STOP_SECONDS
            except (OSError, TimeoutError, WireError, ValueError, KeyError):
                pass
            await asyncio.sleep(STOP_POLL_SECONDS)

    async def close(self) -> None:
        """Cancel the pending request."""
        if self._request is not None:
            self._request.cancel()
            await asyncio.wait([self._request])

    async def _fetch(self, timeout: float) -> SeatStatus:
        try:
            async with asyncio.timeout(timeout):
                response = await fetch(self.host, self.port, f"/v1/pods/{self.uid}")
            seat = _status(response.body) if response.status == 200 else SeatStatus()
        except (OSError, TimeoutError, WireError):
            seat = SeatStatus()
        self.last, self._at = seat, time.monotonic()
        if seat.state:
            self.last_known = seat
        return seat


def _status(body: bytes) -> SeatStatus:
    try:
        record = json.loads(body)
        return SeatStatus(str(record["state"]), float(record.get("since") or 0.0), bool(record.get("started")))
    except (ValueError, KeyError, TypeError):
        return SeatStatus()


# --- the probes -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ProbeServer:
    """One listener per probe of kubelet, and one for its own health."""

    settings: ProbeSettings
    manager: ManagerClient = field(init=False)
    ports: list[int] = field(default_factory=list)
    """Ports it listens on: its own health, then the targets in order."""
    _tls: "ssl.SSLContext | None" = None
    _open: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)
    """Connections by age."""
    _asked: set["asyncio.Task[None] | None"] = field(default_factory=set)
    """Those whose request has arrived."""

    def __post_init__(self) -> None:
        self.manager = ManagerClient(self.settings.host_ip, self.settings.manager_port, self.settings.pod_uid)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ProbeServer"]:
        """Listen on all ports; connections end with the loop. Raises OSError when a port is taken."""
        host = "::" if ":" in self.settings.pod_ip else "0.0.0.0"  # all addresses of the pod's IP family
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.manager.close)
            for target in (None, *self.settings.targets):
                port = target.listen if target is not None else self.settings.health_port
                server = await asyncio.start_server(partial(self._accept, target), host, port, backlog=64)
                stack.callback(server.close)
                self.ports.append(server.sockets[0].getsockname()[1])
            yield self

    def runs(self, seat: SeatStatus, target: ProbeTarget) -> bool:
        """Return whether the engine must answer this probe itself.

        A startup probe succeeds without the engine only if the seat is parked, or was when the manager last answered:
        an engine that never answered has not started.
        """
        if target.kind == "startup":
            return not (seat.frozen or (not seat.state and self.manager.last_known.frozen))
        return seat.runs

    async def judge(self, target: ProbeTarget, ask: Callable[[], Awaitable[ProbeResponse]]) -> ProbeResponse:
        """Return the response to one probe within kubelet's timeout; ``ask`` sends the probe to the engine."""
        begun = time.monotonic()

        def left(share: float) -> float:
            return max(0.001, begun + target.timeout * share - time.monotonic())

        seat = await self.manager.seat(left(ASK_SHARE))
        if not self.runs(seat, target):
            return _healthy(seat)
        try:
            async with asyncio.timeout(left(ENGINE_SHARE)):
                response = await ask()
        except (OSError, TimeoutError, WireError) as error:
            why = str(error) or "it did not answer in time"
            response = ProbeResponse(503, f"the engine at port {target.port}: {why}\n".encode())
        if 200 <= response.status < 400:
            return response
        # The engine may have been parked during the probe.
        again = await self.manager.seat(left(LAST_SHARE), fresh=0.0)
        moved = target.kind != "startup" and again.since != seat.since
        if moved or not self.runs(again, target):
            return _healthy(again)
        return response

    async def engine_http(self, target: ProbeTarget, request: ProbeRequest) -> ProbeResponse:
        """Send the probe to the engine and return its response. Raises OSError, WireError."""
        tls = self._unverified() if target.scheme == "HTTPS" else None
        return await fetch(
            self.settings.pod_ip, target.port, request.path, method=request.method, headers=request.headers, tls=tls
        )

    async def engine_tcp(self, target: ProbeTarget) -> ProbeResponse:
        """Connect to the engine's port. Raises OSError."""
        async with connected(self.settings.pod_ip, target.port):
            return ProbeResponse(200, b"it accepts connections\n")

    def _unverified(self) -> "ssl.SSLContext":
        """Return a TLS context that verifies nothing, as kubelet does for probes."""
        if self._tls is None:
            import ssl

            self._tls = ssl.create_default_context()
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        return self._tls

    def _accept(self, target: ProbeTarget | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio's own task for it, one that is cancelled at the end, is an error in the log of Python 3.11.
        task = asyncio.create_task(self._answer(target, reader, writer))
        task.add_done_callback(self._forget)
        if len(self._open) >= MOST_CONNECTIONS:
            [(most, _)] = Counter(map(_address, self._open.values())).most_common(1)
            theirs = [one for one, other in self._open.items() if _address(other) == most]
            last = next((one for one in theirs if one not in self._asked), theirs[0])
            self._open[last].transport.abort()
            last.cancel()
            self._forget(last)
        self._open[task] = writer

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        self._asked.discard(task)

    async def _answer(
        self, target: ProbeTarget | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a connection to one port; ``target`` None: to that of kyb-probe's own health."""
        seconds = _GRACE_SECONDS + (target.timeout if target is not None else 0.0)
        try:
            async with asyncio.timeout(seconds) as limit:
                if target is not None and target.scheme == "GRPC":
                    await self._grpc(target, reader, writer)
                    return
                try:
                    request = await read_request(reader)
                    self._asked.add(asyncio.current_task())
                    if target is None and request.path == "/stop":
                        limit.reschedule(None)  # kubelet's grace period is the limit
                    response = await self._http(target, request)
                except WireError as error:
                    response = ProbeResponse(400, f"{error}\n".encode())
                writer.write(response.bytes())
                await writer.drain()
        except (OSError, TimeoutError, WireError):
            pass  # the caller disconnected, or did not speak HTTP/2
        finally:
            writer.close()

    async def _http(self, target: ProbeTarget | None, request: ProbeRequest) -> ProbeResponse:
        if target is None and request.path.partition("?")[0] == "/stop":
            await self.manager.wait_before_stop()
            return ProbeResponse(200, b"the engine may be stopped\n")
        if target is None:
            return ProbeResponse(200, b"ok\n") if request.path.partition("?")[0] == "/healthz" else ProbeResponse(404)
        if target.scheme == "TCP":
            return await self.judge(target, lambda: self.engine_tcp(target))
        return await self.judge(target, lambda: self.engine_http(target, request))

    async def _grpc(self, target: ProbeTarget, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the connection through to a running engine, or answer SERVING; a gRPC probe cannot be sent twice."""
        seat = await self.manager.seat(target.timeout * ASK_SHARE)
        if not self.runs(seat, target):
            await serve_grpc_health(reader, writer)
            return
        async with connected(self.settings.pod_ip, target.port) as (from_engine, to_engine):
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


def _address(writer: asyncio.StreamWriter) -> str:
    return str((writer.get_extra_info("peername") or ("",))[0])


def _healthy(seat: SeatStatus) -> ProbeResponse:
    why = f"its seat is {seat.state}" if seat.state else "the state of its seat is unknown"
    return ProbeResponse(200, f"the engine is not probed: {why}\n".encode())
