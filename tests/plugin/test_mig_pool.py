"""What containers get whose seats are MIG instances of one pool: named by UUID, with the nodes of all instances."""

from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.config import NodeConfig, Profile
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.topology import plan
from services.plugin.core.devices import Offer, device_paths
from services.plugin.core.faults import GONE, Probation
from services.plugin.gate import StartGate
from services.plugin.servicer import NodeSeats
from tests.plugin.stand import paths

MACHINE = hardware("2xA100-mig-3g")
A, B, C, D = (gpu.uuid for gpu in MACHINE.instances)
"""Two instances of GPU 0, then two of GPU 1."""
NODES = {
    gpu.uuid: tuple(f"/dev/nvidia-caps/nvidia-cap{10 * n + k}" for k in (1, 2))
    for n, gpu in enumerate(MACHINE.instances)
}
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
SEAT = "kyb.ai/gpu-1x-seat"


def offer(*, rebalance: bool | None = True) -> Offer:
    one = Profile(name="one", resource=SEAT, group_size=1, seats_per_group=1, rebalance=rebalance)
    return Offer(
        groups=plan(NodeConfig(profiles=(one,), mig_strategy="single"), *MACHINE).groups,
        gpus=(*MACHINE.gpus, *MACHINE.instances),
        seats_dir=Path("/run/kyb/seats"),
        present=frozenset(device_paths(MACHINE.gpus, NODES)),
        mig_nodes=NODES,
    )


def seat_on(node: Offer, uuid: str) -> str:
    return next(seat for seat, group in node.seats.items() if group.uuids == (uuid,))


def test_a_container_gets_the_nodes_of_every_instance_of_its_pool_and_cuda_its_uuid() -> None:
    node = offer()
    answer = node.answer(SEAT, [seat_on(node, B)])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join((B, A, C, D)), "its own first"
    assert answer.envs["CUDA_VISIBLE_DEVICES"] == B, "CUDA counts no second instance"
    every = {path for paths in NODES.values() for path in paths}
    assert paths(answer) == {"/dev/nvidia0", "/dev/nvidia1", *every, *CONTROL}


@pytest.mark.parametrize("rebalance", [None, False])
def test_without_a_pool_a_container_gets_its_own_instance_alone(rebalance: bool | None) -> None:
    node = offer(rebalance=rebalance)
    answer = node.answer(SEAT, [seat_on(node, B)])
    assert (answer.envs["NVIDIA_VISIBLE_DEVICES"], answer.envs["CUDA_VISIBLE_DEVICES"]) == (B, "0")
    assert paths(answer) == {"/dev/nvidia0", *NODES[B], *CONTROL}


@pytest.mark.parametrize("there", [A, C])
def test_a_start_on_another_instance_names_that_one_whether_it_is_of_the_same_gpu_or_of_another(there: str) -> None:
    node = offer()
    group = next(group for group in node.groups if group.uuids == (there,))
    moved = node.moved_envs(seat_on(node, B), group.name)
    index = str(group.gpus[0].index)
    assert moved == {"KYB_GPU_INDICES": index, "KYB_GPU_GROUP": group.name, "CUDA_VISIBLE_DEVICES": there}


def test_all_devices_of_a_node_are_no_instances() -> None:
    """``exposeDevices: node`` is about whole GPUs: an instance keeps containers apart."""
    machine = hardware("2xA100-half-mig")
    part, (whole,) = machine.instances[0], [gpu for gpu in machine.gpus if not gpu.mig_enabled]
    last = replace(whole, pci_bus_id="ffff:ff:00.0")
    machine = machine._replace(gpus=tuple(last if gpu is whole else gpu for gpu in machine.gpus))
    kinds = {"one": (whole.uuid, None), "part": (part.uuid, part.mig and part.mig.profile)}
    profiles = [
        Profile(
            name=name,
            resource=f"kyb.ai/{name}",
            group_size=1,
            seats_per_group=1,
            mig_profile=mig,
            expose_devices="node",
        )
        for name, (_, mig) in kinds.items()
    ]
    nodes = {part.uuid: ("/dev/nvidia-caps/nvidia-cap1",)}
    node = Offer(
        groups=plan(NodeConfig(profiles=tuple(profiles), mig_strategy="mixed"), *machine).groups,
        gpus=(*machine.gpus, *machine.instances),
        seats_dir=Path("/run/kyb/seats"),
        present=frozenset(device_paths(machine.gpus, nodes)),
        mig_nodes=nodes,
    )
    of_whole = node.answer("kyb.ai/one", [seat_on(node, whole.uuid)])
    assert paths(of_whole) == {f"/dev/nvidia{whole.minor}", *CONTROL}
    assert of_whole.envs["CUDA_VISIBLE_DEVICES"] == "0", "CUDA counts no GPU in MIG mode"
    of_part = node.answer("kyb.ai/part", [seat_on(node, part.uuid)])
    assert paths(of_part) == {f"/dev/nvidia{part.minor}", *nodes[part.uuid], *CONTROL}


def test_an_instance_that_was_taken_away_is_no_target_of_moves_and_nothing_starts_on_it(tmp_path: Path) -> None:
    """An allocated seat keeps its group in the offer."""
    whole = offer()
    node = replace(whole, gpus=tuple(gpu for gpu in whole.gpus if gpu.uuid != B))
    answer = node.answer(SEAT, [seat_on(node, A)])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == ",".join((A, C, D))
    assert paths(answer).isdisjoint(NODES[B])
    probation = Probation(frozenset({*(gpu.uuid for gpu in MACHINE.gpus), B}))
    probation.read([gpu.uuid for gpu in MACHINE.gpus])
    seats = NodeSeats(node, StartGate(tmp_path), probation, print)
    assert seats.missing(seat_on(node, A)) is None
    assert GONE in (seats.missing(seat_on(node, B)) or "")


def test_no_start_on_an_instance_of_a_gpu_that_is_gone(tmp_path: Path) -> None:
    one = offer()
    probation = Probation(frozenset(gpu.uuid for gpu in MACHINE.gpus))
    probation.read([MACHINE.gpus[0].uuid])
    node = NodeSeats(one, StartGate(tmp_path), probation, print)
    assert node.missing(seat_on(one, A)) is None
    assert GONE in (node.missing(seat_on(one, C)) or "")
    assert GONE in (node.missing(seat_on(one, A), next(g.name for g in one.groups if g.uuids == (D,))) or "")
