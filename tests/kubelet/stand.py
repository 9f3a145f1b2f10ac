"""A kubelet in this process, a scripted plugin, and waiting for conditions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.node import short_folder
from kybernate.dev.fakes.kubelet.kubelet import Kubelet, Options
from kybernate.dev.fakes.kubelet.manifest import PodSpec, parse
from kybernate.dev.fakes.kubelet.pod import Pod
from kybernate.dev.fakes.kubelet.process import BackOff
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from tests.until import until

RESOURCE = "kyb.ai/gpu-1x-seat"


@asynccontextmanager
async def running_kubelet(**changes: Any) -> AsyncIterator[Kubelet]:
    with short_folder() as folder:
        options = {"backoff": BackOff(0.01, 0.05), "readmit_seconds": 0.3, "seed": 1} | changes
        async with Kubelet(Options(folder=folder / "device-plugins", run_dir=folder / "run", **options)) as kubelet:
            yield kubelet


def pods(text: str) -> tuple[PodSpec, ...]:
    return parse(text, "test")


def pod(
    name: str = "p", *, seats: int = 1, command: str = "sleep 100", resource: str = RESOURCE, extra: str = ""
) -> PodSpec:
    """A pod with one container that runs a shell command line."""
    limits = f"resources: {{limits: {{{resource}: {seats}}}}}" if seats else ""
    (spec,) = pods(
        f"""
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 1
  {extra}
  containers:
    - name: engine
      command: [sh, -c]
      args: ["{command}"]
      {limits}
"""
    )
    return spec


def state(pod: Pod, container: str = "engine") -> dict[str, Any]:
    """The v1 status of one container."""
    status = pod.document()["status"]
    for entry in (*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())):
        if entry["name"] == container:
            return dict(entry)
    return {"state": {}, "restartCount": 0, "containerID": ""}


def reason(pod: Pod) -> str:
    return str(state(pod)["state"].get("waiting", {}).get("reason", ""))


async def until_running(pod: Pod, timeout: float = 10.0) -> None:
    what = f"the container of pod {pod.spec.name} runs"
    await until(lambda: "running" in state(pod)["state"], what=what, saw=lambda: state(pod), timeout=timeout)


async def until_restarted(pod: Pod, count: int, timeout: float = 10.0) -> None:
    what = f"restarts of pod {pod.spec.name}: {count}"
    await until(lambda: state(pod)["restartCount"] == count, what=what, saw=lambda: state(pod), timeout=timeout)


async def until_waiting(pod: Pod, why: str, timeout: float = 10.0) -> None:
    what = f"the container of pod {pod.spec.name} waits for the reason {why}"
    await until(lambda: reason(pod) == why, what=what, saw=lambda: state(pod), timeout=timeout)


async def until_failed(pod: Pod, timeout: float = 10.0) -> None:
    await until(
        lambda: pod.phase == "Failed", what=f"pod {pod.spec.name} fails", saw=lambda: pod.phase, timeout=timeout
    )


async def until_capacity(kubelet: Kubelet, expected: dict[str, tuple[int, int]], timeout: float = 10.0) -> None:
    """Wait until kubelet counts exactly these seats: all and healthy ones by resource."""
    capacity = kubelet.devices.capacity
    await until(lambda: capacity() == expected, what=f"capacity {expected}", saw=capacity, timeout=timeout)


async def until_called(plugin: "ScriptedPlugin", call: str, timeout: float = 10.0) -> None:
    await until(
        lambda: plugin.called(call),
        what=f"kubelet calls {call} of the plugin",
        saw=lambda: plugin.calls,
        timeout=timeout,
    )


@dataclass
class ScriptedPlugin(rpc.DevicePluginServicer):
    """Records what kubelet asks and answers as its fields say."""

    options: pb.DevicePluginOptions = field(
        default_factory=lambda: pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
    )
    calls: list[tuple[str, Any]] = field(default_factory=list)
    lists: asyncio.Queue[list[pb.Device] | None] = field(default_factory=asyncio.Queue)
    """What ListAndWatch sends; None ends the stream."""
    options_error: str = ""
    preferred: list[str] = field(default_factory=list)
    preferred_error: str = ""
    gate_error: str = ""
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """By seat: PreStartContainer answers when the event is set."""
    may_allocate: asyncio.Event = field(default_factory=asyncio.Event)
    """Allocate answers while it is set."""
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[pb.Mount] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_allocate.set()

    def send(self, *ids: str, unhealthy: tuple[str, ...] = (), health: str = "Healthy") -> None:
        devices = [pb.Device(ID=device, health=health) for device in ids]
        self.lists.put_nowait(devices + [pb.Device(ID=device, health="Unhealthy") for device in unhealthy])

    def called(self, name: str) -> list[Any]:
        return [request for called, request in self.calls if called == name]

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:  # noqa: N802
        self.calls.append(("options", request))
        if self.options_error:
            await context.abort(grpc.StatusCode.INTERNAL, self.options_error)
        return self.options

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls.append(("list", request))
        while (devices := await self.lists.get()) is not None:
            yield pb.ListAndWatchResponse(devices=devices)

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("preferred", request))
        if self.preferred_error:
            await context.abort(grpc.StatusCode.INTERNAL, self.preferred_error)
        answer = pb.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)
        return pb.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("allocate", list(request.container_requests[0].devices_ids)))
        await self.may_allocate.wait()
        envs = {"SEAT": request.container_requests[0].devices_ids[0]} | self.envs
        answer = pb.ContainerAllocateResponse(envs=envs, mounts=self.mounts)
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.calls.append(("pre_start", list(request.devices_ids)))
        if request.devices_ids[0] in self.held:
            await self.held[request.devices_ids[0]].wait()
        if self.gate_error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.gate_error)
        return pb.PreStartContainerResponse()


@asynccontextmanager
async def serving(plugin: ScriptedPlugin, folder: Path, endpoint: str = "p.sock") -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix:{folder / endpoint}")
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=0)


async def register(
    folder: Path, endpoint: str = "p.sock", resource: str = RESOURCE, version: str = "v1beta1"
) -> str | None:
    """Register as a plugin does; returns why kubelet refused."""
    async with grpc.aio.insecure_channel(
        f"unix:{folder / 'kubelet.sock'}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        request = pb.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
        try:
            await rpc.RegistrationStub(channel).Register(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.details()
    return None


@asynccontextmanager
async def registered(
    kubelet: Kubelet,
    *seats: str,
    plugin: ScriptedPlugin | None = None,
    resource: str = RESOURCE,
    endpoint: str = "p.sock",
) -> AsyncIterator[ScriptedPlugin]:
    """A plugin whose seats kubelet counts."""
    plugin = plugin or ScriptedPlugin()
    async with serving(plugin, kubelet.options.folder, endpoint):
        assert await register(kubelet.options.folder, endpoint, resource) is None
        plugin.send(*seats)
        expected = (len(seats), len(seats))
        await until(
            lambda: kubelet.devices.capacity().get(resource) == expected,
            what=f"capacity of {resource}: {expected}",
            saw=kubelet.devices.capacity,
        )
        yield plugin
