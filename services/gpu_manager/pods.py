"""Which pods own this node's seats: PodResources (which container has which device) joined with the node's pods.

PodResources knows no UID, no address and no annotations; the pods know no devices. Pods come from the API server by
watch, and from kubelet by polling where there is no cluster (``docs/dev/decisions/021-pods-by-watch.md``).
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import aiohttp

from kybernate.annotations import PREFER_GROUP, with_options
from kybernate.clock import to_beat
from kybernate.kube import Kube, KubeError, Mirror
from kybernate.node.pod_resources import PodResourcesError, list_pods
from kybernate.pb import podresources_pb2 as pb
from kybernate.redaction import without_secrets
from kybernate.run import PROGRAM
from kybernate.topology import SEAT_ID, Group
from services.gpu_manager.core.seat_pod import Owners, PendingPod, SeatPod

TIMEOUT_SECONDS = 5.0
POLL_SECONDS, POLL_SOON_SECONDS = 1.0, 0.2
"""Wall: between two observations while something is expected to change; the second one while a seat starts."""
SETTLE_SECONDS = 5.0
"""Wall: for so long after a change of the pods, an allocation or a start call something is expected to change."""
SETTLED_SECONDS = 10.0
"""Wall: between two observations otherwise. Of watched pods only PodResources, on this node, is read then."""
EVENTS_SECONDS = 0.2
"""Wall: changes of pods cause an observation at most so often: kubelet limits PodResources for the whole node."""
LONGEST_LINE = 200
"""Characters of the last line of a container's log."""
PODS, NAMESPACES = "/api/v1/pods", "/api/v1/namespaces"


class PodsError(Exception):
    """The owners of the seats are not known at present; the text names the source that failed and what to check."""


class Pods(Protocol):
    """The owners of the seats. Kubelet limits PodResources for the whole node: ``Pace`` tells when to observe."""

    settled_seconds: float = SETTLED_SECONDS
    """Wall: between two observations while nothing is expected to change."""
    _notify: Callable[[], None]

    def on_change(self, notify: Callable[[], None]) -> None:
        """Call ``notify`` when the node's pods have changed, or can be seen again."""
        self._notify = notify

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        """One observation: every container that has a seat, in seat order. Raises PodsError.

        ``prove``: seats whose owner is compared with the source itself. A copy of the pods may lie behind it.
        """

    async def run(self) -> None:
        """Follow the pods until cancelled."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass
class Pace:
    """When the owners are observed again. Pure; times are wall seconds."""

    settled_seconds: float
    busy_until: float = 0.0
    observed: float = float("-inf")

    def due(self, now: float, *, changing: bool) -> bool:
        """True if an observation is due. ``changing``: something has happened, or is expected to happen."""
        if changing:
            self.busy_until = now + SETTLE_SECONDS
        if now < self.busy_until or now >= self.observed + self.settled_seconds:
            self.observed = now
            return True
        return False


class KubeletPods(Pods):
    """Pods from kubelet's ``/pods``, which can only be polled: once a second, and another answer is a change."""

    def __init__(self, kubelet_url: str, pod_resources_socket: Path) -> None:
        self._url = kubelet_url.rstrip("/") + "/pods"
        self._resources = partial(list_pods, pod_resources_socket)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS))
        self._notify: Callable[[], None] = lambda: None

    async def seats(self, prove: Collection[str] = ()) -> Owners:  # noqa: ARG002  (each answer is current)
        """One observation. Raises PodsError."""
        try:
            resources = await self._resources()
        except PodResourcesError as error:
            raise PodsError(str(error)) from error
        return joined(resources, _items(await self._read(), self._url))

    async def run(self) -> NoReturn:
        """Poll until cancelled. Equal answers are not parsed."""
        known: bytes | None = None
        while True:
            await asyncio.sleep(to_beat(POLL_SECONDS))
            found: bytes | None = None
            with contextlib.suppress(PodsError):  # an observation reports it
                found = await self._read()
            if found != known:
                known = found
                self._notify()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _read(self) -> bytes:
        try:
            async with self._session.get(self._url) as answer:
                answer.raise_for_status()
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"{self._url}: {type(error).__name__}: {error}; check that it can be reached from here"
            raise PodsError(text) from error


def _items(text: bytes, url: str) -> list[Any]:
    """The pods of a PodList. Raises PodsError."""
    try:
        items = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError):
        items = None
    if not isinstance(items, list):
        raise PodsError(f"{url}: the answer is no PodList")
    return items


class ApiServerPods(Pods):
    """Pods from the API server by watch, with this pod's service account (``get``, ``list`` and ``watch`` of pods).

    An observation needs an open watch, before and after PodResources is read. The local copy may lie behind by the
    events that are on their way; ``docs/dev/decisions/021-pods-by-watch.md`` shows which conclusions that permits.
    """

    def __init__(self, kube: Kube, node: str, pod_resources_socket: Path, *, wishes: bool) -> None:
        """``wishes``: watch also pods without a node, for their ``kyb.ai/prefer-group``."""
        self._kube, self._resources = kube, partial(list_pods, pod_resources_socket)
        self._own = Mirror(kube, PODS, {"fieldSelector": f"spec.nodeName={node}"}, on_change=self._changed)
        unplaced = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
        self._unplaced = Mirror(kube, PODS, unplaced, on_change=self._changed, keep=_prefers_group) if wishes else None
        self._notify: Callable[[], None] = lambda: None
        self._notification: asyncio.TimerHandle | None = None
        self._notified = float("-inf")

    async def seats(self, prove: Collection[str] = ()) -> Owners:
        """One observation. Raises PodsError while the watch is not open."""
        try:
            await self._own.current()
            resources = await self._resources()
            own = dict(await self._own.current(0))
            owners = joined(resources, own.values(), self._unplaced.objects.values() if self._unplaced else ())
            behind = {pod.seat for pod in owners.pods if pod.seat in prove and await self._behind(pod, own[pod.uid])}
        except (KubeError, PodResourcesError) as error:
            raise PodsError(str(error)) from error
        pods = tuple(pod for pod in owners.pods if pod.seat not in behind)
        return replace(owners, pods=pods, unproven=frozenset(pod.seat for pod in pods) - frozenset(prove))

    async def run(self) -> None:
        """Watch until cancelled. Losing the watch of pods without a node loses only wishes."""
        async with asyncio.TaskGroup() as group:
            for mirror in (self._own, self._unplaced):
                if mirror is not None:
                    group.create_task(mirror.run(), name="watch pods")

    async def close(self) -> None:
        """Notify no more."""
        if self._notification is not None:
            self._notification.cancel()

    async def _behind(self, pod: SeatPod, known: Mapping[str, Any]) -> bool:
        """True if the API server shows another pod, or another state of this one, than this copy. Raises KubeError."""
        found = await self._kube.get(f"{NAMESPACES}/{pod.namespace}/pods/{pod.name}")
        return found is None or found["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]

    def _changed(self) -> None:
        if self._notification is None:
            loop = asyncio.get_running_loop()
            self._notification = loop.call_at(max(loop.time(), self._notified + EVENTS_SECONDS), self._notify_now)

    def _notify_now(self) -> None:
        self._notification, self._notified = None, asyncio.get_running_loop().time()
        self._notify()


def wishes_matter(groups: Iterable[Group]) -> bool:
    """True if some resource is offered by several groups: only then can a pod prefer one of them. Pure."""
    resources = [group.profile.resource for group in groups if group.seat_ids]
    return len(resources) > len(set(resources))


def joined(
    resources: pb.ListPodResourcesResponse,
    pods: Iterable[Mapping[str, Any]],
    unplaced: Iterable[Mapping[str, Any]] = (),
) -> Owners:
    """The owners of the seats, from both views. ``unplaced``: pods that have no node yet. Pure.

    A device on several NUMA nodes occurs several times and counts once. A pod that only one view contains is left out;
    a later observation has it in both, or in none. So is a name that entries with different seats have: kubelet still
    counts a pod that was forcibly deleted, and which entry is that of the new pod of this name is not known until the
    other one is gone. When two pods claim one seat, the pod that is not ending owns it.
    """
    claims = {(entry.namespace, entry.name, frozenset(_seats(entry))) for entry in resources.pod_resources}
    names = Counter((namespace, name) for namespace, name, seats in claims if seats)
    by_name = {(pod["metadata"].get("namespace", "default"), pod["metadata"]["name"]): pod for pod in pods}
    found: dict[str, SeatPod] = {}
    for entry in resources.pod_resources:
        pod = by_name.get((entry.namespace, entry.name))
        if pod is None or names[entry.namespace, entry.name] > 1:
            continue
        for container in entry.containers:
            seats = {s: d.resource_name for d in container.devices for s in d.device_ids if SEAT_ID.fullmatch(s)}
            for seat in seats:
                owner = _seat_pod(seat, container.name, pod, tuple(sorted(set(seats.values()))))
                if seat not in found or found[seat].deleting:
                    found[seat] = owner
    listed = frozenset(pod["metadata"]["uid"] for pod in by_name.values() if not _over(pod))
    have = {owner.uid for owner in found.values()}
    waiting = [pod for pod in (*by_name.values(), *unplaced) if pod["metadata"]["uid"] not in have]
    pending = tuple(wish for pod in waiting if (wish := _pending(pod)) is not None)
    return Owners(tuple(found[seat] for seat in sorted(found)), listed, pending)


def _seats(entry: pb.PodResources) -> Iterator[str]:
    for container in entry.containers:
        for device in container.devices:
            yield from filter(SEAT_ID.fullmatch, device.device_ids)


def _prefers_group(pod: Mapping[str, Any]) -> str:
    """The value of ``kyb.ai/prefer-group``; empty without one."""
    return str((pod["metadata"].get("annotations") or {}).get(PREFER_GROUP, ""))


def _pending(pod: Mapping[str, Any]) -> PendingPod | None:
    """The wish of a pod that has no seat yet for a certain group; None: it has no such wish."""
    meta, status = pod["metadata"], pod.get("status") or {}
    wanted = _prefers_group(pod)
    if not wanted or _over(pod) or status.get("phase", "Pending") != "Pending":
        return None
    limits = [
        (container.get("resources") or {}).get("limits") or {}
        for container in (pod.get("spec") or {}).get("containers") or ()
    ]
    name = f"{meta.get('namespace', 'default')}/{meta['name']}"
    return PendingPod(meta["uid"], name, wanted, tuple(sorted({resource for found in limits for resource in found})))


def _seat_pod(seat: str, container: str, pod: Mapping[str, Any], resources: tuple[str, ...]) -> SeatPod:
    meta, status = pod["metadata"], pod.get("status") or {}
    state = _container_status(status, container)
    ended = _ended(state)
    containers = (pod.get("spec") or {}).get("containers") or ()
    described: Mapping[str, Any] = next((entry for entry in containers if entry.get("name") == container), {})
    annotations, replaced = with_options(meta.get("annotations") or {}, described)
    return SeatPod(
        seat=seat,
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta["uid"],
        container=container,
        container_id=state.get("containerID") or None,
        running="running" in (state.get("state") or {}),
        restarts=int(state.get("restartCount", 0)),
        ended=_how(ended),
        code=None if ended is None else int(ended.get("exitCode", 0)),
        line=_last_line(ended),
        waits=_waits((state.get("state") or {}).get("waiting") or {}),
        exited=None if ended is None else _unix(ended.get("finishedAt")),
        ip=status.get("podIP") or None,
        probe_seconds=_probe_seconds(described.get("startupProbe")),
        deleting=_over(pod),
        annotations=annotations,
        replaced=replaced,
        resources=resources,
        restarts_inside=str(next(iter(described.get("command") or ()), "")).rpartition("/")[2] == PROGRAM,
    )


def _how(ended: Mapping[str, Any] | None) -> str:
    """How a run of a container ended; of one that the runtime could not start also why."""
    if ended is None:
        return "does not run"
    if ended.get("reason") == "StartError":
        return f"could not be started: {_plain(ended.get('message'))}"
    if ended.get("reason") == "OOMKilled":
        return "was killed: it had no memory left (OOMKilled)"
    return f"exited with code {ended.get('exitCode', 0)}"


def _last_line(ended: Mapping[str, Any] | None) -> str:
    """The last line that a container wrote, for people; of one that could not be started its end says it."""
    if ended is None or ended.get("reason") == "StartError":
        return ""
    lines = str(ended.get("message") or "").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return _plain(last)


def _waits(waiting: Mapping[str, Any]) -> str:
    """Why kubelet does not make a container, for people; of the start gate and of the back-off other things tell."""
    text = str(waiting.get("message") or "")
    return "" if waiting.get("reason") == "CrashLoopBackOff" or "PreStartContainer" in text else _plain(text)


def _plain(text: object) -> str:
    """What a container or its runtime wrote, as one printable line without secrets."""
    return without_secrets("".join(one if one.isprintable() else " " for one in str(text)))[:LONGEST_LINE]


def _probe_seconds(probe: Mapping[str, Any] | None) -> float:
    """Until a startupProbe has failed for good, with the defaults of Kubernetes; 0: there is none, or it is odd."""
    if not probe:
        return 0.0
    try:
        tries, period = int(probe.get("failureThreshold", 3)), float(probe.get("periodSeconds", 10))
        return float(probe.get("initialDelaySeconds", 0)) + tries * period
    except (TypeError, ValueError):
        return 0.0


def _over(pod: Mapping[str, Any]) -> bool:
    """True if the pod is being deleted or has ended for good."""
    deleted = bool(pod["metadata"].get("deletionTimestamp"))
    return deleted or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _container_status(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Of an app container or a sidecar (which counts as an init container)."""
    for kind in ("containerStatuses", "initContainerStatuses"):
        for entry in status.get(kind) or ():
            if entry.get("name") == name:
                return entry if isinstance(entry, dict) else {}
    return {}


def _unix(time: object) -> float | None:
    """A time of the Kubernetes API as unix seconds."""
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except ValueError:
        return None


def _ended(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the last run ended; None while it runs or before its first end."""
    present = state.get("state") or {}
    if "running" in present:
        return None
    ended = present.get("terminated") or (state.get("lastState") or {}).get("terminated")
    return ended if isinstance(ended, dict) else None
