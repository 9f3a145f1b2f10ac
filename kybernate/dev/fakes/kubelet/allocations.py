"""What containers were given, and what that adds up to when one of them starts. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
    """NUMA nodes by device, as the plugin listed them when the device was given; none: it said none."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the answers of all resources of a container add up to."""

    envs: Mapping[str, str]
    mounts: tuple[tuple[str, str], ...]
    """(container path, host path)."""
    devices: tuple[tuple[str, str], ...]
    """(container path, host path)."""
    conflicts: tuple[str, ...]
    """What two resources both set; the first one won."""


def merged(allocations: Iterable[Allocation]) -> RunOptions:
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
    return RunOptions(found["env"], mounts, devices, tuple(conflicts))
