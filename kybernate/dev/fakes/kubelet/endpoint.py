"""One resource of a device plugin, as kubelet knows it, and what can go wrong with it."""

from dataclasses import dataclass, field
from typing import Protocol

from kybernate.pb import deviceplugin_pb2 as pb

HEALTHY = "Healthy"


class AdmissionError(Exception):
    """A pod cannot have its devices. Kubelet fails it for good with this text."""

    reason = "UnexpectedAdmissionError"

    @property
    def message(self) -> str:
        """As it stands in the pod's status."""
        return f"Pod was rejected: Allocate failed due to {self}, which is unexpected"


class TopologyAffinityError(AdmissionError):
    """No NUMA nodes satisfy the topology policy."""

    reason = "TopologyAffinityError"

    @property
    def message(self) -> str:
        """As it stands in the pod's status."""
        return f"Pod was rejected: {self}"


class GateError(Exception):
    """A container may not start now. Kubelet says why and asks again."""


class PluginCallError(Exception):
    """A plugin answered a call with an error; the text is what grpc-go would print."""


class Plugin(Protocol):
    """A registered plugin, as the device manager calls it. All raise PluginCallError."""

    async def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """GetPreferredAllocation for one container."""
        ...

    async def allocate(self, device_ids: list[str]) -> pb.AllocateResponse:
        """Allocate for one container."""
        ...

    async def pre_start(self, device_ids: list[str]) -> None:
        """PreStartContainer, with kubelet's 30 s limit."""
        ...


@dataclass
class Endpoint:
    """What kubelet knows about one resource."""

    plugin: Plugin | None = None
    options: pb.DevicePluginOptions | None = None
    """None after a restart of kubelet: then containers start without PreStartContainer, as with the real one."""
    stopped_at: float | None = None
    devices: dict[str, pb.Device] = field(default_factory=dict)
    healthy: set[str] = field(default_factory=set)

    def nodes(self) -> dict[str, tuple[int, ...]]:
        """NUMA nodes by device."""
        return {name: tuple(node.ID for node in device.topology.nodes) for name, device in self.devices.items()}
