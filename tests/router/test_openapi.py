"""The OpenAPI document: it has every route of the router, and the router answers as it says, to any request."""

import asyncio

from kybernate.seat import SeatState
from services.router.api import PATHS
from tests.openapi import attack, document, operations, plain
from tests.router.world import world


async def test_the_document_has_every_route_and_no_other() -> None:
    async with world() as w:
        served = {
            (route.method, plain(route.resource.canonical.replace("{path}", "forwarded")))
            for route in w.router.app.router.routes()
            if route.method != "HEAD"
            and route.resource is not None
            and route.resource.canonical not in ("/v1/{api}{rest}", "/v1/{of}{rest}", "/v1/realtime")
        }
        assert (await w.call("GET", "/openapi.json")).json == document("router")
    written = operations("router")
    assert {("POST", path) for path in PATHS} <= written
    others = {(method, "/v1/forwarded" if path in PATHS else plain(path)) for method, path in written}
    assert others == served - {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/openapi.json")}


async def test_generated_requests_get_the_answers_of_the_document() -> None:
    async with world(hold_seconds=1.0, permit_seconds=0.1) as w:
        await w.seat("s1", "m", SeatState.ACTIVE)
        for path in document("router")["paths"]:
            assert await asyncio.to_thread(attack, document("router"), w.url, path) > 0, path
        assert (await w.call("GET", "/healthz")).status == 200
