from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from kybernate.http.server import HttpServer
from kybernate.http_api import errors
from kybernate.messages import JobReply, ReleaseJob
from kybernate.node.host_memory import HostMemory
from kybernate.node.run_files import GpuFaults
from kybernate.policy import KybBalanced
from services.gpu_manager.core.inputs import JobAnswered, Now
from services.gpu_manager.core.state import NodeState
from services.gpu_manager.http import routes
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import GateFiles
from tests.manager.world import World


class ReadOnlyManager:
    """As much of a manager as the route reads."""

    def __init__(self, world: World, gate: GateFiles | None = None) -> None:
        self._world, self.gate = world, gate

    @property
    def node(self) -> NodeState:
        return self._world.node

    def now(self) -> Now:
        return self._world.now

    async def until_recorded(self) -> None:
        pass

    unread = "PodResources do not answer"


def shown(manager: ReadOnlyManager) -> list[web.RouteDef]:
    return routes(cast(Manager, manager), GuardedPolicy("kyb-balanced", KybBalanced()), HostMemory())


async def test_what_the_seat_of_a_pod_does(world: World, a: str) -> None:
    world.serve(a, "m")
    app = web.Application(middlewares=[errors])
    app.add_routes(shown(ReadOnlyManager(world)))
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:

        async def ask(uid: str) -> tuple[int, dict[str, object]]:
            async with http.get(f"{server.url}/v1/pods/{uid}") as answer:
                return answer.status, await answer.json()

        status, record = await ask("uid-m")
        assert (status, record["seat"], record["pod_uid"]) == (200, a, "uid-m")
        assert record["state"] == "active"
        assert (await ask("unknown"))[0] == 404
        world.node.recovered = False
        assert (await ask("uid-m"))[0] == 503


async def test_what_the_plugin_found_about_the_node_is_beside_its_groups(world: World, tmp_path: Path) -> None:
    GpuFaults(note="no container starts by kyb-run here").write(tmp_path)
    app = web.Application(middlewares=[errors])
    app.add_routes(shown(ReadOnlyManager(world, GateFiles(tmp_path))))
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
        answer = await http.get(f"{server.url}/v1/why")
        found = await answer.json()
        world.node.recovered = False
        assert (await http.get(f"{server.url}/v1/why")).status == 503, "it knows neither seats nor orders yet"
    assert (found["node"], found["note"]) == ("n1", "no container starts by kyb-run here")
    assert found["unread"] == "PodResources do not answer"


@pytest.mark.parametrize("ends", [True, False])
async def test_b8_kubelet_waits_for_a_deleted_pod_while_the_checkpointer_ends_its_processes(
    world: World, a: str, ends: bool
) -> None:
    world.serve(a, "m")
    app = web.Application()
    app.add_routes(shown(ReadOnlyManager(world)))
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:

        async def ask(uid: str = "uid-m") -> tuple[bool, bool]:
            async with http.get(f"{server.url}/v1/pods/{uid}/stop") as answer:
                found = await answer.json()
                return found["wait"], found["deleted"]

        assert await ask() == (True, False), "its deletion may not have been seen yet"
        assert await ask("unknown") == (False, False)
        world.pods.pop(a)
        world.look(2)
        assert await ask() == (True, True), "the checkpointer has not answered"
        job = world.last(ReleaseJob)
        world.receive(JobAnswered(job, JobReply(accepted=True, ends=ends)))
        assert await ask() == (ends, True)
        world.look_at(a, "gone")
        assert (await ask())[0] is False
