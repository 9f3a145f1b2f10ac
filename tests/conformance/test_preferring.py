"""Rules 18 to 22: GetPreferredAllocation."""

import pytest

from bench.node import FOUR, ONE, SEATS, TWO
from kybernate.dev.fakes.kubelet.device_manager import NumaTopology
from kybernate.pb import deviceplugin_pb2 as pb
from tests.conformance.node import Probe, Stand, own_kubelet
from tests.conformance.pods import Container, FakePods, Workload, failed, running, shown
from tests.kubelet.stand import ScriptedPlugin

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def preferred(node: Stand, resource: str, available: list[str], must: list[str], size: int) -> list[str]:
    request = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
    )
    async with node.calling(resource) as stub:
        answer = await stub.GetPreferredAllocation(
            pb.PreferredAllocationRequest(container_requests=[request]), timeout=20
        )
    (response,) = answer.container_responses
    return list(response.deviceIDs)


@pytest.mark.item(18)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks at what kubelet asked")
async def test_our_plugin_is_asked_for_one_container_even_where_a_pod_has_two(node: Stand, pods: Workload) -> None:
    node.fake.calls.clear()
    name = await pods.create(Container({ONE: 1}), Container({TWO: 1}, name="second"))
    await running(pods, name)
    asked = node.asked("GetPreferredAllocation")
    assert sorted(call.resource for call in asked) == sorted([ONE, TWO])
    assert [len(call.request.container_requests) for call in asked] == [1, 1]


@pytest.mark.item(18)
@pytest.mark.needs_pods
async def test_a_plugin_that_does_not_offer_it_is_not_asked(node: Stand, pods: Workload) -> None:
    async with node.probe("p0", "p1", plugin=ScriptedPlugin(options=pb.DevicePluginOptions())) as probe:
        await running(pods, await pods.create(Container({probe.resource: 1})))
        assert [name for name, _ in probe.plugin.calls] == ["options", "list", "allocate"]
        await pods.clear()


@pytest.mark.item(19, 20)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks at what kubelet asked")
async def test_our_plugin_is_asked_for_a_single_seat_among_all_free_ones_which_kubelet_takes(
    node: Stand, pods: Workload
) -> None:
    node.fake.calls.clear()
    name = await pods.create(Container({ONE: 1}))
    await running(pods, name)
    (asked,) = node.asked("GetPreferredAllocation", ONE)
    assert sorted(asked.request.container_requests[0].available_deviceIDs) == node.seats_of(ONE)
    assert asked.request.container_requests[0].allocation_size == 1
    assert await shown(pods, name, "KYB_GPU_SEAT") == list(asked.answer.container_responses[0].deviceIDs)


@pytest.mark.item(19)
@pytest.mark.fake_only("needs a topology policy and two NUMA nodes")
async def test_with_numa_alignment_the_plugin_is_not_asked_when_nothing_is_left_to_choose() -> None:
    async with own_kubelet(NumaTopology("single-numa-node")) as stand, stand.probe() as probe:
        assert await probe.register() is None
        probe.plugin.lists.put_nowait([_on("p0", 0), _on("p1", 0), _on("p2", 1)])
        await probe.until_seats("p0", "p1", "p2")
        pods = FakePods(stand.fake)
        for _ in range(2):
            await running(pods, await pods.create(Container({probe.resource: 1})))
        (asked,) = probe.plugin.called("preferred")
        assert sorted(asked.container_requests[0].available_deviceIDs) == ["p0", "p1"]
        assert sorted(seat for (seat,) in probe.plugin.called("allocate")) == ["p0", "p1"]


def _on(name: str, node: int) -> pb.Device:
    return pb.Device(ID=name, health="Healthy", topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]))


@pytest.mark.item(20)
@pytest.mark.needs_pods
async def test_what_is_not_free_is_ignored_in_the_answer_and_the_rest_is_filled_up(node: Stand, pods: Workload) -> None:
    async with node.probe("p0", "p1", "p2") as probe:
        probe.plugin.preferred = ["p1", "elsewhere"]
        await running(pods, await pods.create(Container({probe.resource: 1})))
        await running(pods, await pods.create(Container({probe.resource: 2})))
        assert probe.plugin.called("allocate")[0] == ["p1"]
        assert sorted(probe.plugin.called("allocate")[1]) == ["p0", "p2"]
        await pods.clear()


@pytest.mark.item(21)
@pytest.mark.needs_pods
async def test_an_error_rejects_the_pod_and_an_empty_list_does_not(node: Stand, pods: Workload) -> None:
    async with node.probe("p0") as probe:
        probe.plugin.preferred_error = "cannot say"
        status = await failed(pods, await pods.create(Container({probe.resource: 1}), bypass=True))
        assert status["reason"] == "UnexpectedAdmissionError"
        assert (
            "GetPreferredAllocation rpc failed with err: rpc error: code = Internal desc = cannot say"
            in (status["message"])
        )
        probe.plugin.preferred_error = ""
        await running(pods, await pods.create(Container({probe.resource: 1})))
        await pods.clear()


@pytest.mark.item(21)
@pytest.mark.parametrize(
    ("available", "must", "size"),
    [([], [], 1), (["unknown"], [], 1), (["unknown"], ["gone"], 2), ([], [], 0), ([], [], -1), ([], [], 100)],
)
async def test_our_plugin_answers_nonsense_with_an_empty_list_and_never_with_an_error(
    node: Stand, available: list[str], must: list[str], size: int
) -> None:
    for resource in SEATS:
        assert await preferred(node, resource, available, must, size) == []


@pytest.mark.item(22)
async def test_our_plugin_keeps_what_it_must_include(node: Stand) -> None:
    found = await node.allocatable()
    for resource in (ONE, TWO, FOUR):
        seats = sorted(found[resource])
        for must in seats:
            assert await preferred(node, resource, seats, [must], 1) == [must]
            assert must in await preferred(node, resource, seats, [must], 2)


@pytest.mark.item(22)
@pytest.mark.needs_pods
async def test_devices_of_init_containers_are_what_must_be_included(node: Stand, pods: Workload) -> None:
    async with node.probe("p0", "p1", "p2") as probe:
        first = Container({probe.resource: 1}, "true", name="load", init=True)
        await running(pods, await pods.create(first, Container({probe.resource: 2})))
        (load, engine) = probe.plugin.called("allocate")
        assert set(load) < set(engine)
        assert _musts(probe)[-1] == load
        await pods.clear()


def _musts(probe: Probe) -> list[list[str]]:
    asked = probe.plugin.called("preferred")
    return [list(request.container_requests[0].must_include_deviceIDs) for request in asked]
