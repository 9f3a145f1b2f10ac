"""What is changed of a pod that asks for a seat, as a JSON Patch. Pure.

Done once: a pod that has a container ``kyb-probe`` keeps it, and its probes stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kybernate.annotations import PREFIX, PROBE_PORT, SeatAnnotations, parse
from services.webhook import probes
from services.webhook.memory import memory
from services.webhook.probes import Move, RefusedError

__all__ = ["Mutation", "Options", "RefusedError", "mutate"]

NAME = "kyb-probe"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What does not depend on the pod."""

    image: str
    manager_port: int = 9471
    first_port: int = 9479
    user: int | None = 65532
    """None: the namespace gives one."""
    memory: str = "40Mi"
    prefixes: tuple[str, ...] = (PREFIX,)


@dataclass(frozen=True, slots=True)
class Mutation:
    """The change, and what the person who made the pod should know."""

    patch: tuple[Json, ...] = ()
    warnings: tuple[str, ...] = ()


def mutate(pod: Mapping[str, Any], options: Options) -> Mutation:
    """Probes to kyb-probe, memory request = limit. Raises RefusedError, whose text says what to change."""
    spec = pod["spec"]
    containers = spec.get("containers") or []
    engines = [at for at, container in enumerate(containers) if _has_seat(container, options.prefixes)]
    patch: list[Json] = []
    warnings: list[str] = []
    notes = parse((pod.get("metadata") or {}).get("annotations") or {})
    if engines:
        warnings += [f"annotation {problem.text()}" for problem in notes.problems]
    for at in engines:
        changes, more = memory(f"/spec/containers/{at}", containers[at], notes)
        patch += changes
        warnings += more
    inits = spec.get("initContainers") or []
    if engines and not any(one.get("name") == NAME for one in inits):
        moves = [move for at in engines for move in probes.found(f"/spec/containers/{at}", containers[at])]
        if moves:
            ports = _ports(spec, notes, options, 1 + len(moves))
            for move, port in zip(moves, ports[1:], strict=True):
                patch += move.patch(port)
                warnings += move.warnings
            sidecar = _sidecar(moves, ports, options, guaranteed=_guaranteed(spec))
            patch.append(
                {"op": "add", "path": "/spec/initContainers/-", "value": sidecar}
                if inits
                else {"op": "add", "path": "/spec/initContainers", "value": [sidecar]}
            )
    return Mutation(tuple(patch), tuple(warnings))


def _has_seat(container: Mapping[str, Any], prefixes: Sequence[str]) -> bool:
    limits = (container.get("resources") or {}).get("limits") or {}
    return any(name.startswith(tuple(prefixes)) for name in limits)


def _ports(spec: Mapping[str, Any], notes: SeatAnnotations, options: Options, count: int) -> list[int]:
    """So many ports that nothing in the pod names. Raises RefusedError."""
    for problem in notes.problems:
        if problem.name == PROBE_PORT:
            raise RefusedError(f"annotation {problem.text()}")
    if notes.probe_port is None and spec.get("hostNetwork"):
        raise RefusedError(
            f"with hostNetwork the ports of {NAME} are the node's: give each pod of a node its own with annotation "
            f"{PROBE_PORT}, {count} free ports from there, or take hostNetwork away"
        )
    taken = {
        port.get("containerPort")
        for kind in ("containers", "initContainers")
        for container in spec.get(kind) or ()
        for port in container.get("ports") or ()
    }
    port, found = notes.probe_port or options.first_port, list[int]()
    while len(found) < count:
        if port not in taken:
            found.append(port)
        port += 1
    return found


def _guaranteed(spec: Mapping[str, Any]) -> bool:
    """Whether the pod has QoS class Guaranteed, or gets it by memory request = limit; kyb-probe must not spoil it."""
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    for container in containers:
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        if "memory" not in limits or "cpu" not in limits or requests.get("cpu", limits["cpu"]) != limits["cpu"]:
            return False
    return True


def _sidecar(moves: Sequence[Move], ports: Sequence[int], options: Options, *, guaranteed: bool) -> Json:
    """A restartable init container: it starts before the engine, ends after it, and never holds the pod up."""
    user: Json = {} if options.user is None else {"runAsUser": options.user, "runAsGroup": options.user}
    env = [
        {"name": "KYB_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
        {"name": "KYB_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "KYB_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "KYB_MANAGER_PORT", "value": str(options.manager_port)},
        {"name": "KYB_HEALTH_PORT", "value": str(ports[0])},
        {"name": "KYB_PROBE_TARGETS", "value": probes.targets(moves, ports[1:])},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},  # where the pod's runtime gives GPUs to everybody
    ]
    return {
        "name": NAME,
        "image": options.image,
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
            "requests": {"cpu": "100m" if guaranteed else "5m", "memory": options.memory},
            "limits": {"cpu": "100m" if guaranteed else "200m", "memory": options.memory},
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
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
