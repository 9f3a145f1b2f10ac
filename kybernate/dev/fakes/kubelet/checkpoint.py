"""``kubelet_internal_checkpoint``: what kubelet's device manager remembers over its own restarts.

The JSON has the real file's shape. The checksum is a CRC-32 of the data as JSON, where the real one is a hash of Go's
print-out of it: neither kubelet reads the other's file.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from kybernate import files
from kybernate.dev.fakes.kubelet.allocations import Allocation
from kybernate.pb import deviceplugin_pb2 as pb

NAME = "kubelet_internal_checkpoint"
NO_NODE = "-1"
"""Stands for devices whose plugin listed no NUMA node."""


class CheckpointError(Exception):
    """The file cannot be used; kubelet says so and starts as if there was none."""


def write(path: Path, allocations: Iterable[Allocation], healthy: Mapping[str, Iterable[str]]) -> None:
    """Replace the file: every allocation, and the healthy devices by resource. Blocking."""
    data = {
        "PodDeviceEntries": [_entry(allocation) for allocation in allocations],
        "RegisteredDevices": {resource: sorted(devices) for resource, devices in healthy.items()},
    }
    files.replace(path, json.dumps({"Data": data, "Checksum": _checksum(data)}), durable=False)


def read(path: Path) -> tuple[list[Allocation], list[str]]:
    """The allocations, and the resources that were registered; both empty without a file. Raises CheckpointError."""
    try:
        document = json.loads(path.read_text())
        if document["Checksum"] != _checksum(document["Data"]):
            raise CheckpointError(f"{path}: checkpoint is corrupted")
        allocations = [_allocation(entry) for entry in document["Data"]["PodDeviceEntries"] or ()]
        return allocations, list(document["Data"]["RegisteredDevices"])
    except FileNotFoundError:
        return [], []
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error, DecodeError) as error:
        raise CheckpointError(f"{path}: checkpoint is corrupted: {error!r}") from error


def _entry(allocation: Allocation) -> dict[str, Any]:
    by_node: dict[str, list[str]] = {}
    for device in allocation.device_ids:
        for node in allocation.nodes.get(device, ()) or (NO_NODE,):
            by_node.setdefault(str(node), []).append(device)
    return {
        "PodUID": allocation.pod_uid,
        "ContainerName": allocation.container,
        "ResourceName": allocation.resource,
        "DeviceIDs": by_node,
        "AllocResp": base64.b64encode(allocation.response.SerializeToString()).decode(),
    }


def _allocation(entry: Mapping[str, Any]) -> Allocation:
    nodes: dict[str, tuple[int, ...]] = {}
    for node, devices in entry["DeviceIDs"].items():
        for device in devices:
            nodes[device] = nodes.get(device, ()) + (() if node == NO_NODE else (int(node),))
    response = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
    return Allocation(
        entry["PodUID"], entry["ContainerName"], entry["ResourceName"], tuple(nodes), response, nodes=nodes
    )


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
