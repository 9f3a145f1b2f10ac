"""The OpenAPI document of the operators' API has every route, and the console answers as it says, to any request."""

import asyncio
import re

from kybernate.seat import SeatState
from tests.console.world import Shown, shown
from tests.openapi import attack, document, operations, plain

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
        assert (await w.call("GET", "/openapi.json")).json == document("console")
    verbs = re.compile(r"/(activate|park|pin|unpin|drain|resume)$")
    assert {(method, plain(verbs.sub("/{}", path))) for method, path in operations("console")} == served


async def test_generated_requests_get_the_answers_of_the_document(w: Shown) -> None:
    await w.seat("s1", "m", SeatState.ACTIVE)
    for path in document("console")["paths"]:
        if path != ENDLESS:
            assert await asyncio.to_thread(attack, document("console"), w.url, path) > 0, path
    assert (await w.call("GET", "/healthz")).status == 200
