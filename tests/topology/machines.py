"""Machines and configurations for these tests."""

from kybernate.config import GpuTopology, GroupSpec, NodeConfig, Profile
from kybernate.machine import Gpu, Link, Mig, PcieLevel
from kybernate.topology import Group

GIB = 2**30


def gpu(number: int, numa: int | None = 0, name: str = "A", **more: object) -> Gpu:
    return Gpu(number, f"GPU-{number:04}", number, f"0000:{number + 1:02x}:00.0", name, 80 * GIB, numa, **more)  # type: ignore[arg-type]


def part(of: Gpu, number: int, profile: str) -> Gpu:
    mig = Mig(of.uuid, profile, number, 0)
    return Gpu(
        of.index, f"MIG-{of.index}-{number}", of.minor, of.pci_bus_id, of.name, 10 * GIB, of.numa_node, mig, False
    )


def link(a: Gpu, b: Gpu, level: PcieLevel = PcieLevel.NODE, nvlinks: int = 0, switched: bool = False) -> Link:
    return Link(a.uuid, b.uuid, level, nvlinks, switched)


def profile(size: int, seats: int = 3, mig: str | None = None) -> Profile:
    kind = f"mig-{mig}" if mig else f"gpu-{size}x"
    return Profile(name=kind, resource=f"kyb.ai/{kind}-seat", group_size=size, seats_per_group=seats, mig_profile=mig)


def config(
    *sizes: int | str,
    groups: dict[str, list[int | str]] | None = None,
    overlap: str = "none",
    mig: str = "none",
) -> NodeConfig:
    """One profile per size, or per MIG profile."""
    return NodeConfig(
        profiles=tuple(profile(1, mig=size) if isinstance(size, str) else profile(size) for size in sizes),
        gpu_topology=GpuTopology(
            groups=tuple(GroupSpec(name=name, gpus=tuple(gpus)) for name, gpus in (groups or {}).items()),
            overlap=overlap,
        ),
        mig_strategy=mig,
    )


def indices(groups: "tuple[Group, ...]", size: int | None = None) -> list[list[int]]:
    return [[gpu.index for gpu in group.gpus] for group in groups if size in (None, len(group.gpus))]
