"""Proxies side by side: what each costs per request and per chunk of a stream, with the same engine and load.

Figures are CPU time of the proxy's whole process tree, in turn for all proxies, so that the noise of a machine hits all
alike: read ratios. The engine and the callers run on one core, the proxy on another one where there are two.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from bench.processes import process_tree, tree_cpu_seconds

CALLERS = 64
OPEN = 1000
"""Streams whose memory is measured."""
CHUNKS = 50
CHUNK_SECONDS = 0.02
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: "
_WHOLE = json.dumps({"choices": [{"message": {"content": "x" * 300}}], "model": "bench"}).encode()
_EVENT = b"data: " + json.dumps({"choices": [{"delta": {"content": "x" * 100}}], "model": "bench"}).encode() + b"\n\n"
_ANSWER = _HEAD + b"application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_WHOLE), _WHOLE)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_STREAM = _HEAD + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """As little engine as possible: answers each POST whole, or as a stream of timed chunks."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for requests."""
        self._transport, self._data = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are complete."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]) if b"content-length:" in head else 0
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            self.answer(body)

    def answer(self, body: bytes, /) -> None:
        """Answer one request."""
        if b'"stream": true' in body or b'"stream":true' in body:
            self._transport.write(_STREAM)
            self._next(CHUNKS)
        else:
            self.write_whole()

    def write_whole(self) -> None:
        """Write an answer that is no stream."""
        self._transport.write(_ANSWER)

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(_CHUNK if left else _END)
        if left:
            asyncio.get_running_loop().call_later(CHUNK_SECONDS, self._next, left - 1)


def _complete(answer: bytes) -> bool:
    """Return whether an answer that was written anew, so not as the engine sent it, is complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return length is not None and len(body) >= int(length[1])


class Caller(asyncio.Protocol):
    """One connection that sends a request when the last answer is complete, ``count`` times."""

    def __init__(self, stream: bool, count: int, prompt: int = 900) -> None:
        body = {"model": "bench", "stream": stream, "messages": [{"role": "user", "content": "x" * prompt}]}
        content = json.dumps(body).encode()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nUser-Agent: bench\r\nAccept: */*\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
        )
        self._stream, self._left = stream, count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.took: list[float] = []
        """Seconds of each request."""
        self.events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._data, self.began = b"", time.perf_counter()
        self._left -= 1
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Check a complete answer, and send the next request."""
        self._data += data
        if self._stream:
            if not self._data.endswith(_END):
                return
            self.events += self._data.count(_EVENT)
        elif not self._data.endswith(_WHOLE) and not _complete(self._data):
            return
        assert self._data.startswith(b"HTTP/1.1 200"), self._data[:300]
        self.took.append(time.perf_counter() - self.began)
        if self._left:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail, unless all requests are answered."""
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the proxy closed the connection: {exc}; {self._data[:300]!r}"))


async def load(port: int, *, callers: int, count: int, stream: bool = False) -> tuple[list[float], int]:
    """Return the seconds of all requests, and the events received."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Caller(stream, count), "127.0.0.1", port) for _ in range(callers)]
    async with asyncio.timeout(120):
        await asyncio.gather(*(caller.done for _, caller in made))
    return [took for _, caller in made for took in caller.took], sum(caller.events for _, caller in made)


# --- proxies ----------------------------------------------------------------------------------------------------------


@dataclass
class Peer:
    """A proxy on a port. ``pid`` 0: none, callers reach the engine."""

    name: str
    port: int
    pid: int = 0
    request_us: list[float] = field(default_factory=list)
    chunk_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)
    """Seconds of requests one after another."""
    memory_before_mib: float = 0.0
    """After the rounds, before ``OPEN`` streams."""
    streaming_mib: float = 0.0
    """Memory while ``OPEN`` streams are open."""

    def cpu_seconds(self) -> float:
        """CPU time of the process and its children so far."""
        return tree_cpu_seconds(self.pid) if self.pid else 0.0

    def memory_mib(self) -> float:
        """Proportional memory of the process and its children."""
        total = 0
        for pid in process_tree(self.pid) if self.pid else ():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024


@asynccontextmanager
async def process(
    *command: str, log: Path, env: dict[str, str] | None = None, folder: Path | None = None
) -> AsyncIterator[int]:
    """A proxy's process, on the last core."""
    core = sorted(os.sched_getaffinity(0))[-1]

    def pin() -> None:
        os.sched_setaffinity(0, {core})

    with log.open("wb") as out:
        found = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, env=env, cwd=folder, preexec_fn=pin
        )
    try:
        yield found.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            found.terminate()
        await found.wait()


async def listens(port: int, log: Path) -> None:
    """Wait until something listens on the port."""
    for _ in range(1200):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise TimeoutError((await asyncio.to_thread(log.read_text))[-2000:])


def nginx(folder: Path, port: int, engine: int) -> list[str]:
    """Return the command of nginx, with one worker and without buffering."""
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        "events { worker_connections 8192; }\n"
        "http { access_log off; keepalive_requests 10000000;\n"
        f" upstream engine {{ server 127.0.0.1:{engine}; keepalive 2048; keepalive_requests 10000000; }}\n"
        f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engine; proxy_http_version 1.1;\n"
        "  proxy_set_header Connection ''; proxy_buffering off; } } }\n"
    )
    return ["nginx", "-c", str(config), "-p", str(folder)]


def haproxy(folder: Path, port: int, engine: int) -> list[str]:
    """Return the command of HAProxy, with one thread."""
    config = folder / "haproxy.cfg"
    config.write_text(
        "global\n nbthread 1\n maxconn 8192\n"
        "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n http-reuse always\n"
        f"frontend f\n bind 127.0.0.1:{port}\n default_backend b\nbackend b\n server s 127.0.0.1:{engine}\n"
    )
    return ["haproxy", "-db", "-f", str(config)]


def envoy(folder: Path, port: int, engine: int) -> list[str]:
    """Return the command of Envoy, with one thread."""
    address = '{"socket_address": {"address": "127.0.0.1", "port_value": %d}}'
    http = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
    route = {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
        {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}]}]}  # fmt: skip
    manager = {"@type": http, "stat_prefix": "bench", "route_config": route, "http_filters": [
        {"name": "envoy.filters.http.router", "typed_config": {"@type": router}}]}  # fmt: skip
    listener = {"address": json.loads(address % port), "filter_chains": [
        {"filters": [{"name": "envoy.http", "typed_config": manager}]}]}  # fmt: skip
    endpoint = {"endpoint": {"address": json.loads(address % engine)}}
    cluster = {"name": "engine", "type": "STATIC", "load_assignment": {
        "cluster_name": "engine", "endpoints": [{"lb_endpoints": [endpoint]}]}}  # fmt: skip
    config = folder / "envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    return ["envoy", "-c", str(config), "--concurrency", "1", "--log-level", "error"]


def vllm_router(_: Path, port: int, engine: int) -> list[str]:
    """Return the command of vLLM's router in Rust."""
    command = ["vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    return [*command, "--worker-urls", f"http://127.0.0.1:{engine}"]


def litellm(folder: Path, port: int, engine: int) -> list[str]:
    """Return the command of LiteLLM's proxy, with one worker."""
    call = {"model": "openai/bench", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none", "max_retries": 0}
    config = folder / "litellm.yaml"
    settings = {"dangerously_permit_weak_or_unset_master_key": True}
    models = [{"model_name": "bench", "litellm_params": call}]
    config.write_text(json.dumps({"model_list": models, "general_settings": settings}))
    return ["litellm", "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


PROXIES = {"nginx": nginx, "haproxy": haproxy, "envoy": envoy, "vllm-router": vllm_router, "litellm": litellm}
"""Measured where their command is installed."""


def installed(command: str) -> str | None:
    """Return the path of a command, also beside this Python."""
    return shutil.which(
        command, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
    )


@asynccontextmanager
async def proxies(folder: Path, engine: int, ports: Iterator[int]) -> AsyncIterator[list[Peer]]:
    """All installed proxies before one engine."""
    async with AsyncExitStack() as stack:
        peers = []
        for name, make in PROXIES.items():
            path = installed(name)
            if path is None:
                continue
            port, log = next(ports), folder / f"{name}.out"
            command = make(folder, port, engine)
            pid = await stack.enter_async_context(process(path, *command[1:], log=log))
            await listens(port, log)
            peers.append(Peer(name, port, pid))
        yield peers


# --- rounds -----------------------------------------------------------------------------------------------------------


async def measure(peers: list[Peer], *, rounds: int, requests: int, streams: int) -> None:
    """Measure all proxies in turn, ``rounds`` times."""
    for peer in peers:
        await load(peer.port, callers=CALLERS, count=5)
    for _ in range(rounds):
        for peer in peers:
            cpu, began = peer.cpu_seconds(), time.perf_counter()
            await load(peer.port, callers=CALLERS, count=requests // CALLERS)
            count = requests // CALLERS * CALLERS
            peer.rates.append(count / (time.perf_counter() - began))
            peer.request_us.append((peer.cpu_seconds() - cpu) / count * 1e6)
            cpu = peer.cpu_seconds()
            _, events = await load(peer.port, callers=streams, count=1, stream=True)
            peer.chunk_us.append((peer.cpu_seconds() - cpu) / (streams * CHUNKS) * 1e6)
            assert peer.name not in ("direct",) or events == streams * CHUNKS
            peer.one += (await load(peer.port, callers=1, count=200))[0]
    for peer in peers[1:]:
        peer.memory_before_mib = peer.memory_mib()
        opened = asyncio.create_task(load(peer.port, callers=OPEN, count=1, stream=True))
        while not opened.done():
            peer.streaming_mib = max(peer.streaming_mib, peer.memory_mib())
            await asyncio.sleep(0.2)
        await opened


def figures(peers: list[Peer]) -> dict[str, float]:
    """Return the figures by name: minimum and median over rounds."""
    found: dict[str, float] = {}
    for peer in peers:
        one = sorted(peer.one)
        found |= {
            f"{peer.name}_requests_per_second": statistics.median(peer.rates),
            f"{peer.name}_p50_ms": one[len(one) // 2] * 1e3,
            f"{peer.name}_p99_ms": one[len(one) * 99 // 100] * 1e3,
        }
        if peer.pid:
            found |= {
                f"{peer.name}_cpu_us_per_request": min(peer.request_us),
                f"{peer.name}_cpu_us_per_request_median": statistics.median(peer.request_us),
                f"{peer.name}_cpu_us_per_chunk": min(peer.chunk_us),
                f"{peer.name}_cpu_us_per_chunk_median": statistics.median(peer.chunk_us),
                f"{peer.name}_memory_mib": peer.memory_before_mib,
                f"{peer.name}_memory_with_streams_mib": peer.streaming_mib,
            }
    return found
