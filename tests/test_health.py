"""The address of a service: what it says that it is, and what follows if it cannot be had."""

import socket

import pytest
from aiohttp import web

from kybernate.health import Health, HttpServer
from kybernate.lifecycle import CannotListenError
from kybernate.settings import Settings


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
