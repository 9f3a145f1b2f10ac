"""Who else sells this node's GPUs. Two that sell the same memory end in out-of-memory, so one has to yield.

``conflict`` is pure; ``Neighbours`` asks the API server again and again and remembers the answer.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kybernate.kube import Kube, KubeError
from kybernate.logs import get_logger

CHECK_SECONDS = 15.0
DRA_DRIVER = "gpu.nvidia.com"
"""The driver that sells GPUs; ``compute-domain.nvidia.com`` sells none."""

_PLATFORMS: tuple[tuple[str, str], ...] = (
    ("cloud.google.com/gke-accelerator", "GKE: kubectl label node {node} gke-no-default-nvidia-gpu-device-plugin=true"),
    (
        "nvidia.com/gpu.deploy.operands",
        "GPU operator: kubectl label node {node} --overwrite nvidia.com/gpu.deploy.device-plugin=false, "
        "or devicePlugin.enabled=false in its ClusterPolicy",
    ),
    (
        "nvidia.com/gpu.deploy.device-plugin",
        "GPU operator: kubectl label node {node} --overwrite nvidia.com/gpu.deploy.device-plugin=false, "
        "or devicePlugin.enabled=false in its ClusterPolicy",
    ),
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
    """Who else offers this node's GPUs, and what to do about it; None when nobody does. Pure."""
    meta, status = node.get("metadata") or {}, node.get("status") or {}
    name, labels = str(meta.get("name", "")), meta.get("labels") or {}
    offered = {
        resource: quantity
        for resource, quantity in (status.get("allocatable") or {}).items()
        if resource.startswith(("nvidia.com/gpu", "nvidia.com/mig-")) and _positive(quantity)
    }
    if offered:
        what = ", ".join(f"{resource}: {quantity}" for resource, quantity in sorted(offered.items()))
        remedy = next((text for label, text in _PLATFORMS if label in labels), _ANYWHERE).format(node=name)
        return f"node {name} offers {what}, which is the same GPU memory as our seats; {remedy}"
    drivers = [s for s in slices if (s.get("spec") or {}).get("driver") == DRA_DRIVER]
    if any((s.get("spec") or {}).get("devices") for s in drivers):
        return f"NVIDIA's DRA driver ({DRA_DRIVER}) offers the GPUs of node {name}; {_DRA_REMEDY}"
    return None


def _positive(quantity: object) -> bool:
    return str(quantity).strip() not in ("", "0")


@dataclass
class Neighbours:
    """What the API server says about this node, as of the last look."""

    kube: Kube | None
    """None: not in a cluster."""
    node: str
    seconds: float = CHECK_SECONDS
    conflict: str | None = None
    """Who else sells these GPUs; None: nobody, as far as is known."""
    unchecked: str | None = "not looked yet"
    """Why nobody could be asked; None when the last look succeeded."""
    _looked: asyncio.Event = field(default_factory=asyncio.Event)

    async def look(self) -> None:
        """Ask once. Without an answer the last one stands."""
        before = self.conflict, self.unchecked
        try:
            if self.kube is None:
                raise KubeError("this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set)")
            node = await self.kube.node(self.node)
            self.conflict = conflict(node, await self.kube.resource_slices(self.node))
            self.unchecked = None
        except KubeError as error:
            self.unchecked = str(error)
        if (self.conflict, self.unchecked) != before:
            self._say()
        self._looked.set()

    async def watch(self) -> NoReturn:
        """Ask again and again."""
        while True:
            await self.look()
            await asyncio.sleep(self.seconds)

    async def looked(self) -> None:
        """Until the first look is over, whatever it found."""
        await self._looked.wait()

    def _say(self) -> None:
        if self.conflict is not None:
            get_logger().error("plugin.gpus_sold_twice", reason=self.conflict)
        elif self.unchecked is not None:
            text = "nobody could be asked whether NVIDIA's device plugin or DRA driver offers these GPUs, too"
            get_logger().warning("plugin.neighbours_unchecked", meaning=text, reason=self.unchecked)
        else:
            get_logger().info("plugin.sells_alone")
