"""The OpenAPI document: it has every route of the router, and the router answers as it says, to any request."""

import asyncio
from typing import Any

from kybernate.seat import SeatState
from services.router import openapi
from services.router.api import PATHS
from tests.openapi import attack, plain
from tests.router.world import world


def document() -> dict[str, Any]:
    return openapi.document(PATHS)


async def test_the_document_has_every_route_and_no_other() -> None:
    async with world() as w:
        served = {
            (route.method, plain(route.resource.canonical.replace("{path}", "forwarded")))
            for route in w.router.app.router.routes()
            if route.method != "HEAD"
            and route.resource is not None
            and route.resource.canonical not in ("/v1/{api}{rest}", "/v1/{of}{rest}", "/v1/realtime")
        }
    operations = [(method.upper(), path) for path, item in document()["paths"].items() for method in item]
    forwarded = {*PATHS}
    written = {
        (method, "/v1/forwarded" if path in forwarded else plain(path))
        for method, path in operations
        if method != "PARAMETERS"
    }
    assert written == served - {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/openapi.json")}


async def test_a_router_serves_its_document() -> None:
    async with world(engine_paths="/v1/mine") as w:
        served = await w.call("GET", "/openapi.json")
    assert served.status == 200
    assert {"/v1/mine", "/v1/chat/completions"} <= served.json["paths"].keys()


async def test_generated_requests_get_the_answers_of_the_document() -> None:
    async with world(hold_seconds=1.0, permit_seconds=0.1) as w:
        await w.seat("s1", "m", SeatState.ACTIVE)
        for path in document()["paths"]:
            assert await asyncio.to_thread(attack, document(), w.url, path) > 0, path
        assert (await w.call("GET", "/healthz")).status == 200
