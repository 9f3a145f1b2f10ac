"""Kubelet's PodResources API v1: which container has which devices."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import grpc
import grpc.aio

from kybernate.dev.fakes.kubelet.device_manager import DeviceManager
from kybernate.dev.fakes.kubelet.pod import Pod
from kybernate.pb import podresources_pb2 as pb
from kybernate.pb import podresources_pb2_grpc as rpc

_PER_SECOND = 100.0
_BURST = 10.0


class PodResourcesServer(rpc.PodResourcesListerServicer):
    """``<folder>/pod-resources/kubelet.sock``; ``async with`` serves it. All callers share 100 calls/s, burst 10."""

    def __init__(self, folder: Path, devices: DeviceManager, pods: Callable[[], Iterable[Pod]]) -> None:
        self._socket = folder / "pod-resources" / "kubelet.sock"
        self._devices = devices
        self._pods = pods
        self._server: grpc.aio.Server | None = None
        self._tokens, self._filled_at = _BURST, time.monotonic()

    async def __aenter__(self) -> "PodResourcesServer":
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        rpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(grace=0)

    async def List(  # noqa: N802  (the wire's name)
        self,
        request: pb.ListPodResourcesRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.ListPodResourcesRequest, pb.ListPodResourcesResponse],
    ) -> pb.ListPodResourcesResponse:
        """Active pods; devices of others are freed first."""
        if self._limited():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._devices.collect()
        return pb.ListPodResourcesResponse(pod_resources=[self._resources(pod) for pod in self._pods() if pod.active])

    async def GetAllocatableResources(  # noqa: N802
        self,
        request: pb.AllocatableResourcesRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.AllocatableResourcesRequest, pb.AllocatableResourcesResponse],
    ) -> pb.AllocatableResourcesResponse:
        """Healthy devices, allocated or not."""
        if self._limited():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        answer = pb.AllocatableResourcesResponse()
        for resource, endpoint in self._devices.endpoints.items():
            nodes = endpoint.nodes()
            for device_id in sorted(endpoint.healthy):
                answer.devices.extend(_entries(resource, device_id, nodes.get(device_id, ())))
        return answer

    async def Get(  # noqa: N802
        self,
        request: pb.GetPodResourcesRequest,
        context: grpc.aio.ServicerContext[pb.GetPodResourcesRequest, pb.GetPodResourcesResponse],
    ) -> pb.GetPodResourcesResponse:
        """One pod by name, over or not."""
        if self._limited():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
        wanted = (request.pod_namespace, request.pod_name)
        for pod in self._pods():
            if (pod.spec.namespace, pod.spec.name) == wanted:
                return pb.GetPodResourcesResponse(pod_resources=self._resources(pod))
        text = f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        await context.abort(grpc.StatusCode.UNKNOWN, text)
        raise AssertionError("abort returned")

    def _resources(self, pod: Pod) -> pb.PodResources:
        answer = pb.PodResources(name=pod.spec.name, namespace=pod.spec.namespace)
        for container in pod.spec.containers:
            if container.init and not container.sidecar:
                continue
            entry = answer.containers.add(name=container.name)
            for allocation in self._devices.of(pod.uid, container.name):
                for device_id in sorted(allocation.device_ids):
                    own = allocation.nodes.get(device_id, ())
                    entry.devices.extend(_entries(allocation.resource, device_id, own))
        return answer

    def _limited(self) -> bool:
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._filled_at) * _PER_SECOND)
        self._filled_at = now
        if self._tokens < 1:
            return True
        self._tokens -= 1
        return False


def _entries(resource: str, device_id: str, nodes: Sequence[int]) -> list[pb.ContainerDevices]:
    """One entry per device, and one per NUMA node of it: consumers must dedupe."""
    if not nodes:
        return [pb.ContainerDevices(resource_name=resource, device_ids=[device_id])]
    return [
        pb.ContainerDevices(
            resource_name=resource,
            device_ids=[device_id],
            topology=pb.NUMATopology(nodes=[pb.NUMANode(ID=node)]),
        )
        for node in nodes
    ]
