"""A running router, attacked from outside: its process, a real nats-server, and engines that record every byte.

Nothing here knows how the router is built: callers are sockets, and what the router did is read from its answers, the
bytes at the engines, ``/metrics`` and ``/proc``. So the same tests hold for any front.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kybernate.bus.setup import init
from kybernate.dev.counting import counting_routers
from kybernate.dev.nats_server import NatsServer
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from services.router.settings import RouterConstants
from tests.bus.worlds import connected

PATIENCE_SECONDS = 120.0
"""For what must happen on a busy machine; no test asserts a time."""

Answer = Callable[[socket.socket, bytes, bytes], bool]
"""Answers a request (connection, head, body) of an engine; returns whether the connection stays open."""


def whole(connection: socket.socket, _: bytes, __: bytes) -> bool:
    """Answer 200 with a short body."""
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}')
    return True


@dataclass
class RawEngine:
    """An engine that records what it receives. ``answer`` may be replaced at any time."""

    answer: Answer = whole
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def raw(self) -> bytes:
        """All bytes of all requests."""
        return b"".join(head + body for head, body in zip(self.heads, self.bodies, strict=False))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        with contextlib.suppress(OSError), connection:
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = connection.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                length = re.search(rb"(?im)^content-length: *(\d+)", head)
                wanted = int(length[1]) if length else 0
                while len(buffer) < wanted:
                    buffer += connection.recv(65536)
                body, buffer = buffer[:wanted], buffer[wanted:]
                with self._lock:
                    self.heads.append(head + b"\r\n\r\n")
                    self.bodies.append(body)
                    self.running += 1
                    self.most_running = max(self.most_running, self.running)
                try:
                    if not self.answer(connection, head, body):
                        return
                finally:
                    with self._lock:
                        self.running -= 1


@dataclass
class Response:
    """A response as it came. ``raw`` may hold several."""

    raw: bytes

    @property
    def status(self) -> int:
        """Of the last response that is no 100 Continue; 0 without one."""
        found = re.findall(rb"HTTP/1\.[01] (\d{3}) ", self.raw)
        return int(found[-1]) if found else 0

    @property
    def whole(self) -> bool:
        """Whether all of an answer with a length is there."""
        head, end, body = self.raw.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        return bool(end) and length is not None and len(body) >= int(length[1])

    @property
    def body(self) -> bytes:
        return self.raw.rpartition(b"\r\n\r\n")[2]

    @property
    def code(self) -> str:
        """Of an error in OpenAI's shape; fails for any other response."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "code"}
        return str(error["code"])

    def header(self, name: str) -> str | None:
        found = re.search(rb"(?im)^%s: *(.*?)\r$" % name.encode(), self.raw)
        return found[1].decode() if found else None


class Stack:
    """A router with its bus. ``settings`` are ``KYB_*`` without the prefix, in lower case, and constants of it;
    ``shell``: a command before it."""

    def __init__(self, folder: Path, shell: str = "", **settings: object) -> None:
        self._folder, self._shell, self._settings = folder, shell, settings
        self._loop = asyncio.new_event_loop()
        self._seqs = iter(range(1, 10**9))
        self._stack = contextlib.AsyncExitStack()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._open_bus())
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
        settings = {"port": 0, "log_format": "json", "nats_url": self.nats_url, **self._settings}
        constants = [f"{name}={settings.pop(name)}" for name in settings.keys() & RouterConstants.model_fields.keys()]
        env = clean | {"KYB_" + name.upper(): str(value) for name, value in settings.items()}
        self.log = self._folder / "router.log"
        with self.log.open("wb") as out:
            command = [sys.executable, "-m", "tests.quick", "services.router", *constants]
            if self._shell:
                command = ["bash", "-c", f'{self._shell} && exec "$@"', "bash", *command]
            self.process = subprocess.Popen(command, env=env, stderr=out)
        self.wait(self._logged_port, "the router logs its address")
        self.wait(lambda: self.get("/readyz").status == 200, "the router is ready")

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open_bus(self) -> None:
        server = await self._stack.enter_async_context(NatsServer(self._folder / "nats"))
        await init(server.url)
        self.nats_url = server.url
        self.bus = await self._stack.enter_async_context(connected(server.url))
        await self._stack.enter_async_context(counting_routers(self.bus, "n1"))

    def run(self, work: Any) -> Any:
        """Run a coroutine on the loop of the bus; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def wait(self, check: Callable[[], Any], what: str) -> Any:
        """Wait until the check returns something true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if found := check():
                    return found
            assert time.monotonic() < deadline, (
                f"{what}: not within {PATIENCE_SECONDS:g} s; {self.log.read_text()[-2000:]}"
            )
            assert self.process.poll() is None, f"the router ended: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)

    def _logged_port(self) -> bool:
        urls = [json.loads(line).get("url") for line in self.log.read_text().splitlines()]
        self.port = next((int(url.rpartition(":")[2]) for url in urls if url), 0)
        return self.port > 0

    # --- the cluster --------------------------------------------------------------------------------------------------

    def seat(
        self, name: str, model: str, endpoint: str, state: SeatState = SeatState.ACTIVE, *key: bytes, **fields: Any
    ) -> None:
        """Write a row of the roster, and wait until the router knows the model; ``key``: the header of one."""
        at = next(self._seqs)
        fields |= {"node": "n1", "seat": name, "model": model, "endpoint": endpoint, "state": state}
        record = SeatRecord.model_validate(fields | {"epoch": at, "seq": at, "since": time.time()})

        async def put() -> None:
            bucket = await self.bus.bucket(BUCKET)
            await bucket.put(record.key, record.model_dump_json().encode())

        self.run(put())
        states = {"active": SeatState.ACTIVE, "parked": SeatState.PARKED}
        self.wait(
            lambda: states.get(json.loads(self.get(f"/v1/models/{model}", *key).body).get("state", "")) is state,
            f"the router knows that {model} is {state}",
        )

    # --- the caller ---------------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def send(self, data: bytes, *, idle_seconds: float = PATIENCE_SECONDS) -> Response:
        """Send bytes on a connection of their own; return all that comes until the router closes, or is idle."""
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            connection.settimeout(idle_seconds)
            return Response(receive(connection))

    def ask(self, data: bytes) -> Response:
        """Send bytes; return one answer as soon as it is whole. A router that refuses one lingers before it closes."""
        with self.connect() as connection:
            connection.sendall(data)
            response = Response(b"")
            while not response.whole and (more := connection.recv(65536)):
                response = Response(response.raw + more)
            return response

    def get(self, path: str, *headers: bytes) -> Response:
        head = [b"GET %s HTTP/1.1" % path.encode(), b"Host: x", b"Connection: close", *headers]
        return self.send(b"\r\n".join(head) + b"\r\n\r\n")

    def post(self, path: str, body: bytes, *headers: bytes) -> Response:
        return self.send(request(path, body, b"Connection: close", *headers))

    # --- what the router tells ----------------------------------------------------------------------------------------

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over its other labels."""
        time.sleep(1.0)  # the text may be so old
        total = 0.0
        for line in self.get("/metrics").raw.decode().splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? ([0-9.e+-]+)", line.strip())
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def rejected(self, reason: str) -> float:
        return self.metric("kybernate_router_rejections_total", reason=reason)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self, *, peak: bool = False) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+)" if peak else r"VmRSS:\s+(\d+)", text)
        return int(found[1]) * 1024


@contextlib.contextmanager
def serving(folder: Path, state: SeatState = SeatState.ACTIVE, **settings: Any) -> Iterator[tuple[Stack, RawEngine]]:
    """A stack with these settings, and the engine of its model ``llama``."""
    with RawEngine() as engine, Stack(folder, **settings) as stack:
        stack.seat("s0", "llama", engine.endpoint, state)
        yield stack, engine


def request(path: str, body: bytes, *headers: bytes, method: bytes = b"POST") -> bytes:
    """Return the bytes of a request with a body of known length."""
    head = [method + b" " + path.encode() + b" HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def receive(connection: socket.socket, until: bytes = b"") -> bytes:
    """Return what arrives until the other side closes or is silent, or until these bytes came."""
    found = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while not (until and until in found):
            data = connection.recv(65536)
            if not data:
                break
            found += data
    return found


def call(model: str = "llama", **fields: object) -> bytes:
    """Return the body of a call."""
    return json.dumps({"model": model, "prompt": "hi", **fields}).encode()
