"""Which pods own this node's seats: PodResources (who has which device) joined with the node's pod list (the rest).

PodResources knows no UID, no address and no annotations; the pod list knows no devices. The list comes from the API
server in a cluster, and from kubelet itself where there is none.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from kybernate.annotations import PREFER_GROUP
from kybernate.authority import trusting
from kybernate.logs import get_logger
from kybernate.pb import podresources_pb2 as pb
from kybernate.pod_resources import PodResources, PodResourcesError
from kybernate.topology import SEAT_ID
from services.gpu_manager.seat_pod import Owners, PendingPod, SeatPod

TIMEOUT_SECONDS = 5.0
PENDING_SECONDS = 5.0
"""How often pods without a node are looked at: only wishes come from there, and the list is the whole cluster's."""
PENDING_LIMIT = 500
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_OVER = ("Succeeded", "Failed")


class PodsError(Exception):
    """The owners of the seats cannot be read now; the text says who did not answer and what to check."""


class Pods(Protocol):
    """Who owns the seats. Ask at most once a second: kubelet limits PodResources for the whole node."""

    async def seats(self) -> Owners:
        """Every container that has a seat, in seat order. Raises PodsError."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class KubeletPods:
    """The pod list from kubelet's ``/pods``."""

    def __init__(self, kubelet_url: str, pod_resources_socket: Path) -> None:
        self._url = kubelet_url.rstrip("/") + "/pods"
        self._resources = PodResources(pod_resources_socket)
        self._http = _Http()

    async def seats(self) -> Owners:
        """Every container that has a seat. Raises PodsError."""
        resources = await _listed(self._resources)
        return joined(resources, await self._http.get(self._url))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self._resources.close()


class ApiServerPods:
    """The pod list from the API server, with this pod's service account (``get`` and ``list`` of pods)."""

    def __init__(
        self, node: str, pod_resources_socket: Path, *, url: str | None = None, account: Path = _ACCOUNT
    ) -> None:
        """``url`` and ``account`` (folder with ``token`` and ``ca.crt``): as Kubernetes gives them to every pod."""
        self._url = (url or _in_cluster_url()).rstrip("/") + "/api/v1/pods"
        self._node = node
        self._account = account
        self._resources = PodResources(pod_resources_socket)
        self._http = _Http(account / "ca.crt")
        self._unplaced: Mapping[str, Any] = {}
        self._look_at = 0.0

    async def seats(self) -> Owners:
        """Every container that has a seat. Raises PodsError."""
        resources = await _listed(self._resources)
        token = await asyncio.to_thread(self._token)  # read each time: it is rotated
        headers = {"Authorization": f"Bearer {token}"}
        own = {"fieldSelector": f"spec.nodeName={self._node}"}
        pods = await self._http.get(self._url, params=own, headers=headers)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + PENDING_SECONDS
            unplaced = {"fieldSelector": "spec.nodeName=,status.phase=Pending", "limit": str(PENDING_LIMIT)}
            try:
                self._unplaced = await self._http.get(self._url, params=unplaced, headers=headers)
            except PodsError as error:  # only wishes are lost; who owns which seat is known
                get_logger().warning("pods.unplaced_unread", reason=str(error))
        return joined(resources, pods, self._unplaced)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
        await self._resources.close()

    def _token(self) -> str:
        path = self._account / "token"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise PodsError(f"{path}: {error.strerror}; the pod needs automountServiceAccountToken: true") from error


async def _listed(resources: PodResources) -> pb.ListPodResourcesResponse:
    try:
        return await resources.list()
    except PodResourcesError as error:
        raise PodsError(str(error)) from error


def joined(
    resources: pb.ListPodResourcesResponse, pod_list: Mapping[str, Any], unplaced: Mapping[str, Any] | None = None
) -> Owners:
    """Both views made one: a SeatPod for each seat. ``unplaced``: pods that have no node yet. Pure.

    A device on several NUMA nodes comes several times and counts once. A pod that only one side knows yet (or still)
    is left out: the next poll knows more. When two pods claim one seat, the one that goes on existing has it.
    """
    pods = {(pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]): pod for pod in _items(pod_list)}
    found: dict[str, SeatPod] = {}
    for entry in resources.pod_resources:
        pod = pods.get((entry.namespace, entry.name))
        if pod is None:
            continue
        for container in entry.containers:
            seats = {s: d.resource_name for d in container.devices for s in d.device_ids if SEAT_ID.fullmatch(s)}
            for seat, resource in seats.items():
                owner = _seat_pod(seat, resource, container.name, pod, tuple(sorted(set(seats.values()))))
                if seat not in found or found[seat].deleting:
                    found[seat] = owner
    listed = frozenset(pod["metadata"]["uid"] for pod in pods.values() if not _over(pod))
    have = {owner.uid for owner in found.values()}
    waiting = [pod for pod in (*pods.values(), *_items(unplaced or {})) if pod["metadata"]["uid"] not in have]
    pending = tuple(wish for pod in waiting if (wish := _pending(pod)) is not None)
    return Owners(tuple(found[seat] for seat in sorted(found)), listed, pending)


def _pending(pod: Mapping[str, Any]) -> PendingPod | None:
    """A pod that has no seat yet and would like one on a certain group."""
    meta, status = pod["metadata"], pod.get("status") or {}
    wanted = str((meta.get("annotations") or {}).get(PREFER_GROUP, ""))
    if not wanted or _over(pod) or status.get("phase", "Pending") != "Pending":
        return None
    limits = [
        (container.get("resources") or {}).get("limits") or {}
        for container in (pod.get("spec") or {}).get("containers") or ()
    ]
    name = f"{meta.get('namespace', 'default')}/{meta['name']}"
    return PendingPod(meta["uid"], name, wanted, tuple(sorted({resource for found in limits for resource in found})))


def _seat_pod(seat: str, resource: str, container: str, pod: Mapping[str, Any], resources: tuple[str, ...]) -> SeatPod:
    meta, status = pod["metadata"], pod.get("status") or {}
    state = _container_status(status, container)
    ended = _ended(state)
    return SeatPod(
        seat=seat,
        resource=resource,
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta["uid"],
        container=container,
        container_id=state.get("containerID") or None,
        running="running" in (state.get("state") or {}),
        restarts=int(state.get("restartCount", 0)),
        exit_code=None if ended is None else int(ended.get("exitCode", 0)),
        ip=status.get("podIP") or None,
        deleting=_over(pod),
        annotations=dict(meta.get("annotations") or {}),
        resources=resources,
    )


def _over(pod: Mapping[str, Any]) -> bool:
    """Its deletion was asked for, or it has ended for good."""
    deleted = bool(pod["metadata"].get("deletionTimestamp"))
    return deleted or (pod.get("status") or {}).get("phase") in _OVER


def _container_status(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Of an app container or a sidecar (which counts as an init container)."""
    for kind in ("containerStatuses", "initContainerStatuses"):
        for entry in status.get(kind) or ():
            if entry.get("name") == name:
                return entry if isinstance(entry, dict) else {}
    return {}


def _ended(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the last run ended; None while it runs or before its first end."""
    present = state.get("state") or {}
    if "running" in present:
        return None
    ended = present.get("terminated") or (state.get("lastState") or {}).get("terminated")
    return ended if isinstance(ended, dict) else None


def _items(pod_list: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return pod_list.get("items") or ()


class _Http:
    """GET of a PodList."""

    def __init__(self, ca_file: Path | None = None) -> None:
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, url: str, *, params: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """Raises PodsError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=await asyncio.to_thread(self._tls, url)),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            )
        try:
            async with self._session.get(url, params=params, headers=headers) as answer:
                if answer.status in (401, 403):
                    raise PodsError(f"{url}: HTTP {answer.status}; the service account must be allowed to list pods")
                answer.raise_for_status()
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PodsError(
                f"{url}: {type(error).__name__}: {error}; check that it can be reached from here"
            ) from error
        if not isinstance(found, dict) or not isinstance(found.get("items", []), list):
            raise PodsError(f"{url}: the answer is no PodList")
        return found

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _tls(self, url: str) -> ssl.SSLContext | bool:
        if not url.startswith("https:") or self._ca_file is None:
            return True
        try:
            return trusting(self._ca_file)
        except (OSError, ssl.SSLError) as error:
            raise PodsError(f"{self._ca_file}: {error}; it must hold the API server's certificate authority") from error


def _in_cluster_url() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise PodsError("KUBERNETES_SERVICE_HOST is not set: this is no pod; use KYB_PODS=kubelet with KYB_KUBELET_URL")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
