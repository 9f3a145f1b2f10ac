"""Pods as people write them for the fake kubelet and the demo: plain v1 Pods in YAML, each with one seat.

Only what Kybernate needs is looked at here; everything else of a Pod is kept as it is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kybernate.annotations import (
    BACKEND,
    PIN,
    PORT,
    PREFER_GROUP,
    PREFIX,
    VRAM,
    chosen_devices,
    group_problem,
    misplaced,
    parse,
    tier_problem,
    whole_gpus,
    with_options,
)
from kybernate.config import NodeConfig
from kybernate.config_errors import ConfigError, Document, Place, read_documents, refuse, suggest
from kybernate.engines import ENGINE_BACKENDS, RESTART
from kybernate.topology import Group

_WORKLOADS = ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet")
"""What makes pods, a DaemonSet one on each node."""
_PORT_OPTION = re.compile(r"(?:^|\s)(--port|-p)[=\s](\d{1,5})(?!\d)")


@dataclass(frozen=True, slots=True)
class StackPod:
    """One pod that asks for a seat."""

    namespace: str
    name: str
    model: str
    resource: str
    container: str
    """The container that has the seat."""
    port: int
    replicas: int
    """How many pods of it there will be."""
    vram_bytes: int | None
    """As declared, over all GPUs of the group; None when it is not."""
    annotations: Mapping[str, str]
    manifest: Mapping[str, Any]
    """The whole Pod."""


def load_pods(
    path: Path | str, config: NodeConfig, backend: Literal["fake", "cuda", "any"] = "fake"
) -> tuple[StackPod, ...]:
    """Read and check a file of Pods (several documents, or a List), all parked by ``backend`` or by restart. Raises
    ConfigError. ``any``: for a cluster, where Deployments and their like count as the Pods that they make. An empty
    file has none."""
    pods, errors = dict[tuple[str, str], StackPod](), list[ConfigError]()
    for document in read_documents(Path(path), empty=True):
        for place, manifest in manifests(document):
            try:
                pod = _pod(document, place, manifest, config, backend)
            except ConfigError as error:
                errors.append(error)
                continue
            if pods.setdefault((pod.namespace, pod.name), pod) is not pod:
                what, remedy = f"namespace {pod.namespace} has this pod already", "give each pod its own name"
                errors.append(document.source.error((*place, "metadata", "name"), pod.name, what, remedy))
    refuse(errors)
    return tuple(pods.values())


def engine_ports(pods: Sequence[StackPod]) -> dict[int, str]:
    """Ports of the machine that engines have, each with its pod."""
    return {pod.port: pod.name for pod in pods if (pod.manifest.get("spec") or {}).get("hostNetwork")}


def port_options(container: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return what may be ports in a container's command line, each with its option; ``-p`` has other meanings, too."""
    words = [str(word) for part in ("command", "args") for word in container.get(part) or ()]
    return [(option, int(port)) for option, port in _PORT_OPTION.findall(" ".join(words))]


def other_ports(pods: Sequence[StackPod]) -> list[str]:
    """Pods whose engine's command line names only other ports than the one at which it is called."""
    found = list[str]()
    for pod in pods:
        what = f"pod {pod.name}: its engine is called at {PORT}, which is {pod.port}, and its command has"
        for one in pod.manifest["spec"]["containers"]:
            ports = port_options(one) if one["name"] == pod.container else []
            if pod.port not in {port for _, port in ports}:
                found += [f"{what} {option} {port}" for option, port in ports if option == "--port"]
    return found


def check_seats(path: Path | str, pods: Sequence[StackPod], groups: Sequence[Group]) -> None:
    """Raise ConfigError when more pods ask for a resource than there are seats of it, or are pinned than are active."""
    for resource in dict.fromkeys(pod.resource for pod in pods):
        asking = [pod for pod in pods if pod.resource == resource]
        there = [group for group in groups if group.profile.resource == resource]
        asked, seats = sum(pod.replicas for pod in asking), sum(len(group.seat_ids) for group in there)
        if asked > seats:
            what = f"{asked} pods ask for it and this machine has {seats} seats of it"
            raise ConfigError(f"{path}: {resource}: {what}; remove pods or raise seatsPerGroup of its profile")
        pinned = sum(pod.replicas for pod in asking if parse(dict(pod.annotations)).pin)
        if pinned > (slots := sum(group.slots for group in there)):
            what = f"{pinned} of its pods are pinned and its groups run {slots} at a time, so that others never serve"
            raise ConfigError(f"{path}: {resource}: {what}; take {PIN} from some")


def listed_groups(config: NodeConfig) -> list[Group]:
    """The groups that a configuration lists, without their GPUs: these are of a machine."""
    return [
        Group(spec.name, "", profile, (), ("",) * profile.seats_per_group, profile.slots)
        for profile in config.profiles
        for spec in config.gpu_topology.groups
        if len(spec.gpus) == profile.group_size and config.mig_strategy == "none"
    ]


def check_groups(path: Path | str, pods: Sequence[StackPod], groups: Sequence[Group]) -> None:
    """Raise ConfigError when a pod prefers a group that its seat cannot be on."""
    for pod in pods:
        wanted = str(pod.annotations.get(PREFER_GROUP, ""))
        names = {group.name for group in groups if group.profile.resource == pod.resource}
        if wanted and wanted.rpartition("/")[2] not in names:
            what = f"is no group of {pod.resource}; {suggest(wanted.rpartition('/')[2], names)}"
            raise ConfigError(f"{path}: pod {pod.name}: {PREFER_GROUP}: {wanted!r}: {what}")


def check_vram(path: Path | str, pods: Sequence[StackPod], groups: Sequence[Group]) -> None:
    """Raise ConfigError when a pod declares more memory than any group of its kind has."""
    for pod in pods:
        sizes = [group.memory_bytes for group in groups if group.profile.resource == pod.resource]
        if pod.vram_bytes is not None and pod.vram_bytes > max(sizes, default=0):
            have = f"{max(sizes, default=0) / 2**30:g} GiB"
            raise ConfigError(
                f"{path}: pod {pod.name}: {VRAM}: {pod.annotations[VRAM]!r}: "
                f"the largest group of {pod.resource} has {have}; lower it or ask for more GPUs"
            )


def manifests(document: Document) -> Iterator[tuple[Place, Any]]:
    """Every object of a document, and its place there: the document itself, or the items of a List."""
    data = document.data
    if isinstance(data, dict) and data.get("kind") == "List" and isinstance(data.get("items"), tuple):
        for index, item in enumerate(data["items"]):
            yield ("items", index), item
    else:
        yield (), data


def _template(document: Document, place: Place, manifest: dict[str, Any]) -> tuple[Place, dict[str, Any], int]:
    """The Pod that a Deployment or its like makes, its place, and how often."""
    of, spec = (_mapping(document, manifest, place, key) for key in ("metadata", "spec"))
    replicas = spec.get("replicas", 1)
    if not isinstance(replicas, int) or replicas < 0:
        raise document.source.error((*place, "spec", "replicas"), replicas, "is no number of pods", "write one")
    template = _mapping(document, spec, (*place, "spec"), "template")
    place = (*place, "spec", "template")
    own = _mapping(document, template, place, "metadata")
    _refuse_misplaced(document, (*place[:-2], "metadata", "annotations"), own, of.get("annotations"))
    named = {**own, "name": of.get("name"), "namespace": of.get("namespace", "default")}
    return place, {**template, "apiVersion": "v1", "kind": "Pod", "metadata": named}, replicas


def _refuse_misplaced(document: Document, at: Place, metadata: Mapping[str, Any], elsewhere: object) -> None:
    """Raise ConfigError for an annotation that stands elsewhere than among those of the Pod."""
    own = metadata.get("annotations")
    for name in misplaced(own if isinstance(own, dict) else {}, elsewhere):
        what, remedy = "has no effect there", "move it to metadata.annotations of the Pod or of its template"
        raise document.source.error((*at, name), None, what, remedy)


def _pod(document: Document, place: Place, manifest: Any, config: NodeConfig, backend: str) -> StackPod:
    source, replicas = document.source, 1
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if backend == "any" and kind in _WORKLOADS and manifest.get("apiVersion") == "apps/v1":
        place, manifest, replicas = _template(document, place, manifest)
        kind = "Pod"
    if kind != "Pod" or manifest.get("apiVersion") != "v1":
        at = (*place, "kind") if kind is not None and kind != "Pod" else place
        or_more = f", or {' or '.join(_WORKLOADS)} of apps/v1" if backend == "any" else ""
        raise source.error(at, kind, "is not a Pod", f"write v1 Pods (apiVersion: v1, kind: Pod){or_more}")
    metadata = _mapping(document, manifest, place, "metadata")
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise source.error((*place, "metadata", "name"), name, "is no name", "give the pod a name (text)")
    errors: list[ConfigError] = []
    container = resource = ""
    try:
        container, resource = _seat(document, manifest, place, config)
    except ConfigError as error:
        errors.append(error)
    _refuse_misplaced(document, (*place, "metadata", "labels"), metadata, metadata.get("labels"))
    notes = (*place, "metadata", "annotations")
    annotations = metadata.get("annotations") or {}
    if not isinstance(annotations, dict):
        refuse([*errors, source.error(notes, None, "is not a mapping", "write key: value lines below it")])
    errors += (
        source.error((*notes, key), value, "annotations are text", "put the value in quotes")
        for key, value in annotations.items()
        if not isinstance(value, str)
    )
    own = {key: value for key, value in annotations.items() if isinstance(value, str)}
    containers = (manifest.get("spec") or {}).get("containers") or () if container else ()
    implied, replaced = with_options(own, next((one for one in containers if one.get("name") == container), {}))
    parsed = parse(implied)
    in_config = group_problem(parsed.prefer_group, resource, [config]) if resource else None
    errors += (
        source.error((*notes, problem.name), problem.value, problem.what, problem.remedy)
        for problem in (tier_problem(parsed.tier, config.all_tiers), in_config, *parsed.problems, *replaced)
        if problem is not None
    )
    wrong = any(problem.name == BACKEND for problem in parsed.problems)
    if not wrong and backend != "any" and parsed.backend not in (backend, RESTART, *ENGINE_BACKENDS):
        value = annotations.get(BACKEND)
        cannot = "cannot park on fake GPUs" if backend == "fake" else "parks on fake GPUs only"
        what = "is missing (the default is cuda)" if value is None else cannot
        errors.append(source.error((*notes, BACKEND), value, what, f"write {BACKEND}: {backend}"))
    refuse(errors)
    return StackPod(
        namespace=str(metadata.get("namespace", "default")),
        name=name,
        model=parsed.model or name,
        resource=resource,
        container=container,
        port=parsed.port,
        replicas=replicas,
        vram_bytes=parsed.vram_bytes,
        annotations=annotations,
        manifest=manifest,
    )


def _seat(document: Document, manifest: Mapping[str, Any], place: Place, config: NodeConfig) -> tuple[str, str]:
    """The one container that asks for one seat, and the resource that it asks for."""
    spec = _mapping(document, manifest, place, "spec")
    at = (*place, "spec", "containers")
    containers = spec.get("containers")
    if not isinstance(containers, tuple) or not containers:
        raise document.source.error(at, None, "a Pod needs containers", "list at least one")
    found: list[tuple[Place, str, str]] = []
    for index, container in enumerate(containers):
        if not isinstance(container, dict) or not isinstance(container.get("name"), str):
            raise document.source.error((*at, index), None, "is no container", "give it a name: (text)")
        for key in ("command", "args", "env"):
            if not isinstance(container.get(key) or (), tuple):
                raise document.source.error((*at, index, key), None, "is not a list", "write a line with - for each")
        for where, key, quantity in _asked(container, (*at, index)):
            if key not in config.resources and not key.startswith(PREFIX):
                continue
            if key not in (container["resources"].get("limits") or {}):
                raise document.source.error(where, None, "is asked for without a limit", "write it below limits")
            for part, other in whole_gpus(container):
                of = (*at, index, "resources", part, other)
                raise document.source.error(of, None, "is a GPU beside that of the seat", "remove it")
            if key not in config.resources:
                remedy = suggest(key, config.resources)
                raise document.source.error(where, None, "no profile advertises this resource", remedy)
            if str(quantity) != "1":
                raise document.source.error(where, quantity, "a container has exactly one seat", "write 1")
            for one, name in chosen_devices(container):
                raise document.source.error(
                    (*at, index, "env", one), name, "chooses another GPU than the seat's", "remove it: the seat sets it"
                )
            if (container["name"], key) not in [(owner, resource) for _, owner, resource in found]:
                found.append((where, container["name"], key))
    for index, one in enumerate(spec.get("initContainers") or ()):
        for where, key, _ in _asked(one, (*place, "spec", "initContainers", index)):
            if key in config.resources or key.startswith(PREFIX):
                raise document.source.error(where, None, "is asked for by an init container", "ask in the engine's own")
    if not found:
        known = " or ".join(config.resources)
        raise document.source.error(at, None, "no container asks for a seat", f"add resources.limits {known}: 1")
    if len(found) > 1:
        what = f"a second seat in this pod ({found[0][1]} asks for {found[0][2]})"
        raise document.source.error(found[1][0], None, what, "a pod has one seat; remove one")
    return found[0][1], found[0][2]


def _asked(container: Mapping[str, Any], place: Place) -> Iterator[tuple[Place, str, object]]:
    resources = container.get("resources")
    for part in ("limits", "requests"):
        wanted = resources.get(part) if isinstance(resources, dict) else None
        for key, quantity in wanted.items() if isinstance(wanted, dict) else ():
            yield (*place, "resources", part, key), str(key), quantity


def _mapping(document: Document, data: Mapping[str, Any], place: Place, key: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise document.source.error((*place, key), None, "is missing or not a mapping", f"a Pod needs {key}:")
    return value
