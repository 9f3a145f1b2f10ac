"""What the console asks routers: their readiness, the use by tenants, and calls of the page and ``kyb wake``."""

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from kybernate.http_api import ApiError, unanswered
from kybernate.messages import Presence
from services.console.core.cluster import Cluster

ANSWER_SECONDS = 3.0
_SENT = ("authorization", "content-type", "x-kyb-key", "x-request-id")
"""Headers of a request that go on to the router."""


class Routers:
    """``url``: the router that takes calls; empty: one of those that report themselves."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession, url: str) -> None:
        self._cluster, self._http, self._url = cluster, http, url.rstrip("/")

    async def relay(self, path: str, request: web.Request) -> web.StreamResponse:
        """Send a request on to this path of a router, as any client would, and stream its answer."""
        url, body = f"{self._address()}{path}", await request.read()
        try:
            async with self._http.post(url, data=body, headers=_headers(request)) as answer:
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

    def _address(self) -> str:
        """Where calls go. Raises ApiError 502 if no router is known."""
        alive = [presence.url for presence in self._alive() if presence.url]
        if not (self._url or alive):
            raise ApiError(502, "no_router", "no router reports itself: is one running? (KYB_ROUTER_URL names one)")
        return self._url or alive[0]

    async def readiness(self, _: web.Request) -> web.StreamResponse:
        """``GET /v1/routers``: each router that is alive, with what is wrong with it."""
        return web.json_response({"routers": await self.states()})

    async def states(self) -> list[dict[str, Any]]:
        """Each router that is alive, with what is wrong with it."""
        alive, rows = self._alive(), []
        found = await asyncio.gather(*(self._get(router, "/readyz", {}) for router in alive))
        for router, body in zip(alive, found, strict=True):
            row = {"router": router.instance, "url": router.url, "unmet": body.get("unmet") or {}}
            row["faults"] = [one.model_dump() for one in router.faults]
            rows.append(row | {name: body[name] for name in ("notes", "unanswered") if name in body})
        return rows

    async def usage(self, request: web.Request) -> web.StreamResponse:
        """``GET /v1/usage``: what each tenant has used of each model since the routers started, summed."""
        sums: dict[tuple[str, str], Counter[str]] = {}
        since, alive = time.time(), self._alive()
        for body in await asyncio.gather(*(self._get(router, "/v1/usage", _headers(request)) for router in alive)):
            since = min(since, float(body.get("since", since)))
            for row in body.get("usage", ()):
                of = sums.setdefault((row.pop("tenant"), row.pop("model")), Counter())
                of.update(row)
        usage = [{"tenant": tenant, "model": model, **counts} for (tenant, model), counts in sorted(sums.items())]
        return web.json_response({"since": since, "usage": usage})

    def _alive(self) -> list[Presence]:
        return self._cluster.routers(time.monotonic())

    async def _get(self, router: Presence, path: str, headers: dict[str, str]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        name = urlsplit(self._url).hostname  # a router's certificate names the address for callers, not its own
        try:
            url = f"{router.url}{path}"
            async with self._http.get(url, headers=headers, timeout=timeout, server_hostname=name) as answer:
                body = await answer.json()
                if "error" in body:
                    return {"unanswered": f"the router at {router.url} refuses it: {body['error']['message']}"}
                return dict(body)
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, LookupError) as error:
            return {"unanswered": f"the router at {router.url} does not answer ({unanswered(error)})"}


def _headers(request: web.Request) -> dict[str, str]:
    """Return what a router gets of a request's headers."""
    return {name: value for name, value in request.headers.items() if name.lower() in _SENT}
