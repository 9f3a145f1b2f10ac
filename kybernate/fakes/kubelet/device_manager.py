"""What kubelet's device manager knows and decides: devices by resource, who has which, what the plugin answered.

Follows the device manager of Kubernetes 1.36, oddities included, since plugins must live with them:
a client is disconnected *by name*, so that the end of an old stream disconnects its successor; a stopped endpoint keeps
its capacity for a grace period; after a restart of kubelet the options of a plugin are unknown until it registers.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kybernate.fakes.kubelet.manifest import ContainerSpec, PodSpec
from kybernate.pb import deviceplugin_pb2 as pb

HEALTHY = "Healthy"


class AdmissionError(Exception):
    """A pod cannot have its devices. Kubelet fails it for good with this text."""


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


@dataclass(frozen=True, slots=True)
class Allocation:
    """Devices of one container and resource, and the plugin's cached answer."""

    pod_uid: str
    container: str
    resource: str
    device_ids: tuple[str, ...]
    response: pb.ContainerAllocateResponse


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


class DeviceManager:
    """Endpoints and allocations. One task at a time may call ``admit``."""

    def __init__(
        self,
        active: Callable[[], set[str]],
        *,
        grace_seconds: float = 300.0,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._active = active
        """UIDs of the pods that are not over; the devices of others are free."""
        self._grace_seconds = grace_seconds
        self._rng = rng or random.Random()
        self._now = now
        self.endpoints: dict[str, Endpoint] = {}
        self.allocations: list[Allocation] = []
        self._reusable: dict[str, dict[str, set[str]]] = {}
        self._gone: set[str] = set()

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

    def disconnected(self, resource: str) -> None:
        """The stream of some client of this resource ended: all devices are unhealthy, the endpoint is stopped."""
        endpoint = self.endpoints.get(resource)
        if endpoint is not None:
            endpoint.healthy = set()
            endpoint.stopped_at = self._now()

    def restart(self) -> None:
        """Kubelet starts again from its checkpoint: allocations stay, plugins and their devices are unknown."""
        for resource in self.endpoints:
            self.endpoints[resource] = Endpoint(stopped_at=self._now())

    # --- what the node has --------------------------------------------------------------------------------------

    def capacity(self) -> dict[str, tuple[int, int]]:
        """By resource: (capacity, allocatable). A resource whose grace period passed stays with (0, 0)."""
        for resource, endpoint in list(self.endpoints.items()):
            if endpoint.stopped_at is not None and self._now() - endpoint.stopped_at > self._grace_seconds:
                del self.endpoints[resource]
                self._gone.add(resource)
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

    # --- admission ----------------------------------------------------------------------------------------------

    async def admit(self, pod_uid: str, pod: PodSpec) -> None:
        """Give every container its devices, or raise AdmissionError.

        What was given before a failure is freed lazily, as ``collect`` is called.
        """
        reusable = self._reusable.setdefault(pod_uid, {})
        for container in pod.containers:
            resources = list(container.limits.items())
            self._rng.shuffle(resources)
            self.collect()
            for resource, count in resources:
                if resource not in self.endpoints and not any(a.resource == resource for a in self.allocations):
                    continue  # no device plugin resource, as far as kubelet knows
                pool = reusable.setdefault(resource, set())
                given = await self._allocate(pod_uid, container, resource, count, pool)
                if container.init and not container.sidecar:
                    pool |= given  # an app container may have them once the init container is done
                else:
                    pool -= given

    async def _allocate(
        self, pod_uid: str, container: ContainerSpec, resource: str, count: int, reusable: set[str]
    ) -> set[str]:
        endpoint = self.endpoints.get(resource)
        had = next((a for a in self.of(pod_uid, container.name) if a.resource == resource), None)
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
        if endpoint.plugin is None or endpoint.stopped_at is not None:
            raise AdmissionError(f"endpoint {resource} has been stopped")
        try:
            chosen = await self._choose(endpoint, endpoint.plugin, resource, count, reusable)
            answer = await endpoint.plugin.allocate(chosen)
        except PluginCallError as error:
            raise AdmissionError(str(error)) from error
        if not answer.container_responses:
            raise AdmissionError(f"no containers return in allocation response of {resource}")
        self.allocations.append(
            Allocation(pod_uid, container.name, resource, tuple(chosen), answer.container_responses[0])
        )
        return set(chosen)

    async def _choose(
        self, endpoint: Endpoint, plugin: Plugin, resource: str, count: int, reusable: set[str]
    ) -> list[str]:
        """Which devices: first those of the pod's init containers, then as the plugin prefers, then any."""
        chosen = self._some(reusable, count)
        if len(chosen) == count:
            return chosen
        in_use = {device for a in self.allocations if a.resource == resource for device in a.device_ids}
        available = endpoint.healthy - in_use
        needed = count - len(chosen)
        if len(available) < needed:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        preferred: list[str] = []
        if endpoint.options is not None and endpoint.options.get_preferred_allocation_available:
            offered = self._some(available | set(chosen), len(available) + len(chosen))
            preferred = await plugin.preferred(offered, chosen, count)
        wished = (available & set(preferred)) - set(chosen)
        chosen += self._some(wished, needed)
        chosen += self._some(available - set(chosen), count - len(chosen))
        self._rng.shuffle(chosen)
        return chosen

    def _some(self, devices: set[str], count: int) -> list[str]:
        """Up to ``count`` of them in no particular order, as from a Go map."""
        return self._rng.sample(sorted(devices), min(count, len(devices)))

    # --- start of a container -----------------------------------------------------------------------------------

    async def gate(self, pod_uid: str, container: str) -> None:
        """PreStartContainer of every resource of the container. Raises GateError."""
        for allocation in self.of(pod_uid, container):
            endpoint = self.endpoints.get(allocation.resource)
            if endpoint is None:
                raise GateError(f"endpoint not found in cache for a registered resource: {allocation.resource}")
            if endpoint.options is None or not endpoint.options.pre_start_required:
                continue
            if endpoint.plugin is None or endpoint.stopped_at is not None:
                error: object = f"endpoint {allocation.resource} has been stopped"
            else:
                try:
                    await endpoint.plugin.pre_start(self._some(set(allocation.device_ids), len(allocation.device_ids)))
                    continue
                except PluginCallError as refusal:
                    error = refusal
            raise GateError(f"device plugin PreStartContainer rpc failed with err: {error}")

    def run_options(self, pod_uid: str, container: str) -> RunOptions:
        """The cached answers of a container, merged: the first to set something wins, the rest is reported."""
        merged: dict[str, dict[str, str]] = {"env": {}, "mount": {}, "device": {}}
        conflicts: list[str] = []
        for allocation in self.of(pod_uid, container):
            answer = allocation.response
            entries = [("env", name, value) for name, value in answer.envs.items()]
            entries += [("mount", mount.container_path, mount.host_path) for mount in answer.mounts]
            entries += [("device", device.container_path, device.host_path) for device in answer.devices]
            for what, key, value in entries:
                if merged[what].setdefault(key, value) != value:
                    conflicts.append(f"{what} {key}: {allocation.resource} wants {value!r}")
        envs, mounts, devices = merged["env"], merged["mount"], merged["device"]
        return RunOptions(envs, tuple(mounts.items()), tuple(devices.items()), tuple(conflicts))
