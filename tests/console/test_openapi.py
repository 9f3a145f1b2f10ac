"""The OpenAPI document of the operators' API has every route, and the console answers as it says, to any request."""

import asyncio
import re

from kybernate.seat import SeatState
from services.console import openapi
from tests.console.world import shown
from tests.openapi import attack, plain

ENDLESS = "/v1/events"
"""A stream, which no test waits for."""


async def test_the_document_has_every_route_and_no_other() -> None:
    async with shown() as w:
        (app, _) = w.console.servers()
        served = {
            (route.method, plain(route.resource.canonical))
            for route in app.app.router.routes()
            if route.method != "HEAD" and route.resource is not None and route.resource.canonical.startswith("/v1/")
        }
        assert (await w.call("GET", "/openapi.json")).json == openapi.document()
    verbs = re.compile(r"/(activate|park|pin|unpin|drain|resume)$")
    operations = [(method.upper(), path) for path, item in openapi.document()["paths"].items() for method in item]
    written = {(method, plain(verbs.sub("/{}", path))) for method, path in operations if method != "PARAMETERS"}
    assert written == served


async def test_generated_requests_get_the_answers_of_the_document() -> None:
    async with shown() as w:
        await w.seat("s1", "m", SeatState.ACTIVE)
        for path in openapi.document()["paths"]:
            if path != ENDLESS:
                assert await asyncio.to_thread(attack, openapi.document(), w.url, path) > 0, path
        assert (await w.call("GET", "/healthz")).status == 200
