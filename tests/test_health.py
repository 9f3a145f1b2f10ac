"""The address of a service: what it says that it is, and what follows if it cannot be had."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from kybernate.health import Health
from kybernate.http import server as http_server
from kybernate.http.connection import Times
from kybernate.http.server import HttpServer
from kybernate.http_api import errors
from kybernate.lifecycle import CannotListenError
from kybernate.settings import Settings, SettingsError
from kybernate.tls import ServerCertificate
from tests.bus.guarded import certificates
from tests.until import until


@pytest.mark.parametrize(("host", "url"), [("10.0.0.7", "http://10.0.0.7:9471"), ("fd00::7", "http://[fd00::7]:9471")])
def test_an_address_of_ipv6_stands_in_brackets(host: str, url: str) -> None:
    assert HttpServer(web.Application(), host, 9471).url == url


async def serve(port: int) -> None:
    async with Health().server(Settings(health_port=port)):
        pass


async def test_the_error_of_a_taken_port_names_the_setting_and_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListenError) as error:
        await serve(port := taken.getsockname()[1])

    what = f"cannot listen on 127.0.0.1 port {port}: another process has this port"
    assert str(error.value) == f"{what}; stop it (ss -ltnp lists it), or set KYB_HEALTH_PORT"


async def test_the_error_of_a_program_without_settings_names_its_options() -> None:
    with pytest.raises(CannotListenError, match=r"192\.0\.2\.1 port 0: .*; correct --host or --port"):
        async with HttpServer(web.Application(), "192.0.2.1", 0, prefix=""):
            pass


def test_an_address_of_another_machine_is_named_with_its_setting() -> None:
    with pytest.raises(SettingsError, match=r"KYB_HEALTH_HOST='192\.0\.2\.1': .* give an address of it"):
        Settings.from_env({"KYB_HEALTH_HOST": "192.0.2.1"})


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_an_empty_host_is_all_addresses_of_both_families() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as free:
        port = free.getsockname()[1]
    async with Health().server(Settings(health_host="", health_port=port)):
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 9).close()


async def test_silent_connections_to_a_tls_port_are_counted_and_take_no_memory_for_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 20)
    certificates(tmp_path)
    app, context = web.Application(), ServerCertificate(tmp_path / "server.crt").context
    app.add_routes(Health().routes())
    async with HttpServer(app, "127.0.0.1", 0, tls=context) as server:
        trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(30)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]

        def closed() -> bool:
            return sum(end.done() for end in ends) == 10

        await until(closed, what="the oldest make room", timeout=5)
        url = f"https://localhost:{server.port}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as answer:
            assert answer.status == 200
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


PROBE = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
HALF_BODY = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
STREAM = b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n"


async def stream(request: web.Request) -> web.StreamResponse:
    """More than sockets take, then nothing for ever."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(200):
        await response.write(b"x" * 65536)
    await asyncio.Event().wait()
    return response


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


@contextlib.asynccontextmanager
async def port(**options: Any) -> AsyncIterator[HttpServer]:
    app = web.Application(middlewares=[errors], client_max_size=8 * 2**20)
    app.add_routes([*Health().routes(), web.get("/stream", stream), web.post("/echo", echo)])
    async with HttpServer(app, "127.0.0.1", 0, **options) as server:
        yield server


async def asked(port: int, address: str = "127.0.0.1", request: bytes = PROBE) -> bytes:
    """The status that a caller of this address gets, of one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    with contextlib.closing(writer):
        writer.write(request)
        return (await asyncio.wait_for(reader.readexactly(12), 20))[9:]


def dial(opened: contextlib.AsyncExitStack, server: HttpServer, number: int = 1) -> socket.socket:
    """A connection of the address with this number."""
    of = f"127.0.0.{number}", 0
    return opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 9, of))


def post(size: int) -> bytes:
    return b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + size * b"x"


TWO_PORTS = """
import asyncio, resource
from kybernate.health import Health
from kybernate.settings import Settings

async def serve():
    settings = Settings(health_host="127.0.0.1", health_port=0)
    async with Health().server(settings) as one, Health().server(settings) as two:
        print(one.port, two.port, flush=True)
        await asyncio.Event().wait()

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
asyncio.run(serve())
"""


async def test_idle_connections_to_two_ports_of_a_service_leave_it_files() -> None:
    """The soft limit of most machines is 1,024."""
    service = await asyncio.create_subprocess_exec(sys.executable, "-c", TWO_PORTS, stdout=asyncio.subprocess.PIPE)
    try:
        assert service.stdout is not None
        ports = [int(port) for port in (await service.stdout.readline()).split()]
        with contextlib.ExitStack() as opened:
            for n in range(1200):
                opened.enter_context(socket.create_connection(("127.0.0.1", ports[n % 2]), 9))
                await asyncio.sleep(0)
            for port in ports:
                assert await asked(port, "127.0.0.9") == b"200"
    finally:
        service.kill()
        await service.wait()


@pytest.mark.parametrize("begun", [b"", b"GET /hea", HALF_BODY, STREAM], ids=["silent", "head", "body", "unread"])
@pytest.mark.parametrize("address", ["127.0.0.9", "127.0.0.1"], ids=["another", "the same"])
@pytest.mark.parametrize("others", [1, 3])
async def test_no_connections_of_others_keep_a_caller_out(
    monkeypatch: pytest.MonkeyPatch, begun: bytes, address: str, others: int
) -> None:
    """Kubelet's probes, and an operator beside the pages of others."""
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 20)
    async with port() as server, contextlib.AsyncExitStack() as opened:
        for n in range(50):
            caller = dial(opened, server, 1 + n % others)
            with contextlib.suppress(ConnectionError):  # it made room already
                caller.sendall(begun)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # each is as far as it comes
        for _ in range(3):
            assert await asked(server.port, address) == b"200"


def test_connections_that_come_in_one_turn_of_the_loop_make_room_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes room is open until a later turn."""
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 3)
    limits, callers = http_server.Shares(), [Mock(busy=False) for _ in range(9)]
    for one in callers:
        limits.enter("127.0.0.1", one)
    assert [one.abort.call_count for one in callers] == [1] * 6 + [0] * 3


async def test_at_the_limit_of_a_port_what_is_under_way_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 6)
    async with port() as server, contextlib.AsyncExitStack() as opened:
        _, *callers = [dial(opened, server, n) for n in range(2, 7)]
        for caller in callers:
            caller.sendall(STREAM)
        first = [await asyncio.to_thread(caller.recv, 12) for caller in callers]
        assert first == 4 * [b"HTTP/1.1 200"]
        for _ in range(5):
            assert await asked(server.port, "127.0.0.9") == b"200"
        assert sum(one.busy for one in server.connections) == 4


async def test_a_body_that_does_not_come_and_a_reader_that_does_not_read_end() -> None:
    async with port(times=Times(body_seconds=0.2, slow_reader_seconds=0.2)) as server:
        assert await asked(server.port, request=HALF_BODY) == b"408"
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            caller.sendall(STREAM)
            await until(lambda: server.connections, what="the stream is open")
            await until(lambda: not server.connections, what="the stream is cut", timeout=20)


@pytest.mark.parametrize("path", ["/v1/seats", "/metrics"])
async def test_a_web_page_reads_and_delays_nothing_at_a_services_own_port(path: str) -> None:
    asked = 0

    async def seats(_: web.Request) -> web.Response:
        """Of a manager: no drain ends for 1.5 s after it was read."""
        nonlocal asked
        asked += 1
        return web.json_response({})

    server = Health().server(Settings(health_host="127.0.0.1", health_port=0), [web.get("/v1/seats", seats)])
    async with server, aiohttp.ClientSession() as http:
        for headers in (
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
            {"Origin": "http://evil.example"},
            {"Host": "evil.example", "User-Agent": "Mozilla/5.0"},
        ):
            async with http.get(server.url + path, headers=headers) as answer:
                assert answer.status == 403
        assert asked == 0
        for headers in ({"Host": "10.0.0.7:9471"}, {"Host": "node.internal", "User-Agent": "kube-probe/1.36"}):
            async with http.get(server.url + path, headers=headers) as answer:
                assert answer.status == 200


async def test_incomplete_bodies_of_others_keep_no_body_out() -> None:
    """Reviews of kube-apiserver, at the webhook's port."""
    size = 8 * 2**20
    async with port(most_bytes=size) as server, contextlib.AsyncExitStack() as opened:
        for n in range(4):
            await asyncio.to_thread(dial(opened, server, 1 + n % 2).sendall, post(size)[:-1])
        await until(lambda: server.bodies.memory.total > 4 * size - 9, what="they have arrived", timeout=9)
        assert await asked(server.port, "127.0.0.9", post(2**20)) == b"200"
        assert sum(one.arriving for one in server.connections) == 3


async def test_six_of_the_largest_reviews_come_from_one_address() -> None:
    async with port(most_bytes=8 * 2**20) as server, contextlib.AsyncExitStack() as opened:
        size = 3 * 2**20
        for _ in range(5):
            await asyncio.to_thread(dial(opened, server).sendall, post(size)[:-1])
        await until(lambda: server.bodies.memory.total > 5 * size - 9, what="they have arrived", timeout=9)
        assert await asked(server.port, request=post(size)) == b"200"


SERVES = """
import asyncio
from aiohttp import web
from kybernate.http.connection import Times
from kybernate.http.server import HttpServer

async def main():
    async with HttpServer(web.Application(), "127.0.0.1", 0, times=Times(head_seconds=0.5)) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_request_that_came_while_the_service_was_stopped_is_answered() -> None:
    """After SIGCONT the loop sees the end of the caller's time, and only then what the caller has sent."""
    with (
        subprocess.Popen([sys.executable, "-c", SERVES], stdout=subprocess.PIPE) as service,
        contextlib.ExitStack() as up,
    ):
        up.callback(service.kill)
        assert service.stdout is not None
        caller = up.enter_context(socket.create_connection(("127.0.0.1", int(service.stdout.readline())), 9))
        caller.sendall(b"GET /nothing HTTP/1.1\r\n")
        time.sleep(0.1)  # it has taken that
        service.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, service.pid, os.WSTOPPED)
        caller.sendall(b"Host: x\r\n\r\n")
        time.sleep(1.0)
        service.send_signal(signal.SIGCONT)
        assert caller.recv(4096).startswith(b"HTTP/1.1 404 ")
