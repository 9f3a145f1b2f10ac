"""What the console knows of routers, and the calls of the page that it relays.

An address of the bus gets no request: what wrote it may be a stolen key of a router, and a call has its caller's key.
"""

import contextlib
import time
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.http_api import ApiError
from services.console.core.cluster import Cluster

_SENT = ("authorization", "content-type", "x-kyb-key", "x-request-id")
"""Headers of a request that go on to the router."""


class Routers:
    """``url``: the router that takes calls; empty: none is named."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession, url: str) -> None:
        self._cluster, self._http, self._url = cluster, http, url.rstrip("/")

    async def relay(self, path: str, request: web.Request) -> web.StreamResponse:
        """Send a request on to this path of a router, as any client would, and stream its answer."""
        if not self._url:
            raise ApiError(
                502, "no_router", "the console knows no router for this: set KYB_ROUTER_URL to one's address"
            )
        url, body = f"{self._url}{path}", await request.read()
        sent = {name: value for name, value in request.headers.items() if name.lower() in _SENT}
        try:
            async with self._http.post(url, data=body, headers=sent, allow_redirects=False) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-kyb-")}
                response = web.StreamResponse(status=answer.status, headers=passed | {"Cache-Control": "no-cache"})
                response.content_type = answer.content_type
                await response.prepare(request)
                with contextlib.suppress(aiohttp.ClientPayloadError):  # an answer that breaks off ends
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
        except aiohttp.ClientError as error:
            raise ApiError(502, "router_unanswered", f"the router at {url} does not answer: {error}") from error
        except ConnectionResetError:
            return web.Response(status=499)
        return response

    async def readiness(self, _: web.Request) -> web.StreamResponse:
        """``GET /v1/routers``: each router that is alive, with what is wrong with it."""
        return web.json_response({"routers": self.states()})

    def states(self) -> list[dict[str, Any]]:
        """Each router that is alive, with what is wrong with it, as it reports itself."""
        return [
            {"router": one.instance, "url": one.url, "unmet": one.unmet}
            | ({"notes": one.notes} if one.notes else {})
            | {"faults": [fault.model_dump() for fault in one.faults]}
            for one in self._cluster.routers(time.monotonic())
        ]
