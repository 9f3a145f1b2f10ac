import json
from pathlib import Path

import pytest

from kybernate.config import NodeConfig
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.topology import Group, plan
from services.plugin.core.devices import NotGrantedError, Offer, device_paths
from services.plugin.offers import cdi_names
from tests.plugin import stand
from tests.plugin.stand import GPUS, ONE, TWO, paths


def offer(**changes: object) -> Offer:
    return stand.offer(**({"present": frozenset(device_paths(GPUS))} | changes))


def seats(node: Offer, group: str) -> list[str]:
    return [seat for seat, own in node.seats.items() if own.name == group]


def mounts(answer: pb.ContainerAllocateResponse) -> list[tuple[str, str]]:
    return [(one.container_path, one.host_path) for one in answer.mounts if one.read_only]


def test_each_resource_lists_its_seats_with_their_numa_nodes() -> None:
    node = offer()
    assert node.resources == (ONE, TWO)
    listed = node.listed(TWO, frozenset()).devices
    assert [seat.ID for seat in listed] == seats(node, "G23")
    assert [[node.ID for node in seat.topology.nodes] for seat in listed] == [[1], [1]]
    assert {seat.health for seat in listed} == {"Healthy"}
    assert all(len(seat_id) <= 63 for seat_id in node.seats)


def test_first_fit_takes_the_first_free_seat_of_the_first_group() -> None:
    node = offer()
    g0, g1 = seats(node, "G0"), seats(node, "G1")
    assert node.preferred(reversed([*g0, *g1]), (), 1, frozenset()) == (g0[0],)
    assert node.preferred([*g1, g0[1]], (), 1, frozenset()) == (g0[1],)
    assert node.preferred([*g1, *g0], (g1[1],), 2, frozenset()) == (g1[1], g0[0])


def test_a_group_with_a_faulty_gpu_is_not_preferred_and_without_a_candidate_the_answer_is_empty() -> None:
    node = offer()
    g0, g1 = seats(node, "G0"), seats(node, "G1")
    assert node.preferred([*g0, *g1], (), 1, frozenset({"GPU-0"})) == (g1[0],)
    assert node.preferred(g0, (), 1, frozenset({"GPU-0"})) == ()
    assert node.preferred(["unknown"], ("unknown",), 1, frozenset()) == ()
    assert node.preferred(g0, (), 3, frozenset()) == ()


def test_the_answer_names_gpus_for_people_for_the_runtime_and_for_cuda() -> None:
    node = offer()
    seat = seats(node, "G23")[1]
    answer = node.answer(TWO, [seat])
    assert answer.envs == {
        "KYB_GPU_INDICES": "2,3",
        "KYB_GPU_GROUP": "G23",
        "KYB_GPU_SEAT": seat,
        "KYB_SEAT_DIR": f"/run/kyb/seats/{seat}",
        "NVIDIA_VISIBLE_DEVICES": "GPU-2,GPU-3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert mounts(answer) == [(f"/run/kyb/seats/{seat}", f"/run/kyb/seats/{seat}")]
    # Device nodes by minor number.
    assert paths(answer) == {
        "/dev/nvidia5",
        "/dev/nvidia4",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    }
    assert node.answer(TWO, [seat]) == answer


def test_with_all_device_nodes_cuda_counts_the_groups_gpus_among_all_in_pci_order() -> None:
    node = offer(expose="node")
    answer = node.answer(TWO, seats(node, "G23")[:1])
    assert answer.envs["CUDA_VISIBLE_DEVICES"] == "0,2"  # PCI order of all: 3, 1, 2, 0
    assert {"/dev/nvidia4", "/dev/nvidia5", "/dev/nvidia6", "/dev/nvidia7"} <= paths(answer)


def test_device_nodes_that_do_not_exist_are_left_out() -> None:
    node = offer(present=frozenset({"/dev/nvidia7"}))
    assert paths(node.answer(ONE, seats(node, "G0")[:1])) == {"/dev/nvidia7"}


def test_with_the_fakes_there_are_no_device_nodes_but_the_driver() -> None:
    node = offer(fake_driver=Path("/run/fake/driver.sock"))
    answer = node.answer(ONE, seats(node, "G1")[:1])
    assert paths(answer) == set()
    assert answer.envs["KYB_FAKE_GPU"] == "GPU-1"
    assert answer.envs["KYB_FAKE_DRIVER"] == "/run/fake/driver.sock"
    # A container sees the host's files only where they are mounted.
    assert mounts(answer)[1:] == [("/run/fake", "/run/fake")]


@pytest.mark.parametrize("resource", [ONE, TWO])
def test_more_than_one_seat_is_refused_with_the_remedy(resource: str) -> None:
    node = offer()
    with pytest.raises(NotGrantedError, match=r"can have one .*, not 2: .* set resources\.limits to 1"):
        node.answer(resource, [seat for seat, group in node.seats.items() if group.profile.resource == resource][:2])


def test_a_seat_that_is_unknown_or_of_another_resource_is_refused() -> None:
    node = offer()
    for resource, seat_id in ((ONE, "1x-000000.s00"), (ONE, seats(node, "G23")[0])):
        with pytest.raises(NotGrantedError, match=r"does not exist on this node any more; .*; delete the pod so"):
            node.answer(resource, [seat_id])


def movable(**changes: object) -> Offer:
    """G0 and G1 exchange seats; their containers reach both GPUs."""
    config = stand.config()
    config["profiles"][0]["rebalance"] = True
    groups = plan(NodeConfig.model_validate_json(json.dumps(config)), GPUS).groups
    return offer(**({"groups": groups} | changes))


def test_a_seat_that_may_move_reaches_the_gpus_of_its_peers_and_sees_its_own() -> None:
    node = movable()
    answers = {name: node.answer(ONE, [seats(node, name)[0]]) for name in ("G0", "G1")}
    assert {"/dev/nvidia7", "/dev/nvidia6"} <= paths(answers["G0"])
    assert paths(answers["G0"]) == paths(answers["G1"])
    assert "/dev/nvidia5" not in paths(answers["G0"])  # of a group of another profile
    # Its own first; CUDA counts by PCI address, and GPU 1 comes before GPU 0 there.
    assert {name: answer.envs["NVIDIA_VISIBLE_DEVICES"] for name, answer in answers.items()} == {
        "G0": "GPU-0,GPU-1",
        "G1": "GPU-1,GPU-0",
    }
    assert [answers[name].envs["CUDA_VISIBLE_DEVICES"] for name in ("G0", "G1")] == ["1", "0"]
    assert answers["G0"].envs["KYB_GPU_INDICES"] == "0"


def test_a_pair_that_may_move_counts_its_gpus_among_those_of_all_pairs() -> None:
    config = stand.config()
    config["profiles"] = [config["profiles"][1] | {"rebalance": True}]
    config["gpuTopology"] = {"groups": [{"name": "G01", "gpus": [0, 1]}, {"name": "G23", "gpus": [2, 3]}]}
    groups = plan(NodeConfig.model_validate_json(json.dumps(config)), GPUS).groups
    node, two = offer(groups=groups), groups[0].profile.resource
    answers = {name: node.answer(two, [seats(node, name)[0]]) for name in ("G01", "G23")}
    assert paths(answers["G01"]) == paths(answers["G23"])
    order = [gpu.uuid for gpu in sorted(GPUS, key=lambda gpu: gpu.pci_bus_id) if gpu.index < 4]
    for name, own in (("G01", {"GPU-0", "GPU-1"}), ("G23", {"GPU-2", "GPU-3"})):
        seen = answers[name].envs["CUDA_VISIBLE_DEVICES"].split(",")
        assert {order[int(ordinal)] for ordinal in seen} == own


def test_a_missing_gpu_is_no_target_of_moves() -> None:
    node = movable(gpus=tuple(gpu for gpu in GPUS if gpu.uuid != "GPU-1"))
    answer = node.answer(ONE, [seats(node, "G0")[0]])
    assert (answer.envs["NVIDIA_VISIBLE_DEVICES"], answer.envs["CUDA_VISIBLE_DEVICES"]) == ("GPU-0", "0")
    assert "/dev/nvidia6" not in paths(answer)


@pytest.mark.parametrize("gone", [None, "GPU-1"])
def test_a_start_on_another_group_counts_no_gpu_of_its_home_that_is_gone(gone: str | None) -> None:
    """CUDA does not count it either: its engine took no GPU, or that of another seat."""
    node = movable(gpus=tuple(gpu for gpu in GPUS if gpu.uuid != gone))
    moved = node.moved_envs(seats(node, "G1")[0], "G0")
    assert moved["CUDA_VISIBLE_DEVICES"] == ("1" if gone is None else "0")


def test_cdi_names_of_a_seat_that_may_move_include_its_peers() -> None:
    groups = movable().groups
    nvidia = frozenset(gpu.uuid for gpu in GPUS)
    names = cdi_names("auto", groups, nvidia)
    assert names["G0"][1:] == ("nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-1")
    assert names["G23"][1:] == ("nvidia.com/gpu=GPU-2", "nvidia.com/gpu=GPU-3")
    there = cdi_names("auto", groups, nvidia, missing=frozenset({"GPU-1"}))
    assert there["G0"][1:] == ("nvidia.com/gpu=GPU-0",)


def _pool_of_three() -> tuple[Group, ...]:
    config = stand.config()
    config["profiles"][0]["rebalance"] = True
    config["gpuTopology"]["groups"] = [{"name": f"G{gpu}", "gpus": [gpu]} for gpu in range(3)]
    return plan(NodeConfig.model_validate_json(json.dumps(config)), GPUS).groups


def test_a_start_on_another_group_counts_what_its_container_was_made_with() -> None:
    """GPU 1 was gone then, and is back: the engine started on the GPU of a third group."""
    groups = _pool_of_three()
    before = offer(groups=groups, gpus=tuple(gpu for gpu in GPUS if gpu.uuid != "GPU-1"))
    home = next(group for group in groups if group.name == "G2")
    moved = offer(groups=groups).moved_envs(home.seat_ids[0], "G0", before.reach(home))
    assert moved["CUDA_VISIBLE_DEVICES"] == "1"  # PCI order in the container: 2, 0


def test_a_start_on_another_group_counts_gpus_that_its_pool_has_lost_since() -> None:
    """A changed configuration took GPU 1 out of the pool, and not out of the container."""
    groups = tuple(one for one in _pool_of_three() if one.name != "G1")
    home = next(group for group in groups if group.name == "G2")
    reach = offer(groups=_pool_of_three()).reach(home)
    moved = offer(groups=groups).moved_envs(home.seat_ids[0], "G0", reach)
    assert moved["CUDA_VISIBLE_DEVICES"] == "2"  # PCI order in the container: 1, 2, 0
