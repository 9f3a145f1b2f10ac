"""Kubelet's PodResources socket: which container has which devices."""

from pathlib import Path

import grpc
import grpc.aio

from kybernate.pb import podresources_pb2 as pb
from kybernate.pb import podresources_pb2_grpc as rpc

TIMEOUT_SECONDS = 5.0
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a kubelet that was away must not make the next channel fail unseen
    ("grpc.max_receive_message_length", 16 * 2**20),  # as kubelet allows itself
]


class PodResourcesError(Exception):
    """Kubelet did not tell; the text says why and what to check."""


async def list_pods(socket: Path) -> pb.ListPodResourcesResponse:
    """All active pods with their devices. Raises PodResourcesError.

    Ask at most once a second: kubelet limits the calls for the whole node. Each time by a fresh connection: the threads
    that gRPC has for an open one wake up some 20 times a second.
    """
    try:
        async with grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS) as channel:
            stub: rpc.PodResourcesListerAsyncStub = rpc.PodResourcesListerStub(channel)
            return await stub.List(pb.ListPodResourcesRequest(), timeout=TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise PodResourcesError(
            f"PodResources at {socket}: {error.code().name}: {error.details()}; "
            f"check that kubelet runs and that its pod-resources folder is mounted here"
        ) from error


def devices(answer: pb.ListPodResourcesResponse) -> dict[str, str]:
    """Resource by device ID, of all containers. A device on two NUMA nodes counts once."""
    return {
        device_id: entry.resource_name
        for pod in answer.pod_resources
        for container in pod.containers
        for entry in container.devices
        for device_id in entry.device_ids
    }
