"""The node's configuration as data: profiles, groups, policy. Pure; what a field must look like is in ``fields``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PrivateAttr

from kybernate.config.fields import (
    Claim,
    GpuName,
    HostMemory,
    MigProfile,
    Name,
    Placement,
    Resource,
    Seconds,
    Size,
)
from kybernate.config_errors import ConfigError, Place, Source, Strict
from kybernate.policy import POLICIES, Policy
from kybernate.sizes import MOST_SECONDS

IGNORED_XIDS = (13, 31, 43, 45, 68, 109)
"""Faults of applications, not of GPUs; NVIDIA's own plugin ignores the same."""


class Profile(Strict):
    """A kind of seat: its extended resource, the size of its groups, and the seats per group."""

    name: Name
    resource: Resource
    """The extended resource that pods ask for, e.g. ``kyb.ai/gpu-2x-seat``."""
    group_size: Annotated[int, Field(ge=1, le=64)]
    """GPUs per group."""
    seats_per_group: Annotated[int, Field(ge=1, le=100)]
    active_slots: Annotated[int, Field(ge=1)] = 1
    """How many seats of one group may hold VRAM at the same time."""
    packing: Literal["slots", "memory"] = "slots"
    """``memory``: as many seats of a group are active together as their VRAM fits, at most ``active_slots`` if that is
    written."""
    memory_reserve: Annotated[Size, Field(json_schema_extra={"default": "1GiB"})] = 2**30
    """With ``packing: memory``: bytes of each GPU that are given to no seat."""
    placement: Placement = "first-fit"
    """Which group gets the next seat."""
    expose_devices: Literal["group", "node"] = "group"
    """Device nodes in the container: those that its seat may use, or all of the node."""
    rebalance: bool | None = None
    """Whether its groups are one pool: their seats may move to each other's GPUs, where these are alike
    (``topology.peers``). A container then has the device nodes of all of these. Where nothing is written, groups of
    whole GPUs are one, MIG instances none."""
    mig_profile: MigProfile | None = None
    """With ``migStrategy: mixed``: its groups are the MIG instances of this profile, e.g. ``3g.40gb``, one each."""

    @property
    def packs(self) -> bool:
        """Whether its seats share the memory of their group."""
        return self.packing == "memory"

    @property
    def slots(self) -> int:
        """The most seats of one group that are active together."""
        return self.seats_per_group if self.packs and "active_slots" not in self.model_fields_set else self.active_slots


class GroupSpec(Strict):
    """One listed group."""

    name: Name
    gpus: Annotated[tuple[GpuName, ...], Field(min_length=1)]
    """Its GPUs, each by host index or UUID."""


class GpuTopology(Strict):
    """The listed groups. Profile sizes without any are discovered on the machine."""

    groups: tuple[GroupSpec, ...] = ()
    overlap: Literal["none", "timeshare"] = "none"
    """``timeshare``: groups may lie inside each other (4 ⊃ 2 ⊃ 1) and take turns on the GPUs that they share."""


class Lanes(Strict):
    """How many switches copy memory side by side at full speed."""

    gpus: tuple[GpuName, ...] = ()
    """The GPUs that share a PCIe switch or the host's memory, each by host index or UUID; none: all."""
    transfers: Annotated[int, Field(ge=1, le=1024)]
    """So many at a time; more begin in turn."""


class HealthConfig(Strict):
    """What makes the seats of a GPU unhealthy, and how they become healthy again."""

    ignored_xids: tuple[Annotated[int, Field(ge=1)], ...] = IGNORED_XIDS
    """XID events that change nothing."""
    recovery_reads: Annotated[int, Field(ge=1, le=1000)] = 2
    """Probation: so many good readings in a row before the seats of a faulty GPU are offered again."""


class Tier(Strict):
    """The SLO of a tier's requests, and the weight of their waiting."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Of one waiting request."""
    slo_seconds: Annotated[float, Field(gt=0)] = 20.0
    """How long a request may wait."""


class TierChanges(Strict):
    """A tier as it is written: what is left out stays as it is in the tier of that name, else in ``standard``."""

    weight: Annotated[float | None, Field(gt=0, le=1000)] = None
    slo_seconds: Annotated[float | None, Field(gt=0, le=MOST_SECONDS)] = None


STANDARD = "standard"
"""The tier of pods that name none."""
TIERS: Mapping[str, Tier] = {
    STANDARD: Tier(),
    "gold": Tier(weight=2.0, slo_seconds=12.0),
    "silver": Tier(weight=1.0, slo_seconds=30.0),
    "bronze": Tier(weight=0.5, slo_seconds=120.0),
}
"""The tiers of every configuration. Weights are mild on purpose: 4 to 0.25 would starve the lowest tier in overload."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """A policy's name and its constants (fields of the policy's dataclass, in snake_case)."""

    name: str = "kyb-balanced"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> Policy:
        """The policy, ready to decide."""
        return cast(Callable[..., Policy], POLICIES[self.name])(**self.settings)


class NodeConfig(Strict):
    """The configuration of a node. Durations in model seconds."""

    profiles: Annotated[tuple[Profile, ...], Field(min_length=1)]
    gpu_topology: GpuTopology = GpuTopology()
    mig_strategy: Literal["none", "single", "mixed"] = "none"
    """none: GPUs in MIG mode are not offered; single: all GPUs are cut alike; mixed: profiles name MIG profiles."""
    device_list_strategy: Literal["auto", "envvar", "cdi-cri"] = "auto"
    """How a container gets its GPUs: variables and device nodes, CDI names, or what fits this node."""
    health: HealthConfig = HealthConfig()
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    tiers: dict[Name, TierChanges] = Field(default_factory=dict)
    """Changes to the known tiers, and further ones."""
    reserved: dict[Claim, tuple[Name, ...]] = Field(default_factory=dict)
    """Namespaces that alone may have a model's name (``model/NAME``), a tier (``tier/NAME``) or pins (``pin``)."""
    drain_seconds: Seconds = 60.0
    """How long requests in flight may take to end before they are cut."""
    warmup: bool = True
    """Idle groups start waiting containers one after another without demand."""
    start_within_seconds: Seconds = 120.0
    """A container at the start gate goes before requests once it has waited this long."""

    host_memory: HostMemory = "off"
    """What all seats may take of the host's memory: a size; ``auto``: the machine's, less a tenth (at least 4 GiB);
    ``off``: no limit."""

    lanes: tuple[Lanes, ...] = ()
    """What host memory and PCIe switches carry; without, all switches run side by side."""

    _source: Source = PrivateAttr(default_factory=Source)
    _chosen: str = PrivateAttr(default="default")
    _note: str = PrivateAttr(default="")

    @property
    def resources(self) -> tuple[str, ...]:
        """The extended resources of all profiles."""
        return tuple(profile.resource for profile in self.profiles)

    @property
    def all_tiers(self) -> dict[str, Tier]:
        """Every tier by name."""
        found = dict(TIERS)
        for name in sorted(self.tiers, key=lambda name: name != STANDARD):  # the others build on it
            changes = self.tiers[name].model_dump(exclude_none=True)
            found[name] = found.get(name, found[STANDARD]).model_copy(update=changes)
        return found

    @property
    def chosen(self) -> str:
        """The name of this configuration among those of its folder; ``default`` of a file."""
        return self._chosen

    @property
    def note(self) -> str:
        """How it was chosen, for the operator; empty where there was no choice."""
        return self._note

    def read_from(self, source: Source, chosen: str, note: str) -> None:
        """Set the file, for errors, and how it was chosen. For ``load``."""
        self._source, self._chosen, self._note = source, chosen, note

    def error(self, place: Place, value: object, what: str, remedy: str) -> ConfigError:
        """An error about a place of the file that this was read from."""
        return self._source.error(place, value, what, remedy)
