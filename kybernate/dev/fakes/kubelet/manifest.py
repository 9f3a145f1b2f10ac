"""Pod manifests: the parts of v1 that the fake kubelet knows, and the scheduler's arithmetic on their resources."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kybernate.annotations import PORT
from kybernate.config_errors import Place, dotted
from kybernate.files import read

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NAMES = "use small letters, digits and '-'"
_POLICIES = ("Always", "OnFailure", "Never")
DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_PORT = 8000


class ManifestError(Exception):
    """A pod cannot be run as written; the text says where, what, and what to do."""

    def __init__(self, where: str, place: Place, what: str, remedy: str) -> None:
        super().__init__(": ".join(part for part in (where, dotted(place), f"{what}; {remedy}") if part))
        self.place, self.what, self.remedy = place, what, remedy


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One variable: a value that may refer to others as ``$(NAME)``, or a field of the pod."""

    name: str
    value: str = ""
    field_path: str | None = None


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """One container: what is run, with which devices."""

    name: str
    image: str
    command: tuple[str, ...]
    """Command and args in one."""
    env: tuple[EnvVar, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    """Extended resources only, by name."""
    port: int | None = None
    init: bool = False
    sidecar: bool = False
    """An init container that keeps running (restartPolicy Always)."""


@dataclass(frozen=True, slots=True)
class PodSpec:
    """One pod as its author wrote it. Init containers come first, in order."""

    namespace: str
    name: str
    containers: tuple[ContainerSpec, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    restart_policy: str = "Always"
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    node_name: str = ""
    """Set: the scheduler is passed over and kubelet admits at once, whatever the node has."""
    host_network: bool = False
    """It has the node's address, and its ports must differ from other such pods'."""
    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def ports(self) -> tuple[int, ...]:
        """On which it listens: those of its containers and its annotation."""
        annotated = self.annotations.get(PORT, "")
        ports = {container.port for container in self.containers if container.port is not None}
        ports |= {int(annotated)} if annotated.isdigit() else set()
        return tuple(sorted(ports)) or (DEFAULT_PORT,)


def load(path: Path) -> tuple[PodSpec, ...]:
    """All pods of a YAML file (several documents and Lists are fine). Raises ManifestError."""
    try:
        text = read(path).decode()
    except OSError as error:
        raise ManifestError(str(path), (), error.strerror or str(error), "name a file with v1 Pods") from error
    return parse(text, str(path))


def parse(text: str, place: str) -> tuple[PodSpec, ...]:
    """All pods of a YAML text. Raises ManifestError naming ``place``."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}: line {mark.line + 1}" if mark else place
        raise ManifestError(where, (), f"no valid YAML: {getattr(error, 'problem', error)}", "correct it") from error
    pods = [
        parse_pod(item, f"{place}: document {number}{where}")
        for number, document in enumerate(documents, 1)
        for where, item in _items(document)
    ]
    seen: set[str] = set()
    for pod in pods:
        if pod.key in seen:
            raise ManifestError(place, (), f"two pods are called {pod.key}", "give each its own metadata.name")
        seen.add(pod.key)
    return tuple(pods)


def parse_pod(document: object, place: str) -> PodSpec:
    """One v1 Pod. Raises ManifestError."""
    pod = _ManifestReader(document, place)
    if pod.text("kind") != "Pod" or pod.text("apiVersion") != "v1":
        raise pod.wrong((), f"is {document!r:.60}", "only kind: Pod with apiVersion: v1 can be run here")
    meta, spec = pod.reader("metadata"), pod.reader("spec")
    namespace, name = meta.text("namespace", "default"), meta.text("name")
    for field_name, value in (("namespace", namespace), ("name", name)):
        if not _DNS_LABEL.fullmatch(value):
            raise meta.wrong((field_name,), repr(value), _NAMES)
    policy = spec.text("restartPolicy", "Always")
    if policy not in _POLICIES:
        raise spec.wrong(("restartPolicy",), repr(policy), f"known are {', '.join(_POLICIES)}")
    inits = [_container(reader, init=True) for reader in spec.readers("initContainers")]
    mains = [_container(reader, init=False) for reader in spec.readers("containers")]
    if not mains:
        raise spec.wrong(("containers",), "is empty", "a pod needs at least one container")
    names = [container.name for container in (*inits, *mains)]
    if len(set(names)) < len(names):
        raise spec.wrong((), "two containers have the same name", f"names are {', '.join(names)}")
    return PodSpec(
        namespace=namespace,
        name=name,
        containers=(*inits, *mains),
        labels=meta.texts("labels"),
        annotations=meta.texts("annotations"),
        restart_policy=policy,
        grace_seconds=spec.number("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS),
        node_name=spec.text("nodeName", ""),
        host_network=spec.flag("hostNetwork"),
        document=document if isinstance(document, dict) else {},
    )


def _items(document: object) -> Iterator[tuple[str, object]]:
    if isinstance(document, dict) and document.get("kind") in ("List", "PodList"):
        for number, item in enumerate(document.get("items") or ()):
            yield f" items[{number}]", item
    else:
        yield "", document


def _container(reader: "_ManifestReader", *, init: bool) -> ContainerSpec:
    name = reader.text("name")
    if not _DNS_LABEL.fullmatch(name):
        raise reader.wrong(("name",), repr(name), _NAMES)
    command = (*reader.strings("command"), *reader.strings("args"))
    if not reader.strings("command"):
        raise reader.wrong(("command",), "is missing", "a local process has no image to take it from")
    ports = [port.number("containerPort", None) for port in reader.readers("ports")]
    return ContainerSpec(
        name=name,
        image=reader.text("image", ""),
        command=command,
        env=tuple(_env(entry) for entry in reader.readers("env")),
        limits=_limits(reader.reader("resources", optional=True)),
        port=int(ports[0]) if ports else None,
        init=init,
        sidecar=init and reader.text("restartPolicy", "") == "Always",
    )


def _env(reader: "_ManifestReader") -> EnvVar:
    name = reader.text("name")
    if "valueFrom" not in reader.data:
        return EnvVar(name, reader.text("value", ""))
    path = reader.reader("valueFrom").reader("fieldRef").text("fieldPath")
    known = ("status.podIP", "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName")
    if path not in known:
        raise reader.wrong(("valueFrom", "fieldRef"), repr(path), f"this kubelet knows {', '.join(known)}")
    return EnvVar(name, field_path=path)


def _limits(reader: "_ManifestReader") -> dict[str, int]:
    """Extended resources; for these the API server wants whole numbers and requests equal to limits."""
    limits, requests = reader.reader("limits", optional=True), reader.reader("requests", optional=True)
    found: dict[str, int] = {}
    for resource, quantity in {**requests.data, **limits.data}.items():
        if "/" not in str(resource):
            continue
        try:
            count = int(str(quantity))
        except ValueError:
            count = -1
        if count < 0:
            raise limits.wrong((str(resource),), repr(quantity), "it must be a whole number")
        if str(requests.data.get(resource, quantity)) != str(limits.data.get(resource)):
            raise reader.wrong((), f"requests and limits of {resource} must be equal", "set limits only")
        if count:
            found[str(resource)] = count
    return found


class _ManifestReader:
    """A mapping of the document and where it stands in it. Lists may be tuples."""

    def __init__(self, data: object, where: str, place: Place = ()) -> None:
        self.where = where
        self.place = place
        if not isinstance(data, dict):
            raise self.wrong((), f"is {data!r:.60}", "it must be a mapping")
        self.data: dict[Any, Any] = data

    def wrong(self, inside: Place, what: str, remedy: str) -> ManifestError:
        """The error to raise about a place below this one."""
        return ManifestError(self.where, (*self.place, *inside), what, remedy)

    def _get(self, name: str, default: object, kinds: tuple[type, ...], what: str) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.wrong((name,), "is missing", f"it must be {what}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong((name,), f"is {value!r:.60}", f"it must be {what}")
        return value

    def text(self, name: str, default: object = None) -> str:
        """A string; required unless a default is given."""
        return str(self._get(name, _REQUIRED if default is None else default, (str,), "text (in quotes)"))

    def number(self, name: str, default: float | None) -> float:
        """A number that is not negative."""
        value = float(self._get(name, _REQUIRED if default is None else default, (int, float), "a number"))
        if value < 0:
            raise self.wrong((name,), f"is {value}", "it must not be negative")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false when absent."""
        return bool(self._get(name, False, (bool,), "true or false"))

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        values = self._get(name, [], (list, tuple), "a list of texts")
        for number, value in enumerate(values):
            if not isinstance(value, str):
                raise self.wrong((name, number), f"is {value!r:.60}, must be text", "put it in quotes")
        return tuple(values)

    def texts(self, name: str) -> dict[str, str]:
        """A mapping of texts; empty when absent."""
        values = self._get(name, {}, (dict,), "a mapping of texts")
        for key, value in values.items():
            if not isinstance(value, str):
                raise self.wrong((name, key), f"is {value!r:.60}, must be text", "put it in quotes")
        return dict(values)

    def reader(self, name: str, *, optional: bool = False) -> "_ManifestReader":
        """A mapping inside this one."""
        data = self._get(name, {} if optional else _REQUIRED, (dict,), "a mapping")
        return _ManifestReader(data, self.where, (*self.place, name))

    def readers(self, name: str) -> list["_ManifestReader"]:
        """A list of mappings; empty when absent."""
        values = self._get(name, [], (list, tuple), "a list")
        return [_ManifestReader(value, self.where, (*self.place, name, number)) for number, value in enumerate(values)]


_REQUIRED = object()


def lacking(spec: PodSpec, bound: Iterable[PodSpec], allocatable: Mapping[str, int]) -> str:
    """The first resource of which too little is left, in the scheduler's words; empty when the pod fits."""
    used: dict[str, int] = {}
    for other in bound:
        for resource, count in wanted(other).items():
            used[resource] = used.get(resource, 0) + count
    for resource, count in wanted(spec).items():
        if allocatable.get(resource, 0) - used.get(resource, 0) < count:
            return f"0/1 nodes are available: 1 Insufficient {resource}."
    return ""


def wanted(spec: PodSpec) -> dict[str, int]:
    """What the scheduler counts: the sum over app containers and sidecars, or the largest init container."""
    total: dict[str, int] = {}
    for container in spec.containers:
        if not container.init or container.sidecar:
            for resource, count in container.limits.items():
                total[resource] = total.get(resource, 0) + count
    for container in spec.containers:
        if container.init and not container.sidecar:
            for resource, count in container.limits.items():
                total[resource] = max(total.get(resource, 0), count)
    return total
