"""Texts of ``kubectl describe pod`` for requests that are refused."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kybernate.config import NodeConfig
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.dev.fakes.kubelet.pod import Pod
from kybernate.machine import Gpu, Mig
from kybernate.node.pod_resources import list_pods
from kybernate.policy import KybBalanced
from kybernate.topology import plan
from services.gpu_manager import publish
from services.gpu_manager.core.board import Board
from services.gpu_manager.core.inputs import Now, StartCalls
from services.gpu_manager.core.state import NodeSetup
from services.gpu_manager.pods import joined
from services.gpu_manager.publish import GateFiles
from services.plugin.core.devices import Offer
from tests.kubelet.stand import pod, pods, reason, running_kubelet, state, until_capacity
from tests.plugin.processes import PATIENCE
from tests.plugin.stand import ONE, TWO, plugin_at, running_plugin
from tests.until import until

BOTH = f"""
apiVersion: v1
kind: Pod
metadata: {{name: greedy}}
spec:
  containers:
    - name: engine
      command: [sleep, "100"]
      resources: {{limits: {{{ONE}: 1, {TWO}: 1}}}}
"""


@asynccontextmanager
async def manager(kubelet: Kubelet, offer: Offer) -> AsyncIterator[Board]:
    """The start gate of a manager that grants nothing, since it has not recovered: it reads calls and writes texts."""
    board = Board(NodeSetup("n1", offer.groups, KybBalanced()))
    node, gate = board.node, GateFiles(kubelet.options.run_dir)
    owners = kubelet.options.folder.parent / "pod-resources/kubelet.sock"

    async def look() -> None:
        wall = 0.0
        while True:
            wall += 1.0
            now = Now(wall, wall, 1.0)
            documents = [one.document() for one in kubelet.pods]
            board.handle(joined(await list_pods(owners), documents), now)
            board.handle(StartCalls(gate.calls(node.seats)), now)
            gate.write_texts(publish.gate_texts(node, now))
            await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield board
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def refusal(created: Pod) -> str:
    """The text in the pod's status, once there is one."""
    await until(
        lambda: "is refused" in str(state(created)["state"]),
        what="the pod's status shows the refusal",
        saw=lambda: state(created),
        timeout=PATIENCE,
    )
    return str(state(created)["state"]["waiting"]["message"])


async def test_two_kinds_of_seats_in_one_container_are_refused_by_name() -> None:
    async with (
        running_kubelet() as kubelet,
        plugin_at(kubelet, gate_seconds=1.0) as plugin,
        manager(kubelet, plugin.node.offer),
    ):
        (spec,) = pods(BOTH)
        greedy = kubelet.create(spec)
        text = await refusal(greedy)
        assert reason(greedy) == "CreateContainerConfigError"
        assert f"container engine of pod default/greedy asks for {ONE} and {TWO}" in text
        assert "keep one of them in resources.limits and make the pod anew" in text


async def test_mig_with_the_cuda_backend_is_refused_by_name() -> None:
    gpu = Gpu(0, "GPU-0", 0, "0000:01:00.0", "fake", 80 << 30, 0, mig_enabled=True)
    part = Gpu(0, "MIG-0", 0, "0000:01:00.0", "fake", 40 << 30, 0, mig=Mig("GPU-0", "3g.40gb", 1, 0))
    text = json.dumps({"profiles": [{"name": "m", "resource": ONE, "groupSize": 1, "seatsPerGroup": 2}]})
    config = NodeConfig.model_validate_json(text).model_copy(update={"mig_strategy": "single"})
    async with running_kubelet() as kubelet:
        where = kubelet.options
        offered = Offer(
            plan(config, (gpu,), (), (part,)).groups,
            (gpu,),
            where.run_dir / "seats",
            fake_driver=where.run_dir / "driver.sock",
        )
        async with (
            running_plugin(where.folder, where.run_dir, gate_seconds=1.0, resources=(ONE,), offered=offered),
            manager(kubelet, offered),
        ):
            await until_capacity(kubelet, {ONE: (2, 2)}, timeout=PATIENCE)
            text = await refusal(kubelet.create(pod()))
            assert "backend cuda cannot park MIG instances" in text
            assert "kyb.ai/backend" in text
