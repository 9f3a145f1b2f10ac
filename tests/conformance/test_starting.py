"""Rules 35 and 61: the start gate, and that a waiting start delays nothing else."""

import asyncio
import signal

import grpc
import grpc.aio
import pytest

from bench.node import ONE, TWO
from kybernate.pb import deviceplugin_pb2 as pb
from tests.conformance.node import Stand
from tests.conformance.pods import Container, Workload, container, running, shown
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def waiting_reason(pods: Workload, name: str) -> dict[str, str]:
    return dict(container(await pods.get(name)).get("state", {}).get("waiting", {}))


@pytest.mark.item(35)
@pytest.mark.needs_pods
async def test_a_refused_start_shows_the_reason_and_is_retried_until_it_is_granted(node: Stand, pods: Workload) -> None:
    node.door.held = True
    name = await pods.create(Container({TWO: 1}))
    seat = await until(lambda: next(iter(node.door.calls()), ""), what="a start that waits")
    node.door.say(seat, "group CD is held by llama since 12 s")

    async def refused() -> bool:
        return (await waiting_reason(pods, name)).get("reason") == "CreateContainerConfigError"

    await until(refused, what="the refusal in the pod's status")
    text = (await waiting_reason(pods, name))["message"]
    assert "device plugin PreStartContainer rpc failed with err: rpc error: code = FailedPrecondition desc = " in text
    assert text.endswith("group CD is held by llama since 12 s")
    assert (await pods.get(name))["status"]["phase"] == "Pending"
    node.door.held = False
    assert (await running(pods, name))["restartCount"] == 0
    assert await shown(pods, name, "KYB_GPU_SEAT") == [seat]


@pytest.mark.item(35, 61)
@pytest.mark.needs_pods
async def test_waiting_starts_delay_neither_other_pods_nor_the_plugin(node: Stand, pods: Workload) -> None:
    node.door.held = True
    for _ in range(2):
        await pods.create(Container({TWO: 1}))
    waiting = await until(lambda: node.door.calls() if len(node.door.calls()) == 2 else None, what="two waiting starts")
    async with node.probe("p0") as probe:
        await running(pods, await pods.create(Container({probe.resource: 1})))
        assert set(node.door.calls()) <= set(waiting)
        found = await node.allocatable()
        for seat in found[ONE]:
            assert (await node.allocate(ONE, seat)).envs["KYB_GPU_SEAT"] == seat
        await pods.clear()


@pytest.mark.item(35)
async def test_the_gate_answers_before_the_callers_deadline(node: Stand) -> None:
    node.door.held = True
    seat = sorted((await node.allocatable())[TWO])[0]
    async with node.calling(TWO) as stub:
        call = stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[seat]), timeout=30)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "waits for its turn on the GPUs" in str(await call.details())


@pytest.mark.item(61)
async def test_many_waiting_calls_and_a_hanging_driver_leave_the_plugin_responsive(node: Stand) -> None:
    node.door.held = True
    seats = sorted((await node.allocatable())[ONE])
    node.driver.signal(signal.SIGSTOP)
    async with node.calling(ONE) as stub:
        gates = [stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[seat]), timeout=30) for seat in seats]
        try:
            await until(lambda: set(node.door.calls()) == set(seats), what="waiting starts")
            for _ in range(20):
                options = await stub.GetDevicePluginOptions(pb.Empty(), timeout=20)
                assert options.pre_start_required
        finally:
            node.driver.signal(signal.SIGCONT)
            for gate in gates:
                gate.cancel()
            await asyncio.gather(*(_ended(gate) for gate in gates))


async def _ended(call: object) -> None:
    try:
        await call.code()  # type: ignore[attr-defined]
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        return
