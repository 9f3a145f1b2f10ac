"""The node's configuration: profiles, groups, policy. One YAML schema, read by every part.

``load`` gives a checked NodeConfig or raises ConfigError. What depends on the machine (GPUs that it lacks) is checked
by ``kybernate.topology.build_groups``. The format is described in ``docs/config.md``.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, PlainValidator, PrivateAttr, create_model
from pydantic_core import PydanticCustomError

from kybernate.config_errors import ConfigError, Document, Place, Source, Strict, dotted, read_documents, suggest
from kybernate.policy import POLICIES, Policy

__all__ = ["ConfigError", "GpuTopology", "GroupSpec", "NodeConfig", "PolicyConfig", "Profile", "load"]

PLACEMENTS = ("first-fit", "best-fit", "worst-fit", "bin-pack", "spread", "topology-aware")
_LATER_PLACEMENTS = frozenset(PLACEMENTS) - {"first-fit"}
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]+")


def _wrong(what: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("kyb", cast(Any, what), {"remedy": remedy})


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("is not text", "names are text; put it in quotes")
    if not _NAME.fullmatch(value):
        raise _wrong(
            "is not a valid name",
            "use 1 to 63 letters, digits, '-', '_' or '.', beginning and ending with a letter or digit",
        )
    return value


def _resource(value: object) -> str:
    domain, slash, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    good = slash and len(domain) <= 253 and _DOMAIN.fullmatch(domain) and _NAME.fullmatch(name)
    if not good or domain.startswith("requests.") or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        raise _wrong(
            "is not a valid extended resource name",
            "write domain/name outside of kubernetes.io, such as kyb.ai/gpu-1x-seat",
        )
    return cast(str, value)


def _gpu(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _UUID.fullmatch(value):
        return value
    raise _wrong("is not a GPU", "name it by its index (0, 1, …) or by its UUID (GPU-…)")


def _placement(value: object) -> str:
    if value in _LATER_PLACEMENTS:
        raise _wrong("comes with a later version", "use first-fit")
    if value != "first-fit":
        raise _wrong("is not a placement", suggest(str(value), PLACEMENTS))
    return "first-fit"


def _mig_strategy(value: object) -> str:
    if value in ("single", "mixed"):
        raise _wrong("comes with a later version", "use none")
    if value != "none":
        raise _wrong("is not a MIG strategy", suggest(str(value), ("none", "single", "mixed")))
    return "none"


def _overlap(value: object) -> str:
    if value == "timeshare":
        raise _wrong("groups that share GPUs are not in this version", "use none and make the groups disjoint")
    if value != "none":
        raise _wrong("is not known", suggest(str(value), ("none", "timeshare")))
    return "none"


Name = Annotated[str, PlainValidator(_name)]
Seconds = Annotated[float, Field(ge=0)]


class Profile(Strict):
    """A kind of seat: what kubelet sells, on groups of which size, how many per group."""

    name: Name
    resource: Annotated[str, PlainValidator(_resource)]
    """The extended resource that pods ask for, e.g. ``kyb.ai/gpu-2x-seat``."""
    group_size: Annotated[int, Field(ge=1, le=64)]
    """GPUs per group."""
    seats_per_group: Annotated[int, Field(ge=1, le=100)]
    active_slots: Annotated[int, Field(ge=1)] = 1
    """How many seats of one group may hold VRAM at the same time."""
    placement: Annotated[str, PlainValidator(_placement)] = "first-fit"
    """Which group gets the next seat."""
    expose_devices: Literal["group", "node"] = "group"
    """Device nodes in the container: the group's, or all of the node (needed to move a seat between groups)."""


class GroupSpec(Strict):
    """One listed group."""

    name: Name
    gpus: Annotated[tuple[Annotated[int | str, PlainValidator(_gpu)], ...], Field(min_length=1)]
    """Its GPUs, each by host index or UUID."""


class GpuTopology(Strict):
    """The listed groups. Profile sizes without any are discovered on the machine."""

    groups: tuple[GroupSpec, ...] = ()
    overlap: Annotated[str, PlainValidator(_overlap)] = "none"


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Which brain, and its constants (those of the policy's dataclass, in snake_case)."""

    name: str = "fifo-batch"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> Policy:
        """The policy, ready to decide."""
        return cast(Callable[..., Policy], POLICIES[self.name])(**self.settings)


class NodeConfig(Strict):
    """Everything that a node is told. Durations in model seconds."""

    profiles: Annotated[tuple[Profile, ...], Field(min_length=1)]
    gpu_topology: GpuTopology = GpuTopology()
    mig_strategy: Annotated[str, PlainValidator(_mig_strategy)] = "none"
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    drain_seconds: Seconds = 60.0
    """How long requests in flight may take to end before they are cut."""
    warmup: bool = True
    """Idle groups start waiting containers one after another without demand."""
    start_within_seconds: Seconds = 120.0
    """A container at the start gate goes before requests once it has waited this long."""

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def topology(self) -> GpuTopology:
        """The listed groups."""
        return self.gpu_topology

    @property
    def resources(self) -> tuple[str, ...]:
        """The extended resources of all profiles."""
        return tuple(profile.resource for profile in self.profiles)

    def error(self, place: Place, value: object, what: str, remedy: str) -> ConfigError:
        """An error about a place of the file that this was read from."""
        return self._source.error(place, value, what, remedy)


def load(path: Path | str) -> NodeConfig:
    """Read and check a file. Raises ConfigError: one message with file, line, place, value and remedy."""
    documents = read_documents(Path(path))
    document = documents[0]
    if len(documents) > 1:
        raise documents[1].source.error((), None, "a second YAML document", "keep one document in this file")
    if not isinstance(document.data, dict):
        raise document.source.error((), None, "is not a mapping", "begin with profiles: and gpuTopology:")
    rest = {key: value for key, value in document.data.items() if key != "policy"}
    config = document.validate(NodeConfig, rest)
    if "policy" in document.data:
        config = config.model_copy(update={"policy": _policy(document)})
    config._source = document.source
    _check(config)
    return config


def _policy(document: Document) -> PolicyConfig:
    """The flat mapping ``policy``: a name, and constants that must be fields of that policy's dataclass."""
    data = document.data["policy"]
    if not isinstance(data, dict):
        raise document.source.error(("policy",), data, "is not a mapping", "write name: fifo-batch below it")
    name = data.get("name", PolicyConfig.name)
    if name not in POLICIES:
        raise document.source.error(("policy", "name"), name, "no such policy", suggest(str(name), POLICIES))
    kind = cast(Any, POLICIES[name])
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        # A duration below zero would make a rule never or always hold.
        bound = Field(field.default, ge=0) if field.name.endswith("_seconds") else field.default
        fields[field.name] = (hints[field.name], bound)
    constants = create_model(f"{name} constants", __base__=_Constants, name=(str, ...), **fields)
    given = document.validate(constants, {**data, "name": name}, ("policy",))
    return PolicyConfig(name, given.model_dump(exclude={"name"}, exclude_unset=True))


class _Constants(Strict):
    model_config = ConfigDict(protected_namespaces=())


def _check(config: NodeConfig) -> None:
    """What concerns more than one field."""
    for what, entries in (("name", "profiles"), ("resource", "profiles"), ("name", "groups")):
        owners = config.profiles if entries == "profiles" else config.topology.groups
        top: Place = ("profiles",) if entries == "profiles" else ("gpuTopology", "groups")
        for index, value, first in _repeated([getattr(owner, what) for owner in owners]):
            used = f"is already the {what} of {dotted((*top, first))}"
            raise config.error((*top, index, what), value, used, f"give each its own {what}")
    for index, size, first in _repeated([profile.group_size for profile in config.profiles]):
        what = f"profile {config.profiles[first].name} has groups of this size already"
        raise config.error(("profiles", index, "groupSize"), size, what, "two profiles cannot sell the same groups")
    for index, profile in enumerate(config.profiles):
        if profile.active_slots > profile.seats_per_group:
            what = f"more active slots than seats ({profile.seats_per_group})"
            remedy = "lower activeSlots or raise seatsPerGroup"
            raise config.error(("profiles", index, "activeSlots"), profile.active_slots, what, remedy)
    _check_groups(config)


def _check_groups(config: NodeConfig) -> None:
    sizes = {profile.group_size for profile in config.profiles}
    owners: dict[int | str, str] = {}
    for index, group in enumerate(config.topology.groups):
        place: Place = ("gpuTopology", "groups", index, "gpus")
        for position, gpu, _ in _repeated(list(group.gpus)):
            raise config.error((*place, position), gpu, f"stands twice in group {group.name}", "name each GPU once")
        for position, gpu in enumerate(group.gpus):
            if gpu in owners:
                what = f"groups {owners[gpu]} and {group.name} share this GPU"
                raise config.error((*place, position), gpu, what, "groups must be disjoint; take it out of one")
            owners[gpu] = group.name
        if len(group.gpus) not in sizes:
            what = f"group {group.name} has {len(group.gpus)} GPUs and no profile has this groupSize"
            have = ", ".join(str(size) for size in sorted(sizes))
            raise config.error(place, group.gpus, what, f"add such a profile, or give it {have} GPUs")


def _repeated(values: list[Any]) -> Iterator[tuple[int, Any, int]]:
    """Each value that stands there again: its index, itself, the index of the first."""
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value in first:
            yield index, value, first[value]
        first.setdefault(value, index)
