"""Pods whose control groups do not name them, as of a static pod or where kubelet runs with cgroupsPerQOS: false."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.stack import Stack
from tests.control_groups import any_control_group
from tests.stack.pods import ONE_GROUP, pod, small_node
from tests.thorough import part
from tests.until import until_equal


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", part(["fake", "restart"], 2))
async def test_a_pod_that_no_control_group_names_is_parked_and_not_believed_gone(tmp_path: Path, backend: str) -> None:
    with any_control_group() as cgroups:
        pods = [pod(model, vram="60GiB") for model in "ab"]
        arguments = {"kubelet": ("--cgroups", str(cgroups))}
        options = small_node(tmp_path, ONE_GROUP, pods, backend=backend, speed=8, arguments=arguments)
        async with Stack(options) as stack, aiohttp.ClientSession() as session:
            await stack.ready(90)
            for model in "abab":
                body: dict[str, Any] = {"model": model, "prompt": "hi", "max_tokens": 3}
                async with session.post(f"{stack.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    assert (await answer.json())["choices"][0]["text"] == expected_text(model, "hi", 3)

            async def states() -> list[str]:
                async with session.get(f"{stack.console}/v1/seats") as answer:
                    seats = [seat for seat in (await answer.json())["seats"] if seat["model"]]
                assert not [one for one in seats if one["state"] == "backoff" or one["failed"]], "by itself"
                return sorted(seat["state"] for seat in seats)

            await until_equal(states, ["active", "parked"], what="one serves and the other rests")
            async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
                assert (await driver.call("stats"))["violations"]["count"] == 0
