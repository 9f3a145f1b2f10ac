"""Rules 46 to 52: who owns a seat, and when it is free again."""

import asyncio
import os

import grpc
import grpc.aio
import pytest

from bench.node import FOUR, ONE, SEATS, TWO
from kybernate.pb import podresources_pb2 as pb
from kybernate.pb import podresources_pb2_grpc as rpc
from tests.conformance.node import FOREIGN, Stand
from tests.conformance.pods import Container, Workload, container, running, shown
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(node: Stand) -> dict[str, pb.PodResources]:
    """Pods by name, as PodResources lists them."""
    answer = await node.ask_kubelet("List", pb.ListPodResourcesRequest())
    return {pod.name: pod for pod in answer.pod_resources}


def seats(pod: pb.PodResources) -> dict[str, list[str]]:
    """Return the device IDs by container, as often as they are listed."""
    return {entry.name: [seat for device in entry.devices for seat in device.device_ids] for entry in pod.containers}


@pytest.mark.item(9, 46)
async def test_all_allocatable_seats_are_listed_with_their_resource(node: Stand) -> None:
    found = await node.allocatable()
    assert {resource: len(found[resource]) for resource in SEATS} == SEATS


@pytest.mark.item(46, 47)
@pytest.mark.needs_pods
async def test_the_owner_of_a_seat_is_listed_by_namespace_and_name(node: Stand, pods: Workload) -> None:
    load = Container({ONE: 1}, "true", name="load", init=True)
    side = Container({ONE: 1}, name="side", sidecar=True)
    name = await pods.create(side, load, Container({ONE: 1}))
    await running(pods, name)
    pod = (await listed(node))[name]
    (seat,) = await shown(pods, name, "KYB_GPU_SEAT")
    assert pod.namespace == "default"
    assert set(seats(pod)) == {"side", "engine"}
    assert set(seats(pod)["engine"]) == {seat}
    assert not any("uid" in field.name.lower() for field in pb.PodResources.DESCRIPTOR.fields)
    got = await node.ask_kubelet("Get", pb.GetPodResourcesRequest(pod_name=name, pod_namespace="default"))
    assert seats(got.pod_resources) == seats(pod)
    with pytest.raises(grpc.aio.AioRpcError, match="pod unknown in namespace default not found"):
        await node.ask_kubelet("Get", pb.GetPodResourcesRequest(pod_name="unknown", pod_namespace="default"))


@pytest.mark.item(48, 51)
@pytest.mark.needs_pods
async def test_a_finished_pod_is_not_listed_and_its_seat_goes_to_the_next_pod(node: Stand, pods: Workload) -> None:
    stays = await pods.create(Container({FOUR: 1}))
    await running(pods, stays)
    over = await pods.create(Container({FOUR: 1}, "env"), policy="Never")

    async def succeeded() -> bool:
        return bool((await pods.get(over)).get("status", {}).get("phase") == "Succeeded")

    await until(succeeded, what="the end of the pod")
    (seat,) = await shown(pods, over, "KYB_GPU_SEAT")

    async def gone() -> bool:
        return over not in await listed(node)

    await until(gone, what="its absence from the list")
    again = await pods.create(Container({FOUR: 1}))
    await running(pods, again)
    assert await shown(pods, again, "KYB_GPU_SEAT") == [seat]


@pytest.mark.item(49)
@pytest.mark.needs_pods
async def test_a_seat_on_two_numa_nodes_is_listed_twice_and_is_one(node: Stand, pods: Workload) -> None:
    name = await pods.create(Container({FOUR: 1}))
    await running(pods, name)
    listed_ids = seats((await listed(node))[name])["engine"]
    nodes = next(iter((await node.allocatable())[FOUR].values()))
    assert len(listed_ids) == max(1, len(nodes))
    assert len(set(listed_ids)) == 1


@pytest.mark.item(50)
async def test_a_burst_of_calls_is_refused_in_part(node: Stand) -> None:
    async with grpc.aio.insecure_channel(f"unix:{node.pod_resources}", options=FOREIGN) as channel:
        stub = rpc.PodResourcesListerStub(channel)

        async def ask() -> grpc.StatusCode:
            call = stub.List(pb.ListPodResourcesRequest(), timeout=20)
            return await call.code()

        codes = await asyncio.gather(*(ask() for _ in range(200)))
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
    assert grpc.StatusCode.OK in codes


@pytest.mark.item(52)
@pytest.mark.needs_pods
@pytest.mark.fake_only("looks for the processes of a pod that is gone")
async def test_a_force_deleted_pods_seat_is_allocated_again_while_its_process_runs(node: Stand, pods: Workload) -> None:
    others = [await pods.create(Container({TWO: 1})) for _ in range(SEATS[TWO])]
    for name in others:
        await running(pods, name)
    (seat,) = await shown(pods, others[0], "KYB_GPU_SEAT")
    pid = int(container(await pods.get(others[0]))["containerID"].removeprefix("process://"))
    node.fake.force_delete("default", others[0], linger_seconds=3600)
    assert others[0] not in await listed(node)
    successor = await pods.create(Container({TWO: 1}))
    await running(pods, successor)
    assert await shown(pods, successor, "KYB_GPU_SEAT") == [seat]
    os.kill(pid, 0)  # still there
