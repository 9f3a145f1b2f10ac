"""Devices given to containers, and which devices kubelet prefers by NUMA affinity. Pure.

Affinity has the scope ``container``; memory and CPUs do not count, since the fake kubelet manages none.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kybernate.pb import deviceplugin_pb2 as pb


@dataclass(frozen=True, slots=True)
class Allocation:
    """Devices of one container and resource, and the plugin's cached answer."""

    pod_uid: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    response: pb.ContainerAllocateResponse
    nodes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """NUMA nodes by device, as the plugin listed them at the allocation; empty: it listed none."""


@dataclass(frozen=True, slots=True)
class ContainerRunOptions:
    """What the answers of all resources of a container add up to."""

    envs: Mapping[str, str]
    mounts: tuple[tuple[str, str], ...]
    """(container path, host path)."""
    devices: tuple[tuple[str, str], ...]
    """(container path, host path)."""
    conflicts: tuple[str, ...]
    """What two resources both set; the first one won."""


def merged(allocations: Iterable[Allocation]) -> ContainerRunOptions:
    """The first answer to set something wins; what the others wanted is only reported."""
    found: dict[str, dict[str, str]] = {"env": {}, "mount": {}, "device": {}}
    conflicts: list[str] = []
    for allocation in allocations:
        answer = allocation.response
        entries = [("env", name, value) for name, value in answer.envs.items()]
        entries += [("mount", mount.container_path, mount.host_path) for mount in answer.mounts]
        entries += [("device", device.container_path, device.host_path) for device in answer.devices]
        for what, key, value in entries:
            if found[what].setdefault(key, value) != value:
                conflicts.append(f"{what} {key}: {allocation.resource} wants {value!r}")
    mounts, devices = tuple(found["mount"].items()), tuple(found["device"].items())
    return ContainerRunOptions(found["env"], mounts, devices, tuple(conflicts))


AffinityPolicy = Literal["none", "best-effort", "restricted", "single-numa-node"]
Nodes = Mapping[str, Sequence[int]]
"""NUMA nodes by device; a device may have several, or none."""


@dataclass(frozen=True, slots=True)
class AffinityHint:
    """A set of NUMA nodes that can serve a request; preferred when no smaller set could."""

    nodes: frozenset[int] | None
    """None: any."""
    preferred: bool


@dataclass(frozen=True, slots=True)
class AffinityRequest:
    """What one container wants of one resource."""

    devices: Nodes
    """Every device of the resource, healthy or not."""
    available: frozenset[str]
    reusable: frozenset[str]
    """Devices of the pod's init containers."""
    count: int


def hints(request: AffinityRequest, machine: Iterable[int]) -> list[AffinityHint]:
    """Every set of NUMA nodes with enough devices. Nodes that the machine does not have are dropped."""
    if not any(request.devices.values()):
        return [AffinityHint(None, True)]  # no device says where it is: no preference
    if len(request.available | request.reusable) < request.count:
        return [AffinityHint(None, False)]
    nodes = sorted({node for own in request.devices.values() for node in own} & set(machine)) or sorted(machine)
    found: list[frozenset[int]] = []
    smallest = len(nodes)
    for size in range(1, len(nodes) + 1):
        for mask in map(frozenset, itertools.combinations(nodes, size)):
            inside = {device for device, own in request.devices.items() if mask.intersection(own)}
            if len(inside) >= request.count:
                smallest = min(smallest, size)
            placed = {device for device in request.reusable if request.devices.get(device)}
            if placed <= inside and len(inside & (request.available | placed)) >= request.count:
                found.append(mask)
    return [AffinityHint(mask, len(mask) == smallest) for mask in found] or [AffinityHint(None, False)]


def best_affinity(
    policy: AffinityPolicy, requests: Sequence[AffinityRequest], machine: Sequence[int]
) -> tuple[frozenset[int] | None, bool]:
    """Where the container's devices shall come from (None: anywhere), and whether it is admitted at all."""
    if policy == "none" or not requests:
        return None, True
    everywhere = frozenset(machine)
    offers = [hints(request, machine) for request in requests]
    if policy == "single-numa-node":
        offers = [[h for h in own if h.preferred and (h.nodes is None or len(h.nodes) == 1)] for own in offers]
    chosen = AffinityHint(everywhere, False)
    for together in itertools.product(*offers):
        nodes = everywhere.intersection(*(everywhere if hint.nodes is None else hint.nodes for hint in together))
        merged = AffinityHint(nodes, all(hint.preferred for hint in together))
        if nodes and _rank(merged) < _rank(chosen):
            chosen = merged
    return chosen.nodes, policy == "best-effort" or chosen.preferred


def split_by_affinity(
    devices: Nodes, available: Iterable[str], affinity: frozenset[int] | None
) -> tuple[set[str], set[str], set[str]]:
    """Available devices: aligned with the affinity, not aligned, without a NUMA node."""
    everyone = set(available)
    if affinity is None or not any(devices.values()):
        return set(), set(), everyone
    aligned = {device for device in everyone if affinity.intersection(devices.get(device, ()))}
    nowhere = {device for device in everyone if not devices.get(device)}
    return aligned, everyone - aligned - nowhere, nowhere


def _rank(hint: AffinityHint) -> tuple[bool, int, list[int]]:
    """Smaller is better: preferred before others, fewer nodes before more, lower numbers before higher."""
    nodes = hint.nodes or frozenset()
    return not hint.preferred, len(nodes), sorted(nodes, reverse=True)
