"""Rules 9 to 17: ListAndWatch, health, NUMA nodes."""

import pytest

from bench.node import FOUR, GPUS, ONE, SEATS, TWO
from kybernate.pb import deviceplugin_pb2 as pb
from tests.conformance.node import Stand, own_kubelet
from tests.conformance.pods import Container, Workload, container, failed, running
from tests.kubelet.stand import register, serving
from tests.until import until, until_equal

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.item(9)
async def test_each_list_replaces_the_one_before(node: Stand) -> None:
    async with node.probe("p0", "p1", "p2") as probe:
        probe.plugin.send("p1", "p3")
        await probe.until_seats("p1", "p3")


@pytest.mark.item(10)
@pytest.mark.parametrize("word", ["Unhealthy", "", "healthy", "OK"])
async def test_only_the_word_healthy_is_healthy(node: Stand, word: str) -> None:
    async with node.probe("p0", "p1") as probe:
        probe.plugin.lists.put_nowait([pb.Device(ID="p0", health=word), pb.Device(ID="p1", health="Healthy")])
        await probe.until_seats("p1")


@pytest.mark.item(11)
async def test_after_the_end_of_the_stream_kubelet_waits_for_a_registration(node: Stand) -> None:
    async with node.probe("p0") as probe:
        probe.plugin.lists.put_nowait(None)
        await probe.until_seats()
        probe.plugin.send("p0")
        assert await probe.register() is None
        await probe.until_seats("p0")
        assert len(probe.plugin.called("list")) == 2  # one for each registration


@pytest.mark.item(12, 42)
@pytest.mark.fake_only("cuts a connection of kubelet")
async def test_our_plugin_registers_again_when_its_stream_is_cut_and_only_that_resource(node: Stand) -> None:
    endpoints = node.fake.devices.endpoints
    before = {resource: endpoints[resource].plugin for resource in SEATS}
    await before[TWO].close()  # type: ignore[union-attr]
    await until(lambda: endpoints[TWO].plugin is not before[TWO], what="a new registration")
    await node.until_ready()
    assert endpoints[ONE].plugin is before[ONE]
    assert endpoints[FOUR].plugin is before[FOUR]


@pytest.mark.item(13)
@pytest.mark.fake_only("the real one takes 5 minutes")
async def test_capacity_outlives_the_stream_and_then_is_zero() -> None:
    async with own_kubelet(grace_seconds=0.5) as stand, stand.probe("p0", "p1") as probe:
        capacity = stand.fake.devices.capacity
        probe.plugin.lists.put_nowait(None)
        await until(lambda: capacity()[probe.resource] == (2, 0), what="two seats, none allocatable", saw=capacity)
        await until(lambda: capacity()[probe.resource] == (0, 0), what="no seats of the resource", saw=capacity)
        assert stand.fake.node()["status"]["capacity"] == {probe.resource: "0"}


@pytest.mark.item(14, 40, 58, 59)
@pytest.mark.needs_pods
async def test_a_killed_plugin_restarts_and_only_pods_admitted_in_between_fail(node: Stand, pods: Workload) -> None:
    stays = await pods.create(Container({ONE: 1}))
    before = await running(pods, stays)
    old = {path.name for path in node.sockets()}
    await node.plugin.kill()
    await until(lambda: _none(node), what="the loss of every seat")
    assert {path.name for path in node.sockets()} == old  # the killed plugin could not remove them
    lost = await failed(pods, await pods.create(Container({ONE: 1}), bypass=True))
    assert lost["reason"] == "UnexpectedAdmissionError"
    assert f"no healthy devices present; cannot allocate unhealthy devices {ONE}" in lost["message"]
    await node.plugin.start()
    await node.until_ready()
    new = {path.name for path in node.sockets()}
    assert len(new) == 3
    assert not new & old
    assert max(len(str(path)) for path in node.sockets()) <= 107
    assert container(await pods.get(stays))["containerID"] == before["containerID"]
    await running(pods, await pods.create(Container({ONE: 1}), bypass=True))


async def _none(node: Stand) -> bool:
    found = await node.allocatable()
    return not any(found.get(resource) for resource in SEATS)


@pytest.mark.item(15, 16)
@pytest.mark.needs_pods
async def test_a_lost_gpu_makes_its_seats_unhealthy_ends_no_pod_and_recovers(node: Stand, pods: Workload) -> None:
    names = [await pods.create(Container({FOUR: 1})), await pods.create(Container({ONE: 1}))]
    before = [(await running(pods, name))["containerID"] for name in names]
    await node.with_gpus(GPUS - 1)

    async def lost() -> bool:
        found = await node.allocatable()
        return not found.get(FOUR) and len(found.get(ONE, ())) == SEATS[ONE]

    await until(lost, what="the loss of the seats on the lost GPU")

    for name, health in zip(names, ("Unhealthy", "Healthy"), strict=True):  # kubelet updates it a moment later
        await until_equal(lambda name=name: _health(pods, name), health, what="the health in the pod's status")
    assert [container(await pods.get(name))["containerID"] for name in names] == before
    await node.with_gpus(GPUS)
    await node.until_ready()
    await until_equal(lambda: _health(pods, names[0]), "Healthy", what="the health in the pod's status")
    assert [container(await pods.get(name))["containerID"] for name in names] == before


async def _health(pods: Workload, name: str) -> str:
    (status,) = container(await pods.get(name)).get("allocatedResourcesStatus", [{}])
    return str(status["resources"][0]["health"]) if status else ""


@pytest.mark.item(16)
async def test_our_seat_ids_are_unique_over_all_resources_and_short(node: Stand) -> None:
    found = await node.allocatable()
    seats = [seat for resource in SEATS for seat in found[resource]]
    assert len(seats) == len(set(seats)) == sum(SEATS.values())
    assert max(map(len, seats)) <= 63


@pytest.mark.item(17)
async def test_our_seats_name_the_numa_nodes_of_all_their_gpus(node: Stand) -> None:
    found = await node.allocatable()
    assert {nodes for resource in SEATS for nodes in map(tuple, map(sorted, found[resource].values()))}
    assert all(len(set(nodes)) == len(nodes) for resource in SEATS for nodes in found[resource].values())
    everywhere = {node for resource in (ONE, TWO) for nodes in found[resource].values() for node in nodes}
    assert everywhere <= {0, 1}


@pytest.mark.item(17, 49)
@pytest.mark.fake_only("needs a machine with two NUMA nodes")
async def test_a_device_with_several_numa_nodes_is_listed_once_for_each() -> None:
    async with own_kubelet() as stand, stand.probe() as probe:
        nodes = [pb.NUMANode(ID=0), pb.NUMANode(ID=1)]
        device = pb.Device(ID="p0", health="Healthy", topology=pb.TopologyInfo(nodes=nodes))
        assert await probe.register() is None
        probe.plugin.lists.put_nowait([device])
        await probe.until_seats("p0")
        assert (await stand.allocatable())[probe.resource] == {"p0": (0, 1)}


@pytest.mark.item(42)
async def test_a_resource_that_fails_to_register_does_not_touch_another(node: Stand) -> None:
    async with node.probe("p0") as probe:
        probe.plugin.options_error = "not today"
        async with serving(probe.plugin, node.kubelet_dir, "kyb.probe.sock"):
            assert await register(node.kubelet_dir, "kyb.probe.sock", f"{probe.resource}-other") is not None
        await probe.until_seats("p0")
        assert await node.ready()
