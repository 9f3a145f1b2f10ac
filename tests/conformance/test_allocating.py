"""Rules 23 to 34: Allocate and what a container gets by it."""

import asyncio
import os
import re
import signal

import grpc
import grpc.aio
import pytest

from bench.node import FOUR, ONE, SEATS, TWO
from kybernate.dev.fakes.kubelet import checkpoint
from kybernate.dev.fakes.stubs.build import build_stubs
from kybernate.pb import deviceplugin_pb2 as pb
from tests.conformance.node import Stand, own_kubelet
from tests.conformance.pods import Container, Workload, container, failed, running, shown
from tests.kubelet.stand import ScriptedPlugin, serving
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
QUALIFIED = re.compile(r"[a-zA-Z][a-zA-Z0-9.-]*/[a-zA-Z][a-zA-Z0-9_-]*=[a-zA-Z0-9][a-zA-Z0-9_.:-]*")
"""vendor/class=name"""


@pytest.mark.item(23)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks at what kubelet asked")
async def test_each_container_and_resource_has_a_separate_allocate(node: Stand, pods: Workload) -> None:
    node.fake.calls.clear()
    await running(pods, await pods.create(Container({ONE: 1}), Container({ONE: 1}, name="second")))
    asked = node.asked("Allocate")
    assert [len(call.request.container_requests) for call in asked] == [1, 1]
    assert [len(call.answer.container_responses) for call in asked] == [1, 1]


@pytest.mark.item(23, 24)
async def test_our_plugin_answers_every_request_for_the_seat_that_it_names(node: Stand) -> None:
    found = await node.allocatable()
    for resource in SEATS:
        seats = sorted(found[resource], reverse=True)
        requests = [pb.ContainerAllocateRequest(devices_ids=[seat]) for seat in seats]
        async with node.calling(resource) as stub:
            answer = await stub.Allocate(pb.AllocateRequest(container_requests=requests), timeout=20)
        assert [response.envs["KYB_GPU_SEAT"] for response in answer.container_responses] == seats


@pytest.mark.item(24)
@pytest.mark.needs_pods
@pytest.mark.fake_only("sees the order of IDs over many pods")
async def test_kubelet_hands_ids_over_in_no_particular_order(node: Stand, pods: Workload) -> None:
    async with node.probe(*(f"p{number}" for number in range(8))) as probe:
        for _ in range(4):
            await running(pods, await pods.create(Container({probe.resource: 8})))
            await pods.clear()
        orders = probe.plugin.called("allocate")
        assert [sorted(order) for order in orders] == [sorted(orders[0])] * 4
        assert len(set(map(tuple, orders))) > 1


@pytest.mark.item(25, 61)
async def test_our_plugin_answers_while_the_driver_hangs_and_without_a_bus(node: Stand) -> None:
    found = await node.allocatable()
    node.driver.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(0.5)  # two readings of the GPUs begin, and hang
        for resource in SEATS:
            seats = sorted(found[resource])
            assert (await node.allocate(resource, seats[0])).envs["KYB_GPU_SEAT"] == seats[0]
    finally:
        node.driver.signal(signal.SIGCONT)


@pytest.mark.item(25, 26)
@pytest.mark.needs_pods
@pytest.mark.fake_only("makes a plugin hang, which stops the node's admissions")
async def test_one_slow_allocate_holds_up_every_admission(node: Stand, pods: Workload) -> None:
    async with node.probe("p0") as probe:
        probe.plugin.may_allocate.clear()
        await pods.create(Container({probe.resource: 1}), bypass=True)
        await until(lambda: probe.plugin.called("allocate"), what="Allocate")
        other = await pods.create(Container({ONE: 1}), bypass=True)
        assert container(await pods.get(other)) == {}
        probe.plugin.may_allocate.set()
        await running(pods, other)
        await pods.clear()


@pytest.mark.item(26)
@pytest.mark.needs_pods
async def test_what_our_plugin_refuses_fails_the_pod_with_a_text_to_act_on(node: Stand, pods: Workload) -> None:
    status = await failed(pods, await pods.create(Container({ONE: 2}), bypass=True))
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "Allocate failed due to rpc error: code = FailedPrecondition desc = " in status["message"]
    assert "set resources.limits to 1" in status["message"]
    assert status["message"].endswith(", which is unexpected")


@pytest.mark.item(27)
@pytest.mark.needs_pods
async def test_a_pod_rejected_after_an_allocate_keeps_no_seat(node: Stand, pods: Workload) -> None:
    await failed(pods, await pods.create(Container({TWO: 1}), Container({ONE: 2}, name="second"), bypass=True))
    for name in [await pods.create(Container({TWO: 1})) for _ in range(SEATS[TWO])]:
        await running(pods, name)


@pytest.mark.item(27)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks at what kubelet asked")
async def test_all_containers_are_allocated_before_the_first_one_starts(node: Stand, pods: Workload) -> None:
    node.fake.calls.clear()
    first = Container({TWO: 1}, "true", name="load", init=True)
    await running(pods, await pods.create(first, Container({ONE: 1}), Container({ONE: 1}, name="second")))
    order = [call.name for call in node.fake.calls if call.name in ("Allocate", "PreStartContainer")]
    assert order[:4] == ["Allocate"] * 3 + ["PreStartContainer"]
    assert order.count("Allocate") == 3


@pytest.mark.item(28)
@pytest.mark.needs_pods
async def test_an_app_container_has_the_seat_of_the_init_container_and_a_sidecar_its_own(
    node: Stand, pods: Workload
) -> None:
    load = Container({ONE: 1}, "env", name="load", init=True)
    side = Container({ONE: 1}, name="side", sidecar=True)
    name = await pods.create(side, load, Container({ONE: 1}))
    await running(pods, name)
    seats = [(await shown(pods, name, "KYB_GPU_SEAT", who))[0] for who in ("side", "load", "engine")]
    assert seats[1] == seats[2]
    assert seats[0] != seats[2]


@pytest.mark.item(28)
async def test_our_plugin_answers_the_same_seat_in_the_same_way_again(node: Stand) -> None:
    found = await node.allocatable()
    for resource in SEATS:
        for seat in found[resource]:
            assert await node.allocate(resource, seat) == await node.allocate(resource, seat)


@pytest.mark.item(29, 35)
@pytest.mark.needs_pods
async def test_a_restarted_container_keeps_its_seat_and_passes_the_gate_again(node: Stand, pods: Workload) -> None:
    node.door.given.clear()
    if node.kubelet is not None:
        node.fake.calls.clear()
    name = await pods.create(Container({TWO: 1}, "env; echo; sleep 0.2; exit 3"))
    seats = await shown(pods, name, "KYB_GPU_SEAT", times=1)
    await until(lambda: node.door.given.count(seats[0]) >= 2, what="a second start")

    async def restarted() -> bool:
        return bool(container(await pods.get(name)).get("restartCount", 0) >= 1)

    await until(restarted, what="a restart")
    assert set(await shown(pods, name, "KYB_GPU_SEAT")) == {seats[0]}
    if node.kubelet is not None:
        assert len(node.asked("Allocate")) == 1
        assert len(node.asked("PreStartContainer")) >= 2


@pytest.mark.item(30)
@pytest.mark.needs_pods
@pytest.mark.fake_only("removes kubelet's memory")
async def test_a_kubelet_without_memory_asks_a_plugin_without_gate_again_and_leaves_ours_to_its_owner(
    node: Stand, pods: Workload
) -> None:
    without_gate = ScriptedPlugin(options=pb.DevicePluginOptions())
    async with node.probe("p0", plugin=without_gate) as probe:
        plain, ours = await pods.create(Container({probe.resource: 1})), await pods.create(Container({ONE: 1}))
        await running(pods, plain)
        await running(pods, ours)
        (node.kubelet_dir / checkpoint.NAME).unlink()
        await node.fake.restart()
        async with serving(without_gate, node.kubelet_dir, f"again-{probe.endpoint}"):
            assert await probe.register(f"again-{probe.endpoint}") is None
            without_gate.send("p0")
            await probe.until_seats("p0")
            node.fake.restart_container("default", plain)
            await running(pods, plain, starts=2)
            assert without_gate.called("allocate") == [["p0"], ["p0"]]
            await pods.delete(plain)
    await node.until_ready()
    node.fake.restart_container("default", ours)

    async def stuck() -> str:
        return str(container(await pods.get(ours)).get("state", {}).get("waiting", {}).get("message", ""))

    assert (await until(stuck, what="the reason")).startswith("no devices found allocated in local cache")
    await pods.delete(ours)
    await running(pods, await pods.create(Container({ONE: 1})))


@pytest.mark.item(31)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks at what kubelet made of the answers")
async def test_of_two_resources_in_one_container_one_wins_and_both_pass_the_gate(node: Stand, pods: Workload) -> None:
    name = await pods.create(Container({ONE: 1, TWO: 1}))
    await running(pods, name)
    (pod,) = node.fake.pods
    options = node.fake.devices.run_options(pod.uid, "engine")
    assert any(conflict.startswith("env KYB_GPU_SEAT") for conflict in options.conflicts)
    assert await shown(pods, name, "KYB_GPU_SEAT") == [options.envs["KYB_GPU_SEAT"]]
    seats = {seat for entry in node.fake.devices.of(pod.uid, "engine") for seat in entry.device_ids}
    assert {seat[:2] for seat in seats} == {"1x", "2x"}
    assert seats <= set(node.door.given)  # both ask at the gate, so that the manager can refuse them


@pytest.mark.item(32)
@pytest.mark.needs_pods
@pytest.mark.fake_only("which of two wins is the container runtime's choice")
async def test_a_variable_of_the_pod_comes_after_ours(node: Stand, pods: Workload) -> None:
    name = await pods.create(Container({ONE: 1}, env={"CUDA_VISIBLE_DEVICES": "7"}))
    assert await shown(pods, name, "CUDA_VISIBLE_DEVICES") == ["7"]
    assert (await shown(pods, name, "NVIDIA_VISIBLE_DEVICES"))[0].startswith("GPU-")


@pytest.mark.item(33)
async def test_every_host_path_of_our_answers_exists_and_permissions_are_those_of_cgroups(node: Stand) -> None:
    found = await node.allocatable()
    for resource in SEATS:
        for seat in found[resource]:
            answer = await node.allocate(resource, seat)
            paths = [device.container_path for device in answer.devices]
            paths += [mount.container_path for mount in answer.mounts]
            assert len(paths) == len(set(paths))
            assert answer.mounts
            assert all(os.path.exists(mount.host_path) for mount in answer.mounts)
            assert all(os.path.exists(device.host_path) for device in answer.devices)
            assert all(set(device.permissions) <= set("rwm") for device in answer.devices)


@pytest.mark.item(34)
async def test_cdi_names_of_our_answers_are_fully_qualified(node: Stand) -> None:
    found = await node.allocatable()
    for resource in (ONE, TWO, FOUR):
        for seat in found[resource]:
            answer = await node.allocate(resource, seat)
            assert all(QUALIFIED.fullmatch(device.name) for device in answer.cdi_devices)
            assert not (answer.cdi_devices and answer.devices)  # one way or the other


@pytest.mark.item(34)
@pytest.mark.fake_only("runs a second plugin, on NVIDIA's library as the stub plays it")
async def test_where_cdi_is_asked_for_our_answer_names_a_device_and_brings_no_device_nodes() -> None:
    stubs = await asyncio.to_thread(build_stubs)
    async with own_kubelet(settings={"KYB_DRIVER": "cuda", "LD_LIBRARY_PATH": str(stubs)}) as stand:
        await stand.start(deviceListStrategy="cdi-cri")
        await stand.until_ready()
        for resource, seats in (await stand.allocatable()).items():
            for seat in seats:
                answer = await stand.allocate(resource, seat)
                assert answer.cdi_devices
                assert all(QUALIFIED.fullmatch(device.name) for device in answer.cdi_devices)
                assert not answer.devices


@pytest.mark.item(60)
async def test_an_unknown_seat_and_two_in_one_container_are_refused_with_a_code_and_a_text(node: Stand) -> None:
    found = await node.allocatable()
    for resource in SEATS:
        unknown = f"this seat of {resource} does not exist"
        for seats, text in ((["9x-abcdef.s00"], unknown), (list(found[resource]), "limits")):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await node.allocate(resource, *seats)
            assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert text in str(refusal.value.details())
            assert "Error" not in str(refusal.value.details())
