import pytest

from kybernate.dev.fakes.kubelet.allocations import (
    AffinityPolicy,
    AffinityRequest,
    best_affinity,
    hints,
    split_by_affinity,
)
from kybernate.dev.fakes.kubelet.device_manager import NumaTopology
from kybernate.pb import deviceplugin_pb2 as pb
from tests.kubelet.stand import RESOURCE, pod, registered, running_kubelet, until_capacity, until_failed

MACHINE = (0, 1)
NODES = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}


def request(count: int = 1, free: str = "abcd", reusable: str = "", devices: object = None) -> AffinityRequest:
    return AffinityRequest(devices or NODES, frozenset(free), frozenset(reusable), count)  # type: ignore[arg-type]


def test_one_device_fits_on_either_node_and_a_single_node_is_preferred() -> None:
    found = {(hint.nodes, hint.preferred) for hint in hints(request(), MACHINE)}
    assert found == {(frozenset({0}), True), (frozenset({1}), True), (frozenset({0, 1}), False)}


def test_devices_of_init_containers_pin_the_node() -> None:
    assert {hint.nodes for hint in hints(request(free="ad", reusable="c"), MACHINE)} == {
        frozenset({1}),
        frozenset({0, 1}),
    }


def test_a_node_that_the_machine_does_not_have_is_dropped() -> None:
    assert [hint.nodes for hint in hints(request(devices={"a": (7,), "b": (0,)}), MACHINE)] == [frozenset({0})]


def test_a_device_without_numa_nodes_has_no_preference() -> None:
    assert best_affinity("single-numa-node", [request(devices={"a": (), "b": ()})], MACHINE) == (
        frozenset(MACHINE),
        True,
    )


@pytest.mark.parametrize(
    ("policy", "count", "free", "expected"),
    [
        ("none", 1, "abcd", (None, True)),
        ("best-effort", 1, "abcd", (frozenset({0}), True)),
        ("best-effort", 1, "cd", (frozenset({1}), True)),
        ("best-effort", 2, "ac", (frozenset({0, 1}), True)),
        ("restricted", 2, "ac", (frozenset({0, 1}), False)),  # one node could serve two, if they were free
        ("restricted", 3, "abc", (frozenset({0, 1}), True)),  # no node has three
        ("single-numa-node", 3, "abc", (frozenset({0, 1}), False)),
        ("single-numa-node", 2, "acd", (frozenset({1}), True)),
        ("best-effort", 2, "a", (frozenset({0, 1}), True)),
        ("restricted", 2, "a", (frozenset({0, 1}), False)),
    ],
)
def test_policies(policy: AffinityPolicy, count: int, free: str, expected: tuple[frozenset[int] | None, bool]) -> None:
    assert best_affinity(policy, [request(count, free)], MACHINE) == expected


def test_two_resources_meet_on_a_common_node() -> None:
    assert best_affinity("single-numa-node", [request(free="abcd"), request(free="cd")], MACHINE) == (
        frozenset({1}),
        True,
    )


def test_devices_are_split_by_affinity_and_one_of_several_nodes_counts_once() -> None:
    devices = {"a": (0,), "b": (0, 1), "c": (1,), "d": ()}
    assert split_by_affinity(devices, "abcd", frozenset({0})) == ({"a", "b"}, {"c"}, {"d"})
    assert split_by_affinity(devices, "abcd", None) == (set(), set(), set("abcd"))


def device(name: str, *nodes: int) -> pb.Device:
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
    return pb.Device(ID=name, health="Healthy", topology=topology)


async def test_a_pod_that_cannot_be_aligned_is_rejected() -> None:
    async with (
        running_kubelet(topology=NumaTopology("single-numa-node")) as kubelet,
        registered(kubelet, "x") as plugin,
    ):
        plugin.lists.put_nowait([device("a", 0), device("c", 1)])
        await until_capacity(kubelet, {RESOURCE: (2, 2)})
        spread = kubelet.create(pod(seats=2))
        await until_failed(spread)
        status = spread.document()["status"]
        assert status["reason"] == "TopologyAffinityError"
        assert status["message"] == "Pod was rejected: Resources cannot be allocated with Topology locality"
