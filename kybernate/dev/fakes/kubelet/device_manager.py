"""What kubelet's device manager knows and decides: devices by resource, who has which, what the plugin answered.

Follows the device manager of Kubernetes 1.36, oddities included, since plugins must live with them: a stopped endpoint
keeps its capacity for a grace period; what was given survives a restart of kubelet in its checkpoint, but plugins and
their options are unknown until they register again.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.kubelet import affinity, checkpoint
from kybernate.dev.fakes.kubelet.allocations import Allocation, RunOptions, merged
from kybernate.dev.fakes.kubelet.endpoint import (
    HEALTHY,
    AdmissionError,
    Endpoint,
    GateError,
    Plugin,
    PluginCallError,
    TopologyAffinityError,
)
from kybernate.dev.fakes.kubelet.manifest import ContainerSpec, PodSpec
from kybernate.logs import get_logger
from kybernate.pb import deviceplugin_pb2 as pb


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine's NUMA nodes and kubelet's ``--topology-manager-policy``."""

    policy: affinity.Policy = "none"
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
        topology: Topology | None = None,
    ) -> None:
        self._active = active
        """UIDs of the pods that are not over; the devices of others are free."""
        self._grace_seconds = grace_seconds
        self._rng = rng or random.Random()
        self._now = now
        self._memory = memory
        """The checkpoint; None: allocations are only kept in this object."""
        self._topology = topology or Topology()
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
        """``allocatedResourcesStatus`` of a container. A device that nobody lists any more counts as healthy."""
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
            requests.append(affinity.Request(endpoint.nodes(), free, reusable, count))
        nodes, admitted = affinity.best(self._topology.policy, requests, self._topology.nodes)
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
        aligned, elsewhere, nowhere = affinity.split(endpoint.nodes(), available, wanted.nodes)
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

    def run_options(self, pod_uid: str, container: str) -> RunOptions:
        """The cached answers of a container, merged: the first to set something wins, the rest is reported."""
        return merged(self.of(pod_uid, container))
