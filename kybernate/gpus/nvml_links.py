"""How GPUs reach each other, from NVML: NVLink, NVSwitch, PCIe, peer to peer."""

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kybernate.gpus.nvml_names import pci_address, text
from kybernate.machine import Link, PcieLevel

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


@dataclass(frozen=True, slots=True)
class Ports:
    """The NVLink side of one GPU."""

    address: str
    """Its PCI address."""
    peers: tuple[str, ...]
    """For each active link that does not go to a switch: the PCI address at its other end."""
    switch_links: int
    """Active links that go to NVSwitches."""
    clique: tuple[bytes, int] | None
    """Cluster and clique of the fabric; None where the driver knows of none (A100, or the fabric is not up yet)."""


def bonded(a: Ports, b: Ports) -> tuple[int, bool]:
    """How many NVLinks two GPUs have between them, and whether they go through NVSwitches. Pure.

    At the far end of a link to a switch stands the switch, not a GPU. So: GPUs that have links to switches only, and
    that the driver does not put into different cliques, reach each other with all the links that both have.
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
            readings.append((handle, text(nvml.nvmlDeviceGetUUID(handle)), read_ports(nvml, handle)))
        except nvml.NVMLError:  # lost: no pairs with it
            continue
    found = []
    for (one, a, ports), (other, b, others) in itertools.combinations(readings, 2):
        count, switched = bonded(ports, others)
        found.append(Link(a, b, _level(nvml, one, other), count, switched, _p2p(nvml, one, other)))
    return tuple(found)


def read_ports(nvml: Any, handle: Any) -> Ports:
    """The NVLink side of a GPU. Raises NVMLError when it does not answer."""
    peers, switch_links = [], 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _active(nvml, handle, link):
            continue
        if _to_switch(nvml, handle, link):
            switch_links += 1
        else:
            peers.append(pci_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
    address = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle).busId)
    return Ports(address, tuple(peers), switch_links, _clique(nvml, handle) if switch_links else None)


def _active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
            return False  # no NVLink, or fewer links than the library's most
        raise


def _to_switch(nvml: Any, handle: Any, link: int) -> bool:
    try:
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError:  # unknown to old drivers
        return False
    return bool(kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)


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
    try:
        return _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), PcieLevel.SYS)
    except nvml.NVMLError:  # virtual machines do not say; the farthest is the safe guess
        return PcieLevel.SYS


def _p2p(nvml: Any, a: Any, b: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(a, b, _P2P_READ) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False
