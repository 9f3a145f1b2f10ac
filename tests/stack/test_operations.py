"""A move and the drain of a node on a real stack, whose manager is killed in the middle of both."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.stack.test_moving import CONFIG
from tests.until import until


@pytest.mark.timeout(150)
async def test_a_move_and_a_drain_go_on_although_the_manager_dies_on_the_way(tmp_path: Path) -> None:
    options = small_node(tmp_path, CONFIG, (pod(model) for model in "abc"), gpus=2)
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        await stack.ready(60)

        async def order(path: str, **body: Any) -> dict[str, Any]:
            """Order, or ask how far it is; while the manager is away, again."""
            answers: list[Any] = []

            async def asked() -> bool:
                async with session.post(f"{stack.console}/v1/{path}", json=body) as answer:
                    answers.append(await answer.json())
                    return answer.status in (202, 409)

            await until(asked, what=f"an answer to {path}", saw=lambda: answers[-1:], timeout=30)
            return dict(answers[-1])

        async def over(path: str, **body: Any) -> dict[str, Any]:
            found: dict[str, Any] = {}

            async def read() -> bool:
                found.update((await order(path, **body))["operation"])
                return bool(found["outcome"])

            await until(read, what=f"{path} is over", saw=lambda: found, timeout=60, interval=0.1)
            return found

        async def seats() -> list[dict[str, Any]]:
            async with session.get(f"{stack.console}/v1/seats") as answer:
                return list((await answer.json())["seats"])

        async def ask(model: str) -> tuple[int, str]:
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                return answer.status, await answer.text()

        row = next(seat for seat in await seats() if seat["home_group"] == "G0")
        node, model = row["node"], row["model"]
        move = {"to": "G1"}
        begun = await order(f"seats/model/{model}/migrate", **move)
        assert begun["accepted"], begun
        stack.kill("gpu_manager")
        moved = await over(f"seats/model/{model}/migrate", **move)
        assert (moved["outcome"], "on group G1" in moved["text"]) == ("done", True), moved
        await until_moved(seats, model, "G1")

        begun = await order(f"nodes/{node}/drain", purpose="upgrade")
        assert begun["accepted"], begun
        stack.kill("gpu_manager")
        drained = await over(f"nodes/{node}/drain", purpose="upgrade")
        assert drained["outcome"] == "done", drained
        assert "3 pods still use the driver" in drained["text"]
        await until_parked(seats)
        status, text = await ask(model)
        assert (status, f"node {node} is drained for upgrade" in text) == (503, True), text
        assert "kyb resume node" in (await order("groups/G0/resume"))["error"]["message"]
        assert (await over(f"nodes/{node}/resume"))["outcome"] == "done"
        await until_resumed(seats)

        async def served() -> bool:
            return (await ask(model))[0] == 200

        await until(served, what="the router, too, knows that nothing is drained", timeout=30)
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            violations = (await driver.call("stats"))["violations"]
        assert violations["count"] == 0, violations


@pytest.mark.timeout(240)
async def test_pods_made_while_their_group_is_drained_start_once_it_is_resumed(tmp_path: Path) -> None:
    """A driver upgrade: drain, end the pods, start their successors, resume. The manager is killed meanwhile."""
    options = small_node(tmp_path, ONE_GROUP, (pod(model) for model in "ab"))
    async with Stack(options) as stack, aiohttp.ClientSession() as session:
        kubelet = stack.layout.kubelet_url
        await stack.ready(90)

        async def seats() -> list[dict[str, Any]]:
            async with session.get(f"{stack.console}/v1/seats") as answer:
                return [seat for seat in (await answer.json())["seats"] if seat["model"]]

        async def states(*wanted: str) -> list[dict[str, Any]]:
            """The seats, once both are in one of these states."""
            found: list[dict[str, Any]] = []

            async def read() -> bool:
                found[:] = await seats()
                return len(found) == 2 and all(seat["state"] in wanted for seat in found)

            await until(
                read, what=f"both seats are {' or '.join(wanted)}", saw=lambda: found, timeout=120, interval=0.1
            )
            return found

        async def listed() -> list[str]:
            async with session.get(f"{kubelet}/pods") as answer:
                return [item["metadata"]["name"] for item in (await answer.json())["items"]]

        async def none_listed() -> bool:
            return not await listed()

        async def command(path: str, **body: Any) -> None:
            async def accepted() -> bool:
                async with session.post(f"{stack.console}/v1/{path}", json=body) as answer:
                    return answer.status == 202

            await until(accepted, what=f"{path} is accepted", timeout=60, interval=0.1)

        await command("groups/G0/drain")
        await states("parked")
        for model in "ab":
            async with session.post(f"{kubelet}/control/delete", json={"name": model}) as answer:
                assert answer.status == 200, await answer.text()
        await until(none_listed, what="kubelet has ended the pods", saw=listed, timeout=60, interval=0.1)
        stack.kill("gpu_manager")
        async with session.post(f"{kubelet}/control/create", data="".join(pod(model) for model in "ab")) as answer:
            assert answer.status == 201, await answer.text()
        waiting = await states("waiting")
        assert all("G0" in seat["drained"] for seat in waiting), waiting

        await command("groups/G0/resume")
        await states("active", "parked")
        for model in "ab":
            body = {"model": model, "prompt": "hi", "max_tokens": 3}
            async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
            violations = (await driver.call("stats"))["violations"]
        assert violations["count"] == 0, violations


async def until_moved(seats: Callable[[], Awaitable[list[dict[str, Any]]]], model: str, group: str) -> None:
    """Wait until the console shows a model's seat there: the operation's answer comes from the manager itself, and the
    seat's row through the bus."""

    async def shown() -> bool:
        return next(seat for seat in await seats() if seat["model"] == model)["group"] == group

    await until(shown, what=f"{model} is on {group}")


async def until_parked(seats: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
    """Wait until the console shows every seat parked: its rows, too, come later than the operation's answer."""

    async def shown() -> bool:
        return {seat["state"] for seat in await seats() if seat["model"]} == {"parked"}

    await until(shown, what="every seat is parked")


async def until_resumed(seats: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
    """Wait until the console knows that nothing is drained."""

    async def known() -> bool:
        return not any(seat["drained"] for seat in await seats())

    await until(known, what="no seat of the roster is drained", timeout=30)
