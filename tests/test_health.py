"""The address of a service: what it says that it is, and what follows if it cannot be had."""

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kybernate import health
from kybernate.health import Health, HttpServer
from kybernate.lifecycle import CannotListenError
from kybernate.settings import Settings
from kybernate.tls import ServerCertificate
from tests.bus.guarded import certificates
from tests.until import until


@pytest.mark.parametrize(("host", "url"), [("10.0.0.7", "http://10.0.0.7:9471"), ("fd00::7", "http://[fd00::7]:9471")])
def test_an_address_of_ipv6_stands_in_brackets(host: str, url: str) -> None:
    assert HttpServer(web.Application(), host, 9471).url == url


async def serve(port: int, host: str = "127.0.0.1") -> None:
    async with Health().server(Settings(health_host=host, health_port=port)):
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


async def test_an_address_of_another_machine_is_named_with_its_setting() -> None:
    with pytest.raises(CannotListenError, match=r"192\.0\.2\.1 port 0: .*; correct KYB_HEALTH_HOST or KYB_HEALTH_PORT"):
        await serve(0, "192.0.2.1")


async def test_silent_connections_to_a_tls_port_are_counted_and_take_no_memory_for_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MOST_CONNECTIONS", 20)
    certificates(tmp_path)
    app, context = web.Application(), ServerCertificate(tmp_path / "server.crt").context
    app.add_routes(Health().routes())
    async with HttpServer(app, "127.0.0.1", 0, tls=context) as server:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(30)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in opened]

        def closed() -> bool:
            return sum(end.done() for end in ends) == 10

        await until(closed, what="those beyond the limit are closed", timeout=5)
        for _, writer in opened:
            writer.close()
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*ends)
        trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        url = f"https://localhost:{server.port}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as answer:
            assert answer.status == 200


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
