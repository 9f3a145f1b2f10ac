from typing import cast

import aiohttp
from aiohttp import web

from kybernate.health import HttpServer
from services.gpu_manager.http import pod_route
from services.gpu_manager.inputs import Now
from services.gpu_manager.manager import Manager
from services.gpu_manager.state import NodeState
from tests.manager.world import World


class ReadOnlyManager:
    """As much of a manager as the route reads."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def node(self) -> NodeState:
        return self._world.node

    def now(self) -> Now:
        return self._world.now


async def test_what_the_seat_of_a_pod_does(world: World) -> None:
    seat = world.seat(0, 0)
    world.serve(seat, "m")
    app = web.Application()
    app.add_routes([pod_route(cast(Manager, ReadOnlyManager(world)))])
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:

        async def ask(uid: str) -> tuple[int, dict[str, object]]:
            async with http.get(f"{server.url}/v1/pods/{uid}") as answer:
                return answer.status, await answer.json()

        status, record = await ask("uid-m")
        assert (status, record["seat"], record["pod_uid"]) == (200, seat, "uid-m")
        assert record["state"] == "active"
        assert (await ask("unknown"))[0] == 404
        world.node.recovered = False
        assert (await ask("uid-m"))[0] == 503
