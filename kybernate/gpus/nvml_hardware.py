"""Hardware properties from NVML: names, PCI addresses, NUMA nodes, MIG profiles, and the links between GPUs."""

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate.machine import Link, PcieLevel

_NODE_SCOPE = 0
"""NVML_AFFINITY_SCOPE_NODE."""
_WORDS = 4
"""Number of 64-bit words of the NUMA node mask that are requested."""
_P2P_READ = 0
"""The wheel's NVML_P2P_CAPS_INDEX_READ is the tuple (0,) by a stray comma."""
_LEVELS = {
    0: PcieLevel.PIX,
    10: PcieLevel.PIX,
    20: PcieLevel.PXB,
    30: PcieLevel.PHB,
    40: PcieLevel.NODE,
    50: PcieLevel.SYS,
}
"""NVML_TOPOLOGY_*; INTERNAL (0) is two GPUs on one board."""


def pci_address(bus_id: str) -> str:
    """NVML's ``00000000:3B:00.0`` as sysfs names it: ``0000:3b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def mig_profile(attributes: Any, gpu_memory_bytes: int) -> str:
    """The profile's name from nvmlDeviceGetAttributes: ``3g.40gb``, or ``1c.3g.40gb`` for a part of an instance.

    The memory in the name is the share of the whole GPU's nominal memory in eighths, as NVIDIA names profiles; what an
    instance really has is a little less. The attributes do not contain the extensions of a name (``+me``).
    """
    gib = 1 << 30
    eighths = math.ceil((attributes.memorySizeMB << 20) * 8 / gpu_memory_bytes)
    memory = math.floor(eighths * math.ceil(gpu_memory_bytes / gib) / 8 + 0.5)
    slices, compute = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    part = f"{compute}c." if compute != slices else ""
    return f"{part}{slices}g.{memory}gb"


def numa_node_of(nvml: Any, handle: Any, device: Path) -> int | None:
    """The nearest NUMA node, from sysfs, else from NVML's memory affinity; None if unknown.

    nvmlDeviceGetNumaNodeId means another node: the one that the GPU's own memory forms on coherent machines.
    """
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return _affine_node(nvml, handle)
    return node if node >= 0 else None  # -1: the firmware does not report it


def _affine_node(nvml: Any, handle: Any) -> int | None:
    words = _answer(nvml, nvml.nvmlDeviceGetMemoryAffinity, handle, _WORDS, _NODE_SCOPE) or ()
    mask = sum(int(word) << (64 * number) for number, word in enumerate(words))
    return (mask & -mask).bit_length() - 1 if mask else None


@dataclass(frozen=True, slots=True)
class NvLinkPorts:
    """The NVLink side of one GPU."""

    address: str
    """Its PCI address."""
    peers: tuple[str, ...]
    """For each active link that does not go to a switch: the PCI address at its other end."""
    switch_links: int
    """Active links that go to NVSwitches."""
    clique: tuple[bytes, int] | None
    """Cluster and clique of the fabric; None if the driver reports none (A100, or the fabric is not up yet)."""


def bonded(a: NvLinkPorts, b: NvLinkPorts) -> tuple[int, bool]:
    """(number of NVLinks between two GPUs, True if they go through NVSwitches). Pure.

    The far end of a link to a switch is the switch, not a GPU. So two GPUs that have links to switches only reach each
    other with all the links that both have, unless the driver puts them into different cliques.
    """
    direct = min(a.peers.count(b.address), b.peers.count(a.address))
    if direct or a.peers or b.peers or not (a.switch_links and b.switch_links):
        return direct, False
    if a.clique is not None and b.clique is not None and a.clique != b.clique:
        return 0, False
    return min(a.switch_links, b.switch_links), True


def read_links(nvml: Any, handles: Sequence[Any]) -> tuple[Link, ...]:
    """Every pair of the GPUs that answer, once."""
    readings = []
    for handle in handles:
        try:
            readings.append((handle, nvml.nvmlDeviceGetUUID(handle), read_ports(nvml, handle)))
        except nvml.NVMLError:  # a lost GPU has no links
            continue
    found = []
    for (one, a, ports), (other, b, others) in itertools.combinations(readings, 2):
        count, switched = bonded(ports, others)
        p2p = _answer(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, _P2P_READ) == nvml.NVML_P2P_STATUS_OK
        found.append(Link(a, b, _level(nvml, one, other), count, switched, bool(p2p)))
    return tuple(found)


def read_ports(nvml: Any, handle: Any) -> NvLinkPorts:
    """The NVLink side of a GPU. Raises NVMLError when it does not answer."""
    peers, switch_links = [], 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _active(nvml, handle, link):
            continue
        kind = _answer(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switch_links += 1
        else:
            peers.append(pci_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
    address = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle).busId)
    return NvLinkPorts(address, tuple(peers), switch_links, _clique(nvml, handle) if switch_links else None)


def _active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
            return False  # no NVLink, or fewer links than the library's maximum
        raise


def _answer(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns; None where driver or machine do not report it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _clique(nvml: Any, handle: Any) -> tuple[bytes, int] | None:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except nvml.NVMLError:
        return None
    state = info.state & 0xFF  # the wheel reads 32 bits where the library writes 8
    if state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != nvml.NVML_SUCCESS:
        return None
    return bytes(info.clusterUuid), int(info.cliqueId)


def _level(nvml: Any, a: Any, b: Any) -> PcieLevel:
    ancestor = _answer(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b)
    return _LEVELS.get(ancestor, PcieLevel.SYS)  # some virtual machines do not report it: assume the farthest
