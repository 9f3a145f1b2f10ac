"""The address under which a service says that it can be reached."""

import pytest
from aiohttp import web

from kybernate.health import HttpServer


@pytest.mark.parametrize(("host", "url"), [("10.0.0.7", "http://10.0.0.7:9471"), ("fd00::7", "http://[fd00::7]:9471")])
def test_an_address_of_ipv6_stands_in_brackets(host: str, url: str) -> None:
    assert HttpServer(web.Application(), host, 9471).url == url
