"""The kubelet itself: pods wait for capacity, are admitted one after another, run, and are deleted."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate import files
from kybernate.dev.fakes.kubelet import checkpoint
from kybernate.dev.fakes.kubelet.device_manager import AdmissionError, DeviceManager, NumaTopology
from kybernate.dev.fakes.kubelet.manifest import PodSpec, lacking
from kybernate.dev.fakes.kubelet.plugins import Call, PluginServer
from kybernate.dev.fakes.kubelet.pod import Pod, Surroundings
from kybernate.dev.fakes.kubelet.pod_resources import PodResourcesServer
from kybernate.dev.fakes.kubelet.process import BackOff, free_address, host_address, rfc3339
from kybernate.dev.logs import bound_logs
from kybernate.logs import get_logger


@dataclass(frozen=True, slots=True)
class Options:
    """How this kubelet differs from one in a cluster. Wall seconds."""

    folder: Path
    """The device plugin folder, ``device-plugins`` in kubelet's folder; ``pod-resources`` is beside it."""
    run_dir: Path
    """Seat folders (made by the plugin), logs of pods under ``pods/``, their temporary files under ``tmp/``."""
    node: str = "node-0"
    node_address: str = "127.0.0.1"
    """The node's own address: hostIP of all pods, podIP of those with ``hostNetwork: true``."""
    speed: float = 1.0
    inject: Mapping[str, str] = field(default_factory=dict)
    """Put into every container, as a runtime's hook does; a pod's own variables come after it."""
    grace_seconds: float = 300.0
    """How long the capacity of a stopped plugin stays."""
    backoff: BackOff = field(default_factory=BackOff)
    readmit_seconds: float = 1.0
    """After a restart: how long plugins have to come back before pods that do not run are admitted again.

    Real kubelets give none, so that such pods often fail; 0 does the same.
    """
    topology: NumaTopology = field(default_factory=NumaTopology)
    seed: int | None = None
    cgroups: Path | None = None
    """A control group in which each container gets one, named by its id alone: as where kubelet runs with
    ``cgroupsPerQOS: false``. None: containers are processes, with ids of the fake's own."""


KEPT_LOGS = 5
"""Of so many former pods the logs are kept, also of those of a kubelet before."""
SCHEDULE_SECONDS = 0.5
SHUTDOWN_GRACE_SECONDS = 1.0
REMEMBERED_CALLS = 1000


class UnknownPodError(Exception):
    """There is no such pod or container; the text names what was asked for."""


class PodExistsError(Exception):
    """A pod of this name exists already."""


class Kubelet:
    """A node. ``async with`` serves plugins and PodResources; leaving it ends every pod."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.pods: list[Pod] = []
        self._rng = random.Random(options.seed)
        self.calls: deque[Call] = deque(maxlen=REMEMBERED_CALLS)
        """What plugins were asked, and what they answered."""
        self.devices = DeviceManager(
            self._active,
            grace_seconds=options.grace_seconds,
            rng=self._rng,
            memory=options.folder / checkpoint.NAME,
            topology=options.topology,
        )
        self._up = asyncio.Event()
        self._around = Surroundings(
            devices=self.devices,
            node=options.node,
            node_address=options.node_address,
            logs=options.run_dir / "pods",
            temporary=options.run_dir / "tmp",
            env={"KYB_SPEED": f"{options.speed:g}", **options.inject},
            backoff=options.backoff,
            address=self._address,
            up=self._up,
            cgroups=options.cgroups,
        )
        self._admission = asyncio.Lock()
        self.admitting: asyncio.Task[None] | None = None
        """The admission under way."""
        self._resuming: list[Pod] = []
        """Pods that wait for their admission after a restart."""
        self._wake = asyncio.Event()
        self._servers = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lingering: list[Pod] = []
        self._declared: dict[str, PodSpec] = {}
        self._coming: dict[str, PodSpec] = {}
        """Declared, and not made yet: a pod of this name may still be ending."""

    async def __aenter__(self) -> "Kubelet":
        shutil.rmtree(self._around.temporary, ignore_errors=True)  # of one that was killed
        self.devices.start()
        await self._serve()
        self._background(self._schedule(), "scheduler")
        self._background(bound_logs(self._around.logs, "*/*.log"), "logs")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ending = (*self.pods, *self._lingering)
        await asyncio.gather(*(pod.stop(SHUTDOWN_GRACE_SECONDS) for pod in ending))
        await self._servers.aclose()

    # --- pods by call -------------------------------------------------------------------------------------------

    def create(self, spec: PodSpec) -> Pod:
        """Take a pod in; it is placed and started in the background. Raises PodExistsError."""
        if any(pod.spec.key == spec.key for pod in self.pods):
            raise PodExistsError(f'pods "{spec.key}" already exists; delete it first')
        pod = Pod(spec, self._around)
        self.pods.append(pod)
        self._drop_logs()
        self._wake.set()
        return pod

    def declare(self, specs: Sequence[PodSpec]) -> None:
        """Make these the pods that files declare, as kubelet does with its static pods: what is gone from there ends,
        what has changed ends and is made anew. Pods that were made by ``create`` stay."""
        before, self._declared = self._declared, {spec.key: spec for spec in specs}
        for key, spec in before.items():
            if self._declared.get(key) != spec:
                self._coming.pop(key, None)
                with contextlib.suppress(UnknownPodError):
                    self.delete(spec.namespace, spec.name)
        self._coming |= {key: spec for key, spec in self._declared.items() if before.get(key) != spec}
        self._create_declared()

    def _create_declared(self) -> None:
        there = {pod.spec.key for pod in self.pods}
        for key in [key for key in self._coming if key not in there]:
            self.create(self._coming.pop(key))

    def find(self, namespace: str, name: str) -> Pod:
        """A pod by name. Raises UnknownPodError."""
        for pod in self.pods:
            if (pod.spec.namespace, pod.spec.name) == (namespace, name):
                return pod
        raise UnknownPodError(f'pods "{namespace}/{name}" not found')

    def delete(self, namespace: str, name: str, grace_seconds: float | None = None) -> Pod:
        """Begin to end a pod: SIGTERM, the grace period, SIGKILL; then it leaves the list."""
        pod = self.find(namespace, name)
        if not pod.deleted_at:
            pod.deleted_at = rfc3339()
            grace = pod.spec.grace_seconds if grace_seconds is None else grace_seconds
            self._background(self._end(pod, grace), f"delete {pod.spec.key}")
        return pod

    def force_delete(self, namespace: str, name: str, linger_seconds: float = 0.0) -> Pod:
        """The pod leaves the list at once and its devices are free, while its processes still run.

        They get SIGTERM after ``linger_seconds`` and SIGKILL after the pod's grace period.
        """
        pod = self.find(namespace, name)
        self.pods.remove(pod)
        self._lingering.append(pod)
        self._background(self._linger(pod, linger_seconds), f"force-delete {pod.spec.key}")
        self._wake.set()
        return pod

    def restart_container(
        self, namespace: str, name: str, container: str | None = None, signum: signal.Signals = signal.SIGKILL
    ) -> Pod:
        """End a container's process as if it had crashed; kubelet starts it again. Raises UnknownPodError."""
        pod = self.find(namespace, name)
        for candidate in pod.containers:
            if container in (None, candidate.spec.name) and candidate.process is not None:
                candidate.process.signal(signum)
                return pod
        raise UnknownPodError(f'pods "{pod.spec.key}" has no running container {container or ""}'.rstrip())

    async def restart(
        self, down_seconds: float = 0.0, readmit_after: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Kubelet itself restarts: connections break, sockets are wiped, plugins must come again; processes run on.

        What is in the middle of its admission is forgotten, except for devices that were given already.
        ``readmit_after`` is awaited before pods are admitted again, instead of the time in the options.
        """
        self._up.clear()
        if self.admitting is not None:
            self.admitting.cancel()
        async with self._admission:
            waiting = [pod for pod in self.pods if pod.bound and pod.failure is None and _unfinished(pod)]
            self._resuming = waiting
            for pod in waiting:
                await pod.cancel()
            await self._servers.aclose()
            await asyncio.sleep(down_seconds)
            self.devices.start()
            await self._serve()
        get_logger().info("kubelet.restarted")
        self._background(self._readmit(waiting, readmit_after or self._patience), "readmit")

    # --- views --------------------------------------------------------------------------------------------------

    def pod_list(self) -> dict[str, Any]:
        """v1 PodList of this node."""
        return {
            "apiVersion": "v1",
            "kind": "PodList",
            "metadata": {},
            "items": [pod.document() for pod in self.pods],
        }

    def node(self) -> dict[str, Any]:
        """v1 Node with capacity and allocatable of the extended resources."""
        capacity = self.devices.capacity()
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.options.node},
            "status": {
                "capacity": {name: str(total) for name, (total, _) in capacity.items()},
                "allocatable": {name: str(healthy) for name, (_, healthy) in capacity.items()},
            },
        }

    # --- inside -------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        plugins = PluginServer(self.options.folder, self.devices, self._wake.set, self.calls)
        await self._servers.enter_async_context(plugins)
        await self._servers.enter_async_context(
            PodResourcesServer(self.options.folder.parent, self.devices, lambda: list(self.pods))
        )
        self._up.set()

    async def _schedule(self) -> None:
        """The scheduler and the admission loop: pods that fit are bound and admitted, in order of creation."""
        while True:
            self._wake.clear()
            self._create_declared()
            for pod in list(self.pods):
                if not pod.bound and not pod.deleted_at and self._fits(pod):
                    pod.bound = True
                new = pod.bound and not pod.admitted and pod.failure is None and not pod.deleted_at
                if new and pod not in self._resuming:
                    await self._admit(pod)
            try:
                async with asyncio.timeout(SCHEDULE_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _fits(self, pod: Pod) -> bool:
        if pod.spec.node_name:
            return True
        allocatable = {name: healthy for name, (_, healthy) in self.devices.capacity().items()}
        bound = (other.spec for other in self.pods if other.bound and other.active)
        pod.unschedulable = lacking(pod.spec, bound, allocatable)
        return not pod.unschedulable

    async def _admit(self, pod: Pod, running: tuple[str, ...] | None = None) -> None:
        """One at a time, as in kubelet's sync loop: a slow plugin holds up everybody.

        ``running``: after a restart, the containers that need nothing.
        """
        async with self._admission:
            if running is None and pod in self._resuming:
                return  # kubelet restarted while this pod waited for its turn
            self.admitting = asyncio.create_task(self.devices.admit(pod.uid, pod.spec, running or ()))
            try:
                await self.admitting
            except AdmissionError as error:
                pod.fail(error.reason, error.message)
                get_logger().warning("kubelet.pod_rejected", pod=pod.spec.key, reason=str(error))
                self._background(pod.stop(pod.spec.grace_seconds), f"end rejected {pod.spec.key}")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                get_logger().warning("kubelet.admission_cut_short", pod=pod.spec.key)
            else:
                pod.start()
            finally:
                self.admitting = None

    async def _patience(self) -> None:
        await asyncio.sleep(self.options.readmit_seconds)

    async def _readmit(self, pods: list[Pod], after: Callable[[], Awaitable[object]]) -> None:
        """Pods that do not run are admitted again; without their plugin and devices they fail for good."""
        await after()
        for pod in pods:
            if self._resuming is not pods:
                return  # kubelet restarted once more
            if pod in self.pods and not pod.deleted_at:
                await self._admit(pod, tuple(c.spec.name for c in pod.containers if c.process is not None or c.done))
        if self._resuming is pods:
            self._resuming = []

    async def _end(self, pod: Pod, grace_seconds: float) -> None:
        async with self._admission:  # not in the middle of its admission
            pass
        await pod.stop(grace_seconds)
        if pod in self.pods:
            self.pods.remove(pod)
        self._wake.set()

    async def _linger(self, pod: Pod, linger_seconds: float) -> None:
        await pod.cancel()
        await asyncio.sleep(linger_seconds)
        await pod.stop(pod.spec.grace_seconds)
        self._lingering.remove(pod)

    def _drop_logs(self) -> None:
        """Keep the folders of logs of all pods that are there, and of the last ones that were."""
        there = {pod.uid for pod in (*self.pods, *self._lingering)}
        former = [one for one in self._around.logs.glob("*_*") if one.name.rpartition("_")[2] not in there]
        for folder in sorted(former, key=lambda one: one.stat().st_mtime, reverse=True)[KEPT_LOGS:]:
            shutil.rmtree(folder, ignore_errors=True)

    def _active(self) -> set[str]:
        return {pod.uid for pod in self.pods if pod.active}

    def _address(self, spec: PodSpec) -> str:
        if spec.host_network:
            return host_address(self.options.node_address, spec.ports)
        return free_address(spec.ports, self._rng)

    def _background(self, job: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(job, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("kubelet.job_failed", job=task.get_name(), exc_info=task.exception())


def _unfinished(pod: Pod) -> bool:
    return any(container.process is None and not container.done for container in pod.containers)


def write_address(folder: Path, url: str) -> None:
    """Tell others of this stack where HTTP is: ``<folder>/kubelet.json``, written in one step."""
    files.replace(folder / "kubelet.json", json.dumps({"url": url, "pid": os.getpid()}), durable=False)
