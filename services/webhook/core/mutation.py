"""An AdmissionReview (``admission.k8s.io/v1``) and its response: a pod with a seat is changed by a JSON Patch. Pure.

A pod is changed once: one that has a container ``kyb-probe`` keeps it, and its probes stay as they are.
"""

import base64
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from kybernate.annotations import (
    PREFIX,
    PROBE_PORT,
    VRAM,
    SeatAnnotations,
    chosen_devices,
    group_problem,
    misplaced,
    parse,
    tier_problem,
    whole_gpus,
)
from kybernate.config import NodeConfig
from kybernate.config_errors import suggest
from kybernate.engines import WITHOUT_COPY
from kybernate.sizes import format_bytes
from services.webhook.core import probes
from services.webhook.core.probes import Json, PodRefusedError, ProbeMove
from services.webhook.settings import WebhookSettings

VERSION = "admission.k8s.io/v1"
WARNING_CHARACTERS = 250
"""The API server cuts longer warnings, and drops those beyond 4096 characters in total."""
NAME = "kyb-probe"
FIRST_PORT = 9479
"""Of kyb-probe in a pod; the annotation moves it."""
PROBE_MEMORY = "40Mi"
"""Of kyb-probe: request and limit."""
STOP_GRACE_SECONDS = 300
LAST_LOGS = "FallbackToLogsOnError"
"""What a container that fails has written last stands in its status; the API server fills in ``File``."""


class ReviewError(Exception):
    """The request body is not an AdmissionReview."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """The change of a pod, and the warnings for its author."""

    patch: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()


# --- the review -------------------------------------------------------------------------------------------------------


def respond(review: object, settings: WebhookSettings, configs: Sequence[NodeConfig] = ()) -> Json:
    """Return the AdmissionReview to send back; ``configs`` are those of the nodes, if known. Raises ReviewError."""
    if not isinstance(review, Mapping) or review.get("apiVersion") != VERSION:
        raise ReviewError(f"the body is not an AdmissionReview of {VERSION}, as the API server sends it")
    request = review.get("request")
    if not isinstance(request, Mapping) or not request.get("uid"):
        raise ReviewError("the review has no request with a uid")
    response = {"uid": request["uid"], **_judged(request, settings, configs)}
    return {"apiVersion": VERSION, "kind": "AdmissionReview", "response": response}


def outcome(review: Mapping[str, Any]) -> str:
    """Return the outcome of a review that ``respond`` returned: patched, untouched or refused."""
    response = review["response"]
    return "refused" if not response["allowed"] else "patched" if "patch" in response else "untouched"


def _judged(request: Mapping[str, Any], settings: WebhookSettings, configs: Sequence[NodeConfig]) -> Json:
    kind, pod = request.get("kind") or {}, request.get("object")
    of_pods = kind.get("group", "") == "" and kind.get("kind") == "Pod" and not request.get("subResource")
    if not of_pods or request.get("operation") != "CREATE" or not isinstance(pod, Mapping):
        return {"allowed": True}
    try:
        change = mutate(pod, settings, configs)
    except PodRefusedError as error:
        return {"allowed": False, "status": {"code": 422, "reason": "Invalid", "message": f"kybernate: {error}"}}
    response: Json = {"allowed": True}
    if change.warnings:
        response["warnings"] = [f"kybernate: {text}"[:WARNING_CHARACTERS] for text in change.warnings]
    if change.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(change.patch).encode()).decode()
    return response


# --- the pod ----------------------------------------------------------------------------------------------------------


def mutate(pod: Mapping[str, Any], settings: WebhookSettings, configs: Sequence[NodeConfig] = ()) -> Mutation:
    """Point probes to kyb-probe, set memory request = limit, and let the status of an engine that failed have its last
    lines of log. Raises PodRefusedError."""
    spec = pod["spec"]
    containers = spec.get("containers") or []
    known = {name for config in configs for name in config.resources}
    seats = {at: found for at, container in enumerate(containers) if (found := _seats(container, known))}
    if not seats:
        return Mutation()
    engines = [(f"/spec/containers/{at}", containers[at]) for at in seats]
    metadata = pod.get("metadata") or {}
    own = metadata.get("annotations") or {}
    notes = parse(own)
    wrong = _problems(notes, dict.fromkeys(name for found in seats.values() for name in found), configs)
    for _, container in engines:
        who = f"container {container.get('name')}"
        wrong += [
            f"{who} sets {name}, which the seat sets: remove it, or the engine runs on another group's GPU"
            for _, name in chosen_devices(container)
        ]
        wrong += [
            f"{who} asks for {name} beside its seat, which has the GPUs: remove it" for _, name in whole_gpus(container)
        ]
    wrong += [f"label {name} is an annotation: move it there" for name in misplaced(own, metadata.get("labels"))]
    if wrong:
        raise PodRefusedError("\n".join(wrong))
    patch: list[Json] = []
    warnings: list[str] = []
    for path, container in engines:
        changes, more = _memory(path, container, notes)
        patch += changes
        warnings += more
        if container.get("terminationMessagePolicy") != LAST_LOGS:
            patch.append({"op": "add", "path": f"{path}/terminationMessagePolicy", "value": LAST_LOGS})
    inits = spec.get("initContainers") or []
    has_probe = any(one.get("name") == NAME for one in inits)
    moves = [] if has_probe else [move for path, container in engines for move in probes.found(path, container)]
    if moves:
        ports = _ports(spec, notes, 1 + len(moves))
        for move, port in zip(moves, ports[1:], strict=True):
            patch += move.patch(port)
            warnings += move.warnings
        for path, container in engines if settings.stop_hook and notes.backend == "cuda" else ():
            changes, more = _stop_hook(path, container, spec, ports[0])
            patch += changes
            warnings += more
        place, sidecar = "/spec/initContainers", _sidecar(moves, ports, settings, guaranteed=_guaranteed(spec))
        patch.append({"op": "add", "path": f"{place}/-" if inits else place, "value": sidecar if inits else [sidecar]})
    return Mutation(tuple(patch), tuple(warnings))


def _seats(container: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the resources of a container that are seats."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return [name for name in limits if name in known or name.startswith(PREFIX)]


def _ports(spec: Mapping[str, Any], notes: SeatAnnotations, count: int) -> list[int]:
    """Return ``count`` ports that the pod does not use. Raises PodRefusedError."""
    if notes.probe_port is None and spec.get("hostNetwork"):
        raise PodRefusedError(
            f"with hostNetwork the ports of {NAME} are the node's: give each pod of a node different ones with "
            f"annotation {PROBE_PORT}, {count} free ports from there, or remove hostNetwork"
        )
    taken = {
        port.get("containerPort")
        for kind in ("containers", "initContainers")
        for container in spec.get(kind) or ()
        for port in container.get("ports") or ()
    }
    port, found = notes.probe_port or FIRST_PORT, list[int]()
    while len(found) < count:
        if port not in taken:
            found.append(port)
        port += 1
    return found


def _guaranteed(spec: Mapping[str, Any]) -> bool:
    """Return whether the pod has QoS class Guaranteed, or gets it by memory request = limit; kyb-probe must keep it."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    for container in containers:
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        if "memory" not in limits or "cpu" not in limits or requests.get("cpu", limits["cpu"]) != limits["cpu"]:
            return False
    return True


def _stop_hook(
    path: str, container: Mapping[str, Any], spec: Mapping[str, Any], port: int
) -> tuple[list[Json], list[str]]:
    """Return patch and warnings for a preStop hook that waits at kyb-probe until the engine may be signalled."""
    who, lifecycle = f"container {container.get('name')}", container.get("lifecycle") or {}
    if lifecycle.get("preStop"):
        return [], [f"{who} has a preStop hook already: on driver 595 its end can hang the machine; remove it"]
    hook = {"httpGet": {"path": "/stop", "port": port, "scheme": "HTTP"}}
    change: Json = {"op": "add", "path": f"{path}/lifecycle", "value": {**lifecycle, "preStop": hook}}
    grace, warnings = spec.get("terminationGracePeriodSeconds", 30), list[str]()
    if grace < STOP_GRACE_SECONDS:
        warnings.append(
            f"{who} is checkpointed before it ends, which takes up to 30 s and 3 s per GiB of VRAM: raise "
            f"terminationGracePeriodSeconds ({grace}) to {STOP_GRACE_SECONDS} or more"
        )
    return [change], warnings


def _sidecar(moves: Sequence[ProbeMove], ports: Sequence[int], settings: WebhookSettings, *, guaranteed: bool) -> Json:
    """Return a restartable init container: it starts before the engine, ends after it, and never delays the pod."""
    uid = settings.probe_user
    user: Json = {} if uid is None else {"runAsUser": uid, "runAsGroup": uid}
    env = [
        {"name": "KYB_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "KYB_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "KYB_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "KYB_MANAGER_PORT", "value": str(settings.manager_port)},
        {"name": "KYB_HEALTH_PORT", "value": str(ports[0])},
        {"name": "KYB_PROBE_TARGETS", "value": probes.targets(moves, ports[1:])},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},  # for runtimes that expose all GPUs by default
    ]
    return {
        "name": NAME,
        "image": settings.probe_image,
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "command": [NAME],
        "env": env,
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": ports[0], "scheme": "HTTP"},
            "periodSeconds": 20,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "resources": {
            "requests": {"cpu": "100m" if guaranteed else "5m", "memory": PROBE_MEMORY},
            "limits": {"cpu": "100m" if guaranteed else "200m", "memory": PROBE_MEMORY},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            **user,
        },
        "terminationMessagePolicy": LAST_LOGS,
    }


# --- memory -----------------------------------------------------------------------------------------------------------

_SUFFIXES = {"m": Decimal("0.001"), "": Decimal(1)}
_SUFFIXES |= {letter: Decimal(10) ** (3 * power) for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{letter}i": Decimal(2) ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}


def _memory(path: str, container: Mapping[str, Any], notes: SeatAnnotations) -> tuple[list[Json], list[str]]:
    """Return patch and warnings for the memory of the container at this JSON pointer.

    A parked copy of VRAM is the container's own memory. Request = limit, because a node that has reserved less than the
    copies need would kill engines when they are parked.
    """
    resources = container.get("resources") or {}
    limit = (resources.get("limits") or {}).get("memory")
    requests = resources.get("requests")
    who, declared, warnings = f"container {container.get('name')}", notes.vram_bytes, list[str]()
    restarts = notes.backend in WITHOUT_COPY
    if limit is None:
        if not restarts:
            warnings.append(
                f"{who} has no memory limit, so the node has not reserved memory for a parked copy of its VRAM; set one"
            )
        return [], warnings
    held = quantity(limit)
    if declared and held is not None and held < declared and not restarts:
        warnings.append(
            f"{who}: its memory limit of {limit} cannot hold the {format_bytes(declared)} of VRAM that parking copies "
            f"into it ({VRAM}); raise limits.memory above {format_bytes(declared)} plus what the engine needs itself"
        )
    present = (requests or {}).get("memory")
    if present is not None and quantity(present) == held:
        return [], warnings
    if requests is None:
        return [{"op": "add", "path": f"{path}/resources/requests", "value": {"memory": limit}}], warnings
    return [{"op": "add", "path": f"{path}/resources/requests/memory", "value": limit}], warnings


def quantity(text: object) -> Decimal | None:
    """Parse a quantity of Kubernetes, e.g. 64Gi, 129e6, 128974848000m; None if it is invalid."""
    stripped = str(text).strip()
    number = stripped.rstrip("kKMGTPEim")
    suffix = stripped[len(number) :]
    try:
        return Decimal(number) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError):
        return None


def _problems(notes: SeatAnnotations, resources: Iterable[str], configs: Sequence[NodeConfig]) -> list[str]:
    """Return each problem of a new pod with its remedy. Without configurations all names are accepted.

    A running pod counts as if it did not have an annotation that cannot be used (``kyb why`` shows it).
    """
    found = [f"annotation {problem.text()}" for problem in notes.problems]
    if not configs:
        return found
    tier = tier_problem(notes.tier, sorted({tier for config in configs for tier in config.all_tiers}))
    found += [f"annotation {tier.text()}"] if tier is not None else []
    advertised = sorted({resource for config in configs for resource in config.resources})
    for resource in resources:
        if resource not in advertised:
            found.append(f"resource {resource} is advertised by no profile; {suggest(resource, advertised)}")
        elif (problem := group_problem(notes.prefer_group, resource, configs)) is not None:
            found.append(f"annotation {problem.text()}")
    return found
