"""GPUs in MIG mode: which instances are offered, under which profile, and which backends cannot park them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kybernate.config import NodeConfig, Profile
from kybernate.machine import Gpu
from kybernate.topology.groups import Group, numbered, numbered_are
from kybernate.topology.wiring import in_order


def mig_refusal(group: Group, backend: str) -> str | None:
    """Return why this backend cannot park seats of this group, with the remedy; None if it can.

    The CUDA driver's checkpoint answers "out of memory" on MIG (cuda-checkpoint issue 42).
    """
    if not group.is_mig or backend != "cuda":
        return None
    return (
        f"backend {backend} cannot park MIG instances ({group.name}): the CUDA driver's checkpoint does not support "
        f"MIG; set the annotation kyb.ai/backend: restart, or ask for a resource of whole GPUs"
    )


@dataclass(frozen=True, slots=True)
class GpuStock:
    """The GPUs and MIG instances of a machine from which groups can be made."""

    whole: tuple[Gpu, ...]
    """GPUs that are not in MIG mode, in PCI order."""
    instances: tuple[Gpu, ...]
    """MIG instances that the strategy offers, in PCI order."""
    in_mig_mode: tuple[Gpu, ...]
    warnings: tuple[str, ...]

    def of(self, profile: Profile, strategy: str) -> tuple[Gpu, ...]:
        """Return the GPUs or instances from which this profile may form groups."""
        if profile.mig_profile is not None:
            return tuple(gpu for gpu in self.instances if mig_profile(gpu) == profile.mig_profile)
        if strategy == "single" and self.in_mig_mode:
            return self.instances if profile.group_size == 1 else ()
        return self.whole


def take_stock(config: NodeConfig, gpus: Sequence[Gpu], instances: Sequence[Gpu]) -> GpuStock:
    """Classify a machine's GPUs by ``migStrategy``. Raises ConfigError where the strategy does not fit the machine."""
    strategy = config.mig_strategy
    whole = tuple(in_order(gpu for gpu in gpus if not gpu.mig_enabled))
    cut = tuple(in_order(gpu for gpu in gpus if gpu.mig_enabled))
    if strategy == "none" or not cut:
        return GpuStock(whole, (), cut, _not_offered(cut))
    parts = tuple(in_order(gpu for gpu in instances if gpu.mig is not None))
    if strategy == "single":
        _check_uniform(config, whole, cut, parts)
    return GpuStock(whole, parts, cut, (*_empty(cut, parts), *_unadvertised(config, parts)))


def mig_profile(gpu: Gpu) -> str | None:
    """Return the MIG profile of an instance; None for a whole GPU."""
    return None if gpu.mig is None else gpu.mig.profile


def instance_name(gpu: Gpu) -> str:
    """Return a group's name: ``G0-3g.40gb-1`` (GPU, profile, GPU instance; compute instance if not 0)."""
    assert gpu.mig is not None
    profile = gpu.mig.profile.replace("+", ".").replace("-", ".")
    compute = f".{gpu.mig.compute_instance}" if gpu.mig.compute_instance else ""
    return f"G{gpu.index}-{profile}-{gpu.mig.gpu_instance}{compute}"


def _not_offered(cut: tuple[Gpu, ...]) -> tuple[str, ...]:
    if not cut:
        return ()
    indices = ",".join(str(gpu.index) for gpu in cut)
    return (
        f"{numbered_are(cut)} in MIG mode and not offered, since migStrategy is none; "
        f"write migStrategy: single or mixed, or turn MIG off there (nvidia-smi -i {indices} -mig 0)",
    )


def _empty(cut: tuple[Gpu, ...], parts: tuple[Gpu, ...]) -> tuple[str, ...]:
    parents = {gpu.mig.parent for gpu in parts if gpu.mig is not None}
    empty = [gpu for gpu in cut if gpu.uuid not in parents]
    if not empty:
        return ()
    index = empty[0].index
    return (
        f"{numbered_are(empty)} in MIG mode without instances, so nothing is offered there; create some "
        f"(nvidia-smi mig -i {index} -lgip shows which are possible) or turn MIG off (nvidia-smi -i {index} -mig 0)",
    )


def _unadvertised(config: NodeConfig, parts: tuple[Gpu, ...]) -> tuple[str, ...]:
    if config.mig_strategy != "mixed":
        return ()
    advertised = {profile.mig_profile for profile in config.profiles}
    kinds = sorted({kind for gpu in parts if (kind := mig_profile(gpu)) is not None and kind not in advertised})
    return tuple(
        f"MIG instances of {kind} on {numbered([gpu for gpu in parts if mig_profile(gpu) == kind])} are advertised "
        f"by no profile; add one with groupSize: 1 and migProfile: {kind}"
        for kind in kinds
    )


def _check_uniform(config: NodeConfig, whole: tuple[Gpu, ...], cut: tuple[Gpu, ...], parts: tuple[Gpu, ...]) -> None:
    remedy = "cut all GPUs alike, or write mixed and give each kind a profile"
    if whole:
        what = f"{numbered_are(cut)} in MIG mode and {numbered_are(whole)} not"
        raise config.error(("migStrategy",), "single", what, remedy)
    first: dict[str, Gpu] = {}
    for gpu in parts:
        first.setdefault(mig_profile(gpu) or "", gpu)
    if len(first) > 1:
        found = " and ".join(f"{kind} on GPU {gpu.index}" for kind, gpu in sorted(first.items()))
        raise config.error(("migStrategy",), "single", f"MIG instances differ: {found}", remedy)
