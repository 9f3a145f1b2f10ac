"""Kubelet's device manager: devices by resource, allocations, and the answers of device plugins.

Follows the device manager of Kubernetes 1.36, oddities included, since plugins must live with them: a stopped endpoint
keeps its capacity for a grace period; allocations survive a restart of kubelet in its checkpoint, but plugins and
their options are unknown until they register again.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kybernate.dev.fakes.kubelet import checkpoint
from kybernate.dev.fakes.kubelet.allocations import (
    AffinityPolicy,
    AffinityRequest,
    Allocation,
    ContainerRunOptions,
    best_affinity,
    merged,
    split_by_affinity,
)
from kybernate.dev.fakes.kubelet.manifest import ContainerSpec, PodSpec
from kybernate.logs import get_logger
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


@dataclass(frozen=True, slots=True)
class NumaTopology:
    """The machine's NUMA nodes and kubelet's ``--topology-manager-policy``."""

    policy: AffinityPolicy = "none"
    nodes: tuple[int, ...] = (0, 1)


@dataclass(frozen=True, slots=True)
class _Want:
    """One container's claim on one resource."""

    pod_uid: str
    container: str
    resource: str
    count: int
    reusable: frozenset[str]
    """Devices of the pod's init containers."""
    nodes: frozenset[int] | None
    """NUMA nodes to take them from; None: any."""


class DeviceManager:
    """Endpoints and allocations. One task at a time may call ``admit``."""

    def __init__(
        self,
        active: Callable[[], set[str]],
        *,
        grace_seconds: float = 300.0,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.monotonic,
        memory: Path | None = None,
        topology: NumaTopology | None = None,
    ) -> None:
        self._active = active
        """UIDs of the pods that are not over; the devices of others are free."""
        self._grace_seconds = grace_seconds
        self._rng = rng or random.Random()
        self._now = now
        self._memory = memory
        """The checkpoint; None: allocations are only kept in this object."""
        self._topology = topology or NumaTopology()
        self.endpoints: dict[str, Endpoint] = {}
        self.allocations: list[Allocation] = []
        self._reusable: dict[str, dict[str, set[str]]] = {}
        self._gone: set[str] = set()
        self._allocating = asyncio.Lock()

    # --- what plugins say ---------------------------------------------------------------------------------------

    def connected(self, resource: str, plugin: Plugin, options: pb.DevicePluginOptions) -> None:
        """A plugin registered. Its capacity appears with its first list of devices."""
        known = self.endpoints.get(resource, Endpoint())
        self.endpoints[resource] = Endpoint(plugin, options, None, known.devices, known.healthy)
        self._gone.discard(resource)

    def listed(self, resource: str, devices: list[pb.Device]) -> None:
        """A complete list replaces the one before."""
        endpoint = self.endpoints.get(resource)
        if endpoint is not None:
            endpoint.devices = {device.ID: device for device in devices}
            endpoint.healthy = {device.ID for device in devices if device.health == HEALTHY}
            self._remember()

    def disconnected(self, resource: str) -> None:
        """The stream of some client of this resource ended: all devices are unhealthy, the endpoint is stopped."""
        endpoint = self.endpoints.get(resource)
        if endpoint is not None:
            endpoint.healthy = set()
            endpoint.stopped_at = self._now()

    def start(self) -> None:
        """Kubelet starts: allocations and the names of resources come from its checkpoint, nothing else is known."""
        registered = list(self.endpoints)
        if self._memory is not None:
            try:
                self.allocations, registered = checkpoint.read(self._memory)
            except checkpoint.CheckpointError as error:
                get_logger().error("kubelet.checkpoint_unread", reason=str(error))
                self.allocations, registered = [], []
        self._reusable.clear()
        self._gone |= self.endpoints.keys() - set(registered)
        self.endpoints = {resource: Endpoint(stopped_at=self._now()) for resource in registered}

    def _remember(self) -> None:
        if self._memory is not None:
            healthy = {resource: endpoint.healthy for resource, endpoint in self.endpoints.items()}
            checkpoint.write(self._memory, self.allocations, healthy)

    # --- what the node has --------------------------------------------------------------------------------------

    def capacity(self) -> dict[str, tuple[int, int]]:
        """By resource: (capacity, allocatable). A resource whose grace period passed stays with (0, 0)."""
        for resource, endpoint in list(self.endpoints.items()):
            if endpoint.stopped_at is not None and self._now() - endpoint.stopped_at > self._grace_seconds:
                del self.endpoints[resource]
                self._gone.add(resource)
                self._remember()
        present = {name: (len(end.devices), len(end.healthy)) for name, end in self.endpoints.items()}
        return dict.fromkeys(self._gone, (0, 0)) | present

    def collect(self) -> None:
        """Free the devices of pods that are over. Kubelet does it lazily: at admissions and PodResources lists."""
        active = self._active()
        self.allocations = [entry for entry in self.allocations if entry.pod_uid in active]
        self._reusable = {uid: ids for uid, ids in self._reusable.items() if uid in active}

    def of(self, pod_uid: str, container: str) -> list[Allocation]:
        """Allocations of one container."""
        return [entry for entry in self.allocations if (entry.pod_uid, entry.container) == (pod_uid, container)]

    def health(self, pod_uid: str, container: str) -> list[dict[str, Any]]:
        """``allocatedResourcesStatus`` of a container. A device that no plugin lists any more counts as healthy."""
        return [
            {
                "name": allocation.resource,
                "resources": [
                    {"resourceID": device, "health": self._health(allocation.resource, device)}
                    for device in allocation.device_ids
                ],
            }
            for allocation in self.of(pod_uid, container)
        ]

    def _health(self, resource: str, device_id: str) -> str:
        device = self.endpoints.get(resource, Endpoint()).devices.get(device_id)
        return "Healthy" if device is None or device.health == HEALTHY else "Unhealthy"

    # --- admission ----------------------------------------------------------------------------------------------

    async def admit(self, pod_uid: str, pod: PodSpec, running: Iterable[str] = ()) -> None:
        """Give every container its devices, or raise AdmissionError.

        Containers that a restarted kubelet finds ``running`` have theirs, whatever became of their plugin. What was
        given before a failure is freed lazily, as ``collect`` is called.
        """
        for container in pod.containers:
            if container.name not in set(running):
                await self._admit(pod_uid, container)

    async def _admit(self, pod_uid: str, container: ContainerSpec) -> None:
        pools = self._reusable.setdefault(pod_uid, {})
        resources = [(name, count) for name, count in container.limits.items() if self._known(name)]
        self._rng.shuffle(resources)
        self.collect()
        nodes = self._nodes(pod_uid, container, resources)
        for resource, count in resources:
            pool = pools.setdefault(resource, set())
            wanted = _Want(pod_uid, container.name, resource, count, frozenset(pool), nodes)
            async with self._allocating:
                given = await self._allocate(wanted)
            if container.init and not container.sidecar:
                pool |= given  # an app container may have them once the init container is done
            else:
                pool -= given

    def _known(self, resource: str) -> bool:
        """Whether a device plugin offers it, or has offered it to a pod that is still there."""
        return resource in self.endpoints or any(entry.resource == resource for entry in self.allocations)

    def _nodes(self, pod_uid: str, container: ContainerSpec, resources: list[tuple[str, int]]) -> frozenset[int] | None:
        """What the topology manager says. Raises TopologyAffinityError."""
        had = {entry.resource: entry.device_ids for entry in self.of(pod_uid, container.name)}
        requests = []
        for resource, count in resources:
            endpoint = self.endpoints.get(resource, Endpoint())
            free = frozenset(had.get(resource) or endpoint.healthy - self._in_use(resource))
            reusable = frozenset() if resource in had else frozenset(self._reusable[pod_uid].get(resource, ()))
            requests.append(AffinityRequest(endpoint.nodes(), free, reusable, count))
        nodes, admitted = best_affinity(self._topology.policy, requests, self._topology.nodes)
        if not admitted:
            raise TopologyAffinityError("Resources cannot be allocated with Topology locality")
        return nodes

    def _in_use(self, resource: str) -> set[str]:
        return {device for entry in self.allocations if entry.resource == resource for device in entry.device_ids}

    async def _allocate(self, wanted: _Want) -> set[str]:
        resource = wanted.resource
        endpoint = self.endpoints.get(resource)
        had = next((a for a in self.of(wanted.pod_uid, wanted.container) if a.resource == resource), None)
        if endpoint is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        if not endpoint.healthy:
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if had is not None:
            if not endpoint.healthy.issuperset(had.device_ids):
                raise AdmissionError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            return set(had.device_ids)
        try:
            chosen = await self._choose(endpoint, wanted)
            if endpoint.plugin is None or endpoint.stopped_at is not None:
                raise AdmissionError(f"endpoint {resource} has been stopped")
            answer = await endpoint.plugin.allocate(chosen)
        except PluginCallError as error:
            raise AdmissionError(str(error)) from error
        if not answer.container_responses:
            raise AdmissionError(f"no containers return in allocation response of {resource}")
        nodes = {device: own for device, own in endpoint.nodes().items() if device in chosen}
        self.allocations.append(
            Allocation(
                wanted.pod_uid, wanted.container, resource, tuple(chosen), answer.container_responses[0], nodes=nodes
            )
        )
        self._remember()
        return set(chosen)

    async def _choose(self, endpoint: Endpoint, wanted: _Want) -> list[str]:
        """Which devices: of the pod's init containers, then aligned ones, then as the plugin prefers, then any."""
        chosen = self._some(wanted.reusable, wanted.count)
        if len(chosen) == wanted.count:
            return chosen
        available = endpoint.healthy - self._in_use(wanted.resource)
        needed = wanted.count - len(chosen)
        if len(available) < needed:
            raise AdmissionError(
                f"requested number of devices unavailable for {wanted.resource}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        aligned, elsewhere, nowhere = split_by_affinity(endpoint.nodes(), available, wanted.nodes)
        if needed < len(aligned):
            wished = await self._preferred(endpoint, wanted, aligned, chosen)
            stages = [wished & aligned, aligned]
        else:  # all that are aligned are taken without asking
            chosen += self._some(aligned, needed)
            wished = await self._preferred(endpoint, wanted, available, chosen) if len(chosen) < wanted.count else set()
            stages = [wished & available, elsewhere, nowhere]
        for stage in stages:
            chosen += self._some(stage - set(chosen), wanted.count - len(chosen))
        self._rng.shuffle(chosen)
        return chosen

    async def _preferred(self, endpoint: Endpoint, wanted: _Want, offered: set[str], chosen: list[str]) -> set[str]:
        if endpoint.options is None or not endpoint.options.get_preferred_allocation_available:
            return set()
        everyone = offered | set(chosen)
        try:
            if endpoint.plugin is None or endpoint.stopped_at is not None:
                raise PluginCallError(f"endpoint {wanted.resource} has been stopped")
            return set(await endpoint.plugin.preferred(self._some(everyone, len(everyone)), list(chosen), wanted.count))
        except PluginCallError as error:
            raise AdmissionError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error

    def _some(self, devices: Iterable[str], count: int) -> list[str]:
        """Up to ``count`` of them in no particular order, as from a Go map."""
        everyone = sorted(devices)
        return self._rng.sample(everyone, min(count, len(everyone)))

    # --- start of a container -----------------------------------------------------------------------------------

    async def gate(self, pod_uid: str, container: ContainerSpec) -> None:
        """PreStartContainer of every resource of the container. Raises GateError.

        A container of which kubelet remembers no devices (its checkpoint was lost) gets new ones, but only if no
        plugin wants PreStartContainer: that check comes first, and needs devices.
        """
        forgotten = False
        for resource in container.limits:
            if not self._known(resource):
                continue
            endpoint = self.endpoints.get(resource)
            if endpoint is None:
                raise GateError(f"endpoint not found in cache for a registered resource: {resource}")
            had = next((a for a in self.of(pod_uid, container.name) if a.resource == resource), None)
            forgotten |= had is None
            if endpoint.options is not None and endpoint.options.pre_start_required:
                if had is None:
                    raise GateError(
                        f"no devices found allocated in local cache for pod {pod_uid}, "
                        f"container {container.name}, resource {resource}"
                    )
                await self._pre_start(endpoint, had)
        if forgotten:
            try:
                await self._admit(pod_uid, container)
            except AdmissionError as error:
                raise GateError(str(error)) from error

    async def _pre_start(self, endpoint: Endpoint, allocation: Allocation) -> None:
        try:
            if endpoint.plugin is None or endpoint.stopped_at is not None:
                raise PluginCallError(f"endpoint {allocation.resource} has been stopped")
            await endpoint.plugin.pre_start(self._some(allocation.device_ids, len(allocation.device_ids)))
        except PluginCallError as error:
            raise GateError(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def run_options(self, pod_uid: str, container: str) -> ContainerRunOptions:
        """The cached answers of a container, merged: the first to set something wins, the rest is reported."""
        return merged(self.of(pod_uid, container))
