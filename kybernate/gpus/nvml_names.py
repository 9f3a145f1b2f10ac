"""How NVML names things, made what the rest of the machine calls them."""

import math
from pathlib import Path
from typing import Any

_NODE_SCOPE = 0
"""NVML_AFFINITY_SCOPE_NODE."""
_WORDS = 4
"""Words of 64 NUMA nodes that are asked for."""


def text(value: str | bytes) -> str:
    """Some releases of nvidia-ml-py answer bytes, some str."""
    return value.decode() if isinstance(value, bytes) else value


def pci_address(bus_id: str | bytes) -> str:
    """NVML's ``00000000:3B:00.0`` as sysfs names it: ``0000:3b:00.0``."""
    domain, _, rest = text(bus_id).partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def mig_profile(attributes: Any, gpu_memory_bytes: int) -> str:
    """The profile's name from nvmlDeviceGetAttributes: ``3g.40gb``, or ``1c.3g.40gb`` for a part of an instance.

    The memory in the name is the share of the whole GPU's nominal memory in eighths, as NVIDIA names profiles; what an
    instance really has is a little less. Extensions of a name (``+me``) are not told by the attributes.
    """
    gib = 1 << 30
    eighths = math.ceil((attributes.memorySizeMB << 20) * 8 / gpu_memory_bytes)
    memory = math.floor(eighths * math.ceil(gpu_memory_bytes / gib) / 8 + 0.5)
    slices, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    part = f"{compute}c." if compute != slices else ""
    return f"{part}{slices}g.{memory}gb"


def numa_node_of(nvml: Any, handle: Any, device: Path) -> int | None:
    """The nearest NUMA node: what sysfs says of the PCI device, else NVML's memory affinity; None when unknown.

    nvmlDeviceGetNumaNodeId is something else: the node that the GPU's own memory forms on coherent machines.
    """
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return _affine_node(nvml, handle)
    return node if node >= 0 else None  # the kernel says -1 where the firmware says nothing


def _affine_node(nvml: Any, handle: Any) -> int | None:
    try:
        words = nvml.nvmlDeviceGetMemoryAffinity(handle, _WORDS, _NODE_SCOPE)
    except nvml.NVMLError:
        return None
    mask = sum(int(word) << (64 * number) for number, word in enumerate(words))
    return (mask & -mask).bit_length() - 1 if mask else None
