"""An API server whose etcd is restored from a snapshot, under a real stack whose manager watches it."""

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.stack import Stack
from tests.kube.api_server import ApiServer, api_server
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.stack.test_rollback import calling
from tests.until import TIME_FACTOR, until

THREE_SEATS = ONE_GROUP.replace("seatsPerGroup: 2", "seatsPerGroup: 3")
ELSEWHERE = 1000
"""Writes to other objects of the cluster."""
EVENT_SECONDS = 5.0


@dataclass
class Cluster:
    """The API server's pods are those that the fake kubelet runs; it writes their status, and ends what is gone."""

    server: ApiServer
    session: aiohttp.ClientSession
    kubelet: str
    bound: set[str] = field(default_factory=set)
    """UIDs of the pods that kubelet has from the API server."""

    async def bind(self) -> bool:
        """Put pods that kubelet was just given into the API server. False: it has none, or is not up yet."""
        for found in await self._listed():
            if found["metadata"]["uid"] not in self.bound:
                self.bound.add(found["metadata"]["uid"])
                self.server.put(found)
        return bool(self.bound)

    async def create(self, model: str) -> None:
        async with self.session.post(f"{self.kubelet}/control/create", data=pod(model)) as answer:
            assert answer.status == 201, await answer.text()
        await self.bind()

    async def sync(self) -> None:
        """What kubelet does all the time."""
        while True:
            for found in await self._listed():
                meta = found["metadata"]
                there = {one["metadata"]["uid"]: one for one in self.server._objects.get("/api/v1/pods", {}).values()}
                if (known := there.get(meta["uid"])) is not None:
                    if (known["status"], known["spec"]) != (found["status"], found["spec"]):
                        self.server.put(found)
                elif meta["uid"] in self.bound:
                    async with self.session.post(f"{self.kubelet}/control/delete", json={"name": meta["name"]}):
                        pass
            await asyncio.sleep(0.1)

    async def _listed(self) -> list[dict[str, Any]]:
        with suppress(aiohttp.ClientConnectionError):
            async with self.session.get(f"{self.kubelet}/pods") as answer:
                return list((await answer.json())["items"])
        return []


@pytest.mark.timeout(240)
async def test_after_a_restore_of_etcd_events_arrive_ghosts_end_and_their_models_are_not_found(tmp_path: Path) -> None:
    (account := tmp_path / "account").mkdir()
    async with api_server(account) as (server, kube), aiohttp.ClientSession() as session:
        manager = (sys.executable, "-P", str(Path(__file__).with_name("watching.py")), kube.url, str(account))
        options = small_node(tmp_path, THREE_SEATS, (pod(model) for model in "ab"), replace={"gpu_manager": manager})
        async with Stack(options) as stack:

            async def ask(model: str, seconds: float) -> int:
                """The status of the answer; 0: none within these seconds."""
                body = {"model": model, "prompt": "hi", "max_tokens": 3}
                with suppress(TimeoutError):
                    async with (
                        asyncio.timeout(seconds),
                        session.post(f"{stack.url}/v1/completions", json=body) as answer,
                    ):
                        await answer.read()
                        return answer.status
                return 0

            async def state(model: str) -> str:
                """Of the model's seat; empty without one."""
                async with session.get(f"{stack.console}/v1/seats") as answer:
                    seats = (await answer.json())["seats"]
                return next((str(seat["state"]) for seat in seats if seat["model"] == model), "")

            async def answered(model: str, status: int = 200) -> None:
                # A caller that leaves takes its demand along; one for a seat that ends may wait in vain.
                seconds = 30.0 if status == 200 else 2.0

                async def right() -> bool:
                    return await ask(model, seconds) == status

                await until(right, what=f"{status} for {model}", timeout=60, interval=0.2)

            cluster = Cluster(server, session, stack.layout.kubelet_url)
            await until(cluster.bind, what="kubelet has both pods")
            async with calling([cluster.sync()]):
                await stack.ready(90)
                snapshot = server.backup()
                server.version += ELSEWHERE
                await cluster.create("ghost")
                await answered("ghost")
                await answered("a")
                assert await state("ghost") == "parked"

                server.restore(snapshot)
                await cluster.create("new")
                began = time.monotonic()

                async def known() -> bool:
                    return await state("new") != ""

                async def ended() -> bool:
                    return await state("ghost") == ""

                await until(known, what="the event of a new pod", interval=0.05)
                seconds = time.monotonic() - began
                await until(ended, what="the ghost's seat is free", saw=lambda: stack.logs("gpu_manager")[-3000:])
                await answered("ghost", 404)
                await answered("new")
                assert seconds <= EVENT_SECONDS * TIME_FACTOR
                assert server.version < snapshot[0] + ELSEWHERE, "else the watch delivered by itself"
