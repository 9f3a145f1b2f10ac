"""One pod after its admission: start gate, processes, crash back-off, end. And its v1 status."""

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate import run
from kybernate.dev.fakes.kubelet.allocations import ContainerRunOptions
from kybernate.dev.fakes.kubelet.device_manager import DeviceManager, GateError
from kybernate.dev.fakes.kubelet.manifest import ContainerSpec, PodSpec
from kybernate.dev.fakes.kubelet.process import (
    BackOff,
    Container,
    ContainerProcess,
    StartError,
    base_environment,
    rfc3339,
)
from kybernate.logs import get_logger
from kybernate.onboard import expand

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Caches of compiled code, whose files engines lock, and their folders in that of a pod."""
START_ERROR = 128
"""The exit code by which a runtime says that it could not start a container."""
GATE_PAUSE_SECONDS = 0.05
GATE_PAUSE_MAX_SECONDS = 1.0


@dataclass
class Surroundings:
    """What a pod needs from its kubelet."""

    devices: DeviceManager
    node: str
    node_address: str
    logs: Path
    temporary: Path
    """Has a folder for the temporary files of each pod."""
    env: Mapping[str, str]
    """Added to every container: KYB_SPEED, and what is injected."""
    backoff: BackOff
    address: Callable[[PodSpec], str]
    """Finds a pod address."""
    up: asyncio.Event
    """Set while kubelet runs: nothing is started without it."""
    cgroups: Path | None = None
    """As ``Options.cgroups``."""


@dataclass
class Pod:
    """A pod of this node."""

    spec: PodSpec
    around: Surroundings
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    created_at: str = field(default_factory=rfc3339)
    ip: str = ""
    bound: bool = False
    admitted: bool = False
    unschedulable: str = ""
    failure: tuple[str, str] | None = None
    """(reason, message) of a rejected admission."""
    deleted_at: str = ""
    containers: list[Container] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.containers = [Container(spec) for spec in self.spec.containers]

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """After admission: give it an address and run its containers."""
        self.admitted = True
        self.task = asyncio.create_task(self._run(), name=f"pod {self.spec.key}")

    def fail(self, reason: str, message: str) -> None:
        """It was rejected; a pod never comes back from that."""
        self.failure = (reason, message)

    async def cancel(self) -> None:
        """Stop caring for it; its processes go on."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def stop(self, grace_seconds: float) -> None:
        """End it: no restarts any more, SIGTERM to all containers, SIGKILL after the grace period."""
        await self.cancel()
        running = [container for container in self.containers if container.process is not None]
        codes = await asyncio.gather(*(self._process(c).stop(grace_seconds) for c in running))
        for container, code in zip(running, codes, strict=True):
            self._ended(container, code)
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _run(self) -> None:
        while not self.ip:
            try:
                self.ip = self.around.address(self.spec)
            except StartError as error:
                for container in self.containers:
                    self._refused(container, "ContainerCreating", error)
                await asyncio.sleep(GATE_PAUSE_MAX_SECONDS)
        async with asyncio.TaskGroup() as group:
            for container in self.containers:
                if container.spec.init and not container.spec.sidecar:
                    await self._keep(container)
                else:
                    group.create_task(self._keep(container))

    async def _keep(self, container: Container) -> None:
        """Run one container until it need not be started again."""
        crashes, began = 0, 0.0
        while not container.done:
            if container.process is None:
                await self._start(container)
                began = time.monotonic()
            code = START_ERROR if container.process is None else await container.process.wait()
            if container.process is not None:
                self._ended(container, code)
            if not self._restarts(container, code):
                container.done = True
                return
            if time.monotonic() - began > 2 * self.around.backoff.max_seconds:
                crashes = 0
            crashes += 1
            delay = self.around.backoff.delay(crashes)
            if delay:
                text = f"back-off {delay:g}s restarting failed container={container.spec.name} pod={self.spec.name}"
                container.waits("CrashLoopBackOff", text)
                await asyncio.sleep(delay)

    async def _start(self, container: Container) -> None:
        """The gate, again and again until it lets the container through; the reason stands in the status. Then create
        it; there is no process if that failed."""
        pause = GATE_PAUSE_SECONDS
        while True:
            await self.around.up.wait()
            began = time.monotonic()
            try:
                await self.around.devices.gate(self.uid, container.spec)
                await self._create(container)
                return
            except GateError as error:
                container.waits("CreateContainerConfigError", str(error))
            except StartError as error:
                self._ended(container, START_ERROR, reason="StartError", message=str(error))
                return
            # A gate that refuses after its full wait is asked again at once; one that fails fast, ever more slowly.
            quick = time.monotonic() - began < GATE_PAUSE_MAX_SECONDS
            pause = min(GATE_PAUSE_MAX_SECONDS, pause * 2) if quick else GATE_PAUSE_SECONDS
            await asyncio.sleep(pause)

    def _refused(self, container: Container, reason: str, error: StartError) -> None:
        before = container.state
        container.waits(reason, str(error))
        if container.state != before:
            get_logger().warning("kubelet.container_refused", pod=self.spec.key, error=str(error))

    async def _create(self, container: Container) -> None:
        options = self.around.devices.run_options(self.uid, container.spec.name)
        for conflict in options.conflicts:
            get_logger().error("kubelet.conflicting_answers", pod=self.spec.key, conflict=conflict)
        _check_paths(options)
        env = self._environment(container.spec, options.envs)
        command = [expand(word, env) for word in container.spec.command]
        if command[0].startswith(f"{run.FOLDER}/"):  # a local process has no mounts
            command[0] = command[0].replace(run.FOLDER, dict(options.mounts).get(run.FOLDER, run.FOLDER), 1)
        log = self.around.logs / f"{self.spec.namespace}_{self.spec.name}_{self.uid}" / f"{container.spec.name}.log"
        self._temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        container.log, container.log_from = log, log.stat().st_size if log.exists() else 0
        # Shielded: a process that was started must be known here, also when this pod is being stopped.
        await self._uninterrupted(container, ContainerProcess.start(command, env, log, self.around.cgroups))

    async def _uninterrupted(self, container: Container, starting: Awaitable[ContainerProcess]) -> None:
        async def run() -> None:
            container.process = await starting
            container.starts += 1
            container.container_id = container.process.container_id
            container.started_at = rfc3339()
            if "terminated" in container.state:
                container.last_state = container.state
            container.state = {"running": {"startedAt": container.started_at}}
            get_logger().info(
                "kubelet.container_started",
                pod=self.spec.key,
                container=container.spec.name,
                container_id=container.container_id,
                restarts=container.starts - 1,
            )

        task = asyncio.create_task(run())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await task
            raise

    def _environment(self, spec: ContainerSpec, answered: Mapping[str, str]) -> dict[str, str]:
        """The plugin's variables come before the pod's; of a name that both set the later one wins here."""
        own = {"POD_IP": self.ip, "POD_NAME": self.spec.name, "POD_NAMESPACE": self.spec.namespace}
        base = base_environment() | dict(self.around.env)
        # Engines here share a file system: of a cache that they shared, a parked one could hold the lock.
        caches = Path(base.get("XDG_CACHE_HOME") or self.around.logs.parent / "caches") / self.spec.key.replace(
            "/", "_"
        )
        own |= {name: str(caches / folder) for name, folder in CACHES.items()} | {"TMPDIR": str(self._temporary)}
        env = base | own | dict(answered)
        fields = {
            "status.podIP": self.ip,
            "metadata.name": self.spec.name,
            "metadata.namespace": self.spec.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.around.node,
        }
        for variable in spec.env:
            path = variable.field_path
            env[variable.name] = expand(variable.value, env) if path is None else fields[path]
        return env

    @property
    def _temporary(self) -> Path:
        """A short path: engines bind sockets in it, whose paths have at most 107 characters."""
        return self.around.temporary / self.uid[:8]

    def _ended(self, container: Container, code: int, **why: str) -> None:
        container.process = None
        ended: dict[str, Any] = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", **why}
        if code and "message" not in why and (output := container.last_output()):
            ended["message"] = output
        if code > 128:
            ended["signal"] = code - 128
        ended |= {"startedAt": container.started_at, "finishedAt": rfc3339(), "containerID": container.container_id}
        container.state = {"terminated": ended}
        get_logger().info(
            "kubelet.container_ended", pod=self.spec.key, container=container.spec.name, exit_code=code, **why
        )

    def _restarts(self, container: Container, code: int) -> bool:
        if container.spec.sidecar:
            return True
        if container.spec.init:
            return code != 0 and self.spec.restart_policy != "Never"
        return self.spec.restart_policy == "Always" or (self.spec.restart_policy == "OnFailure" and code != 0)

    @staticmethod
    def _process(container: Container) -> ContainerProcess:
        if container.process is None:
            raise RuntimeError(f"container {container.spec.name} has no process")
        return container.process

    # --- status -------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """v1 phase."""
        if self.failure is not None:
            return "Failed"
        mains = [container for container in self.containers if not container.spec.init]
        if self.admitted and all(container.done for container in mains):
            codes = [container.state.get("terminated", {}).get("exitCode", 1) for container in mains]
            return "Failed" if any(codes) else "Succeeded"
        return "Running" if mains and all(container.starts for container in mains) else "Pending"

    @property
    def active(self) -> bool:
        """Whether its devices are still its own: it is not over, or its processes are not."""
        return self.phase in ("Pending", "Running") or any(c.process is not None for c in self.containers)

    def document(self) -> dict[str, Any]:
        """The v1 Pod with its status."""
        meta: dict[str, Any] = {
            "name": self.spec.name,
            "namespace": self.spec.namespace,
            "uid": self.uid,
            "labels": dict(self.spec.labels),
            "annotations": dict(self.spec.annotations),
            "creationTimestamp": self.created_at,
        }
        if self.deleted_at:
            meta["deletionTimestamp"] = self.deleted_at
        spec = dict(self.spec.document.get("spec", {}))
        if self.bound:
            spec["nodeName"] = self.around.node
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": self._status()}

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = {"phase": self.phase, "conditions": self._conditions()}
        if self.failure is not None:
            status["reason"], status["message"] = self.failure
        if self.ip:
            status |= {"podIP": self.ip, "podIPs": [{"ip": self.ip}], "hostIP": self.around.node_address}
        if self.admitted:
            status["initContainerStatuses"] = [c.status() for c in self.containers if c.spec.init]
            status["containerStatuses"] = [self._with_health(c) for c in self.containers if not c.spec.init]
        return status

    def _with_health(self, container: Container) -> dict[str, Any]:
        health = self.around.devices.health(self.uid, container.spec.name)
        return container.status() | ({"allocatedResourcesStatus": health} if health else {})

    def _conditions(self) -> list[dict[str, str]]:
        if not self.bound:
            reason = {"reason": "Unschedulable", "message": self.unschedulable}
            return [{"type": "PodScheduled", "status": "False"} | reason]
        mains = [container for container in self.containers if not container.spec.init]
        ready = "True" if self.failure is None and all(c.running for c in mains) else "False"
        return [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]


def _check_paths(options: ContainerRunOptions) -> None:
    """What a runtime would fail on: sources that do not exist, and what a local process cannot see."""
    for kind, paths in (("mount", options.mounts), ("device", options.devices)):
        for inside, host in paths:
            if not os.path.exists(host):
                raise StartError(f"failed to create containerd task: {kind} {host}: no such file or directory")
            if kind == "mount" and inside not in (host, run.FOLDER):
                raise StartError(f"mount {host} at {inside}: a local process sees it only at its host path")
