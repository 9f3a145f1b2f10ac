"""What a driver can, by its version (research/checkpoint.md §1.6). Pure."""

from typing import NamedTuple

CHECKPOINT_CUDA = 12080
"""Driver 570: the checkpoint API."""
GPU_MAP_CUDA = 13000
"""Driver 580: restore to other GPUs."""
LAUNCH_JOB_CUDA = 13010
"""Driver 590: several processes as one job."""
CUSTOM_STORAGE_CUDA = 13040
"""CUDA 13.4: the caller moves the bytes; states CHECKPOINTING and RESTORING."""


class Support(NamedTuple):
    """What works."""

    checkpoint: bool
    gpu_map: bool
    launch_job: bool
    custom_storage: bool


def support(cuda_version: int) -> Support:
    """What a driver offers that says ``cuda_version`` (13000 is 13.0). Does not know its bugs."""
    return Support(
        checkpoint=cuda_version >= CHECKPOINT_CUDA,
        gpu_map=cuda_version >= GPU_MAP_CUDA,
        launch_job=cuda_version >= LAUNCH_JOB_CUDA,
        custom_storage=cuda_version >= CUSTOM_STORAGE_CUDA,
    )


def cuda_text(cuda_version: int) -> str:
    """13020 → ``13.2``."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def why_no_checkpoint(cuda_version: int, driver: str = "") -> str | None:
    """None where the checkpoint API is there, else what to tell a person. ``driver``: 550.54.15, if known."""
    if support(cuda_version).checkpoint:
        return None
    who = f"driver {driver.partition('.')[0]}" if driver else f"the driver (CUDA {cuda_text(cuda_version)})"
    return f"{who} has no checkpoint API; needs 570 or newer (580 recommended)"
