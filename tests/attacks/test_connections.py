"""Connections that cost memory or descriptors: silent ones, partial heads, callers who left, few descriptors."""

import contextlib
import resource
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kybernate.dev.nats_server import free_port
from kybernate.seat import SeatState
from tests.attacks.stack import Response, Stack, call, receive, request, serving
from tests.bus.guarded import certificates

MIB = 2**20
PATH = "/v1/chat/completions"


@contextlib.contextmanager
def many(stack: Stack, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections, from four addresses, on which these bytes were sent."""
    found: list[socket.socket] = []
    try:
        for at in range(count):
            one = socket.create_connection(("127.0.0.1", stack.port), 60, (f"127.0.0.{2 + at % 4}", 0))
            found.append(one)
            if first:
                with contextlib.suppress(OSError):
                    one.sendall(first)
        yield found
    finally:
        for one in found:
            one.close()


def comes_back(stack: Stack, before: int) -> None:
    """Wait until the router has given back the memory of connections that have ended."""
    stack.wait(lambda: stack.memory_bytes() < before + 40 * MIB, f"as little memory as before: {before // MIB} MiB")


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_partial_heads_take_little_memory_and_others_are_served(folder: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"X-%d: %s\r\n" % (at, b"y" * 480) for at in range(126)
    )
    with serving(folder) as (stack, _):
        before = stack.memory_bytes()
        for size in (16_000, len(head)):
            with many(stack, 6000, head[:size]):
                assert stack.post(PATH, call()).status == 200
                assert stack.memory_bytes() < 300 * MIB
            comes_back(stack, before)
        assert stack.memory_bytes(peak=True) < 300 * MIB


@pytest.mark.parametrize("kind", ["heads without their body", "heads of held calls", "bytes after held calls"])
def test_what_waits_in_complete_requests_is_counted(folder: Path, kind: str) -> None:
    body = call()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % (PATH.encode(), len(body))
    if kind == "bytes after held calls":  # they come with a request that is answered at once
        data = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + head + b"\r\n" + body + b"y" * 60_000
    else:
        data = head + b"".join(b"X-%d: %s\r\n" % (at, b"y" * 115) for at in range(124)) + b"\r\n"
        data += body if kind == "heads of held calls" else b""
    with serving(folder, SeatState.PARKED, held_bytes=20 * MIB) as (stack, _):
        before = stack.memory_bytes()
        with many(stack, 2000, data):
            assert stack.get("/healthz").status == 200  # those before have been taken
            assert stack.rejected("body_memory") + stack.rejected("pipelined") > 500
            assert stack.memory_bytes() < before + 64 * MIB
            assert stack.metric("kybernate_router_body_bytes") <= 20 * MIB
        stack.wait(lambda: stack.metric("kybernate_router_body_bytes") == 0, "what has ended is forgotten")


class TlsStack(Stack):
    """A router whose port speaks TLS; its callers trust it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        folder.mkdir(parents=True)
        certificates(folder)
        self._trusting = ssl.create_default_context(cafile=folder / "ca.crt")
        super().__init__(folder, tls_cert_file=folder / "server.crt", **settings)

    def connect(self) -> socket.socket:
        return self._trusting.wrap_socket(super().connect(), server_hostname="localhost")


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01"], ids=["silent", "a few bytes"])
def test_connections_to_a_tls_port_that_never_shake_hands_take_little_memory(folder: Path, first: bytes) -> None:
    with TlsStack(folder, connections=4096) as stack:
        before = stack.memory_bytes()
        with many(stack, 3000, first):
            assert stack.memory_bytes() < 300 * MIB
            assert stack.get("/healthz").status == 200
        comes_back(stack, before)
        assert stack.memory_bytes(peak=True) < 300 * MIB


def test_connections_to_a_tls_port_are_counted_when_they_are_accepted(folder: Path) -> None:
    with TlsStack(folder, connections=100) as stack, many(stack, 300) as callers:

        def closed() -> int:
            found = 0
            for caller in callers:
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    found += caller.recv(1) == b""
            return found

        deadline = time.monotonic() + 8  # before a limit of time closes them
        while (left := 300 - closed()) > 100 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left <= 100


def test_an_idle_tls_connection_takes_40_kib(folder: Path) -> None:
    with TlsStack(folder) as stack:
        ask = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        before, open_ones = stack.memory_bytes(), []
        for _ in range(500):
            one = stack.connect()
            one.sendall(ask)
            assert one.recv(4096)
            open_ones.append(one)
        each = (stack.memory_bytes() - before) / 500
        for one in open_ones:
            one.close()
        assert each < 48 * 1024, "40 KiB, and the heap's fragments"


def test_callers_who_left_are_gone_and_no_engine_computes_for_them(folder: Path) -> None:
    with serving(folder, SeatState.PARKED) as (stack, engine):
        linger = struct.pack("ii", 1, 0)
        for more, reset in ((b"x" * 500_000, True), (b"x" * 10_000, False), (b"", True)):
            with many(stack, 100, request(PATH, call()) + more[:1]) as callers:
                for caller in callers:
                    caller.setblocking(False)
                    with contextlib.suppress(OSError):
                        caller.send(more)
                    if reset:
                        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            deadline = time.monotonic() + 5
            while stack.metric("kybernate_router_held_requests") and time.monotonic() < deadline:
                time.sleep(0.05)
            assert stack.metric("kybernate_router_held_requests") == 0
        stack.seat("s0", "llama", engine.endpoint)
        assert stack.post(PATH, call()).status == 200
        assert len(engine.heads) == 1


@pytest.mark.parametrize("hard", [1024, 20_000])
def test_too_few_descriptors_leave_room_for_calls_and_do_not_fill_the_log(folder: Path, hard: int) -> None:
    with serving(folder, shell=f"ulimit -Sn 1024 && ulimit -Hn {hard}") as (stack, _), contextlib.ExitStack() as opened:
        kept = [opened.enter_context(stack.connect()) for _ in range(6)]

        def ask(caller: socket.socket) -> int:
            caller.sendall(request(PATH, call()))
            return Response(receive(caller, b'{"ok":true}')).status

        with many(stack, 1200, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"), ThreadPoolExecutor(6) as callers:
            assert [*callers.map(ask, kept)] == [200] * 6
        assert len(stack.log.read_text().splitlines()) < 100


def test_the_operations_port_closes_silent_and_partial_connections(folder: Path) -> None:
    with Stack(folder, health_port=(port := free_port())) as stack:
        stack.port = port
        with many(stack, 1000, b"GET /metrics HT"):
            files = Path(f"/proc/{stack.pid}/fd")
            stack.wait(lambda: len(list(files.iterdir())) < 100, "the connections are closed")
        answer = stack.get("/metrics")
        assert answer.status == 200
        assert answer.header("Server") is None
