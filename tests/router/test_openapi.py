"""The OpenAPI document: it has every route of the router, and the router answers as it says, to any request."""

import asyncio
import re
from itertools import product
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from kybernate.seat import SeatState
from services.router import openapi
from services.router.api import FAMILIES
from tests.router.world import world

ENDLESS = "/v1/events"
"""A stream, which no test waits for."""
EXAMPLES = 4
"""Requests per operation, of valid ones and of invalid ones."""


def document() -> dict[str, Any]:
    return openapi.document([path for paths in FAMILIES.values() for path in paths])


def plain(path: str) -> str:
    """A path as aiohttp or the document writes it, without names and choices."""
    return re.sub(r"\{[^}]*\}", "{}", path)


async def test_the_document_has_every_route_and_no_other() -> None:
    async with world() as w:
        served = {
            (route.method, plain(route.resource.canonical.replace("{path}", "forwarded")))
            for route in w.router.app.router.routes()
            if route.method != "HEAD" and route.resource is not None and route.resource.canonical != "/v1/{api}{rest}"
        }
    operations = [(method.upper(), path) for path, item in document()["paths"].items() for method in item]
    forwarded = {path for paths in FAMILIES.values() for path in paths}
    verbs = re.compile(r"/(activate|park|pin|unpin|drain|resume)$")
    written = {
        (method, "/v1/forwarded" if path in forwarded else plain(verbs.sub("/{}", path)))
        for method, path in operations
        if method != "PARAMETERS"
    }
    assert written == served - {("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/openapi.json")}


async def test_a_router_serves_its_document() -> None:
    async with world(api_families="rerank", engine_paths="/v1/mine") as w:
        served = await w.call("GET", "/openapi.json")
    assert served.status == 200
    assert "/v1/mine" in served.json["paths"]
    assert "/v1/chat/completions" not in served.json["paths"]


def attack(url: str, path: str) -> int:
    """Send generated requests of one path, valid and invalid ones; return how many. Fails where an answer is our 5xx,
    or another one than the document has. Of nodes that do not exist no manager answers, rightly a 503."""
    import schemathesis  # takes a second to import
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_dict(document() | {"servers": [{"url": url}]})
    sent = 0
    for method, mode in product(schema[path].keys() - {"parameters"}, schemathesis.GenerationMode):
        operation = schema[path][method]
        if mode is schemathesis.GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # nothing could be invalid

        @seed(1)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            nonlocal sent
            sent += 1
            response = case.call(base_url=url, timeout=60)
            case.validate_response(
                response,
                checks=[
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                ],
            )
            of_no_manager = response.status_code == 503 and response.json()["error"]["code"] == "manager_unanswered"
            assert response.status_code < 500 or (of_no_manager and path.startswith(("/v1/nodes", "/v1/groups")))

        run()
    return sent


async def test_generated_requests_get_the_answers_of_the_document() -> None:
    async with world(hold_seconds=1.0, permit_seconds=0.1) as w:
        await w.seat("s1", "m", SeatState.ACTIVE)
        for path in document()["paths"]:
            if path != ENDLESS:
                assert await asyncio.to_thread(attack, w.url, path) > 0, path
        assert (await w.call("GET", "/healthz")).status == 200
