"""Other components that advertise this node's GPUs: the same memory given out twice ends in out-of-memory.

``conflict`` is pure; ``Neighbours`` watches the Node and its ResourceSlices at the API server.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kybernate.clock import wait_for
from kybernate.kube import Kube, KubeError, Mirror
from kybernate.logs import get_logger

CHECK_SECONDS = 15.0
NODES = "/api/v1/nodes"
SLICES = tuple(f"/apis/resource.k8s.io/{version}/resourceslices" for version in ("v1", "v1beta2", "v1beta1"))
"""Newest first; a cluster without Dynamic Resource Allocation serves none."""
DRA_DRIVER = "gpu.nvidia.com"
"""The driver that advertises GPUs; ``compute-domain.nvidia.com`` advertises none."""

_GPU_OPERATOR = (
    "GPU operator: kubectl label node {node} --overwrite nvidia.com/gpu.deploy.device-plugin=false, "
    "or devicePlugin.enabled=false in its ClusterPolicy"
)
_PLATFORMS: tuple[tuple[str, str], ...] = (
    ("cloud.google.com/gke-accelerator", "GKE: kubectl label node {node} gke-no-default-nvidia-gpu-device-plugin=true"),
    ("nvidia.com/gpu.deploy.operands", _GPU_OPERATOR),
    ("nvidia.com/gpu.deploy.device-plugin", _GPU_OPERATOR),
    (
        "eks.amazonaws.com/nodegroup",
        "EKS: keep the nvidia-device-plugin DaemonSet off this node with a node selector or affinity; on Bottlerocket "
        "also switch its own device plugin off in the node's settings",
    ),
    (
        "kubernetes.azure.com/cluster",
        "AKS: keep the nvidia-device-plugin DaemonSet off this node with a node selector or affinity",
    ),
)
_ANYWHERE = (
    "keep NVIDIA's device plugin off this node, for example with a node selector in its DaemonSet (GPU operator: "
    "kubectl label node {node} --overwrite nvidia.com/gpu.deploy.device-plugin=false)"
)
_DRA_REMEDY = (
    "keep NVIDIA's DRA driver off this node (its chart: resources.gpus.enabled=false, or a node selector for its "
    "kubelet plugin)"
)


def conflict(node: Mapping[str, Any], slices: Iterable[Mapping[str, Any]]) -> str | None:
    """Which component offers this node's GPUs beside the plugin, and the remedy; None when there is none. Pure."""
    meta, status = node.get("metadata") or {}, node.get("status") or {}
    name, labels = str(meta.get("name", "")), meta.get("labels") or {}
    offered = {
        resource: quantity
        for resource, quantity in (status.get("allocatable") or {}).items()
        if resource.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and str(quantity) != "0"
    }
    if offered:
        what = ", ".join(f"{resource}: {quantity}" for resource, quantity in sorted(offered.items()))
        remedy = next((text for label, text in _PLATFORMS if label in labels), _ANYWHERE).format(node=name)
        return f"node {name} offers {what}, which is the same GPU memory as our seats; {remedy}"
    drivers = [s for s in slices if (s.get("spec") or {}).get("driver") == DRA_DRIVER]
    if any((s.get("spec") or {}).get("devices") for s in drivers):
        return f"NVIDIA's DRA driver ({DRA_DRIVER}) offers the GPUs of node {name}; {_DRA_REMEDY}"
    return None


@dataclass
class Neighbours:
    """Other components that advertise this node's GPUs, as the API server shows them; kept current by ``watch``."""

    kube: Kube | None
    """None: not in a cluster."""
    node: str
    conflict: str | None = None
    """Which component advertises these GPUs, and the remedy; None: none, as far as is known."""
    unchecked: str | None = "not checked yet"
    """Why the API server cannot be read; None while its watch is open."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    checked: asyncio.Event = field(default_factory=asyncio.Event)
    """The first check is over, whatever its result."""

    async def watch(self) -> NoReturn:
        """Check now, after each change of the Node and of its ResourceSlices, and now and then."""
        async with asyncio.TaskGroup() as group:
            mirrors = self._mirrors()
            for mirror in mirrors:
                group.create_task(mirror.run(), name="watch neighbours")
            while True:
                self._changed.clear()
                await self._check(*mirrors)
                await wait_for(self._changed, CHECK_SECONDS)

    def _mirrors(self) -> tuple[Mirror, ...]:
        if self.kube is None:
            return ()
        node = Mirror(self.kube, NODES, {"fieldSelector": f"metadata.name={self.node}"}, on_change=self._changed.set)
        here = {"fieldSelector": f"spec.nodeName={self.node}"}
        slices = Mirror(self.kube, SLICES[0], here, others=SLICES[1:], on_change=self._changed.set)
        return node, slices

    async def _check(self, *mirrors: Mirror) -> None:
        """Compare with what the API server shows. While it cannot be read, the last result stands."""
        before = self.conflict, self.unchecked
        try:
            if not mirrors:
                raise KubeError("this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
            node, slices = mirrors
            found = list((await node.current()).values())
            if not found:
                raise KubeError(f"the API server knows no node {self.node!r}; set KYB_NODE from spec.nodeName")
            self.conflict = conflict(found[0], (await slices.current()).values())
            self.unchecked = None
        except KubeError as error:
            self.unchecked = str(error)
        if (self.conflict, self.unchecked) != before:
            self._log()
        self.checked.set()

    def _log(self) -> None:
        if self.conflict is not None:
            get_logger().error("neighbours.conflict_found", reason=self.conflict)
        elif self.unchecked is not None:
            text = "it is not known whether NVIDIA's device plugin or DRA driver advertises these GPUs, too"
            get_logger().warning("neighbours.check_failed", meaning=text, reason=self.unchecked)
        else:
            get_logger().info("neighbours.none_found")
