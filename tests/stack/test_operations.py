"""A move, and the upgrade of a driver, on a real stack whose manager is killed in the middle of both."""

from pathlib import Path
from typing import Any

import pytest

from tests.stack.client import Client, Json, running
from tests.stack.pods import TWO_GROUPS, pod, small_node
from tests.until import until


async def over(here: Client, path: str, **body: Any) -> Json:
    """Order it, or ask about it, until it is over."""
    found: Json = {}

    async def read() -> bool:
        found.update((await here.order(path, **body))["operation"])
        return bool(found["outcome"])

    await until(read, what=f"{path} is over", saw=lambda: found, timeout=60, interval=0.1)
    assert found["outcome"] == "done", found
    return found


async def over_with_a_kill(here: Client, path: str, **body: Any) -> str:
    """What it says in the end."""
    begun = await here.order(path, **body)
    assert begun["accepted"], begun
    here.stack.kill("gpu_manager")
    return str((await over(here, path, **body))["text"])


@pytest.mark.timeout(240)
async def test_a_move_and_a_driver_upgrade_go_on_although_the_manager_dies_on_the_way(tmp_path: Path) -> None:
    """The upgrade: drain the node, end its pods, start their successors, resume. The console's rows come later than
    an operation's answer, which is the manager's own."""
    options = small_node(tmp_path, TWO_GROUPS, map(pod, "abc"), gpus=2)
    async with running(options) as here:
        row = next(row for row in (await here.seats()).values() if row["home_group"] == "G0")
        node, model = row["node"], row["model"]
        assert "on group G1" in await over_with_a_kill(here, f"seats/model/{model}/migrate", to="G1")
        await here.until_seats(lambda rows: rows[model]["group"] == "G1", f"{model} is on G1")

        drained = await over_with_a_kill(here, f"nodes/{node}/drain", purpose="upgrade")
        assert "3 pods still use the driver" in drained
        await here.until_seats(
            lambda rows: {row["state"] for row in rows.values()} == {"parked"}, "every seat is parked"
        )
        status, body = await here.ask(model)
        assert (status, f"node {node} is drained for upgrade" in str(body)) == (503, True), body
        assert "kyb resume node" in (await here.order("groups/G0/resume"))["error"]["message"]

        async def no_pods() -> bool:
            return not await here.pods()

        for name in "abc":
            await here.kubelet("delete", {"name": name})
        await until(no_pods, what="kubelet has ended the pods", timeout=60, interval=0.1)
        here.stack.kill("gpu_manager")
        await here.kubelet("create", "".join(map(pod, "abc")))
        await here.until_seats(
            lambda rows: len(rows) == 3 and all(row["state"] == "waiting" and row["drained"] for row in rows.values()),
            "their successors wait",
            timeout=120,
        )

        await over(here, f"nodes/{node}/resume")
        await here.until_seats(
            lambda rows: not any(row["drained"] or row["state"] not in ("active", "parked") for row in rows.values()),
            "all have started, and nothing is drained",
            timeout=120,
        )

        async def served() -> bool:
            return (await here.ask(model))[0] == 200

        await until(served, what="the router, too, knows that nothing is drained")
        await here.answered(*"abc")
