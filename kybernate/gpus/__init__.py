"""Which GPUs this machine has, how they are linked, who uses their memory, what happens to them: NVML, or the fake.

The only package that speaks NVML; pynvml is imported only when NVML is asked for, so that a laptop needs no NVIDIA
library. The words (Gpu, Link, …) are those of ``kybernate.machine``.
"""

from pathlib import Path
from typing import Any, Literal

from kybernate.extras import ExtraMissingError, dev_part
from kybernate.gpus.nvml import NvmlGpus
from kybernate.gpus.protocol import GpuError, Gpus
from kybernate.machine import Gpu, GpuEvent, GpuProcess, Link, Mig, PcieLevel, distance

__all__ = [
    "Gpu",
    "GpuError",
    "GpuEvent",
    "GpuProcess",
    "Gpus",
    "Link",
    "Mig",
    "NvmlGpus",
    "PcieLevel",
    "distance",
    "open_gpus",
]


def open_gpus(kind: Literal["nvml", "fake"], socket: Path | None = None) -> Gpus:
    """GPUs of this machine (``nvml``) or of the fake driver at ``socket``. Raises GpuError, also without the extra."""
    if kind == "nvml":
        return NvmlGpus(load_pynvml)
    if socket is None:
        raise GpuError("fake GPUs need the socket of the fake driver; set KYB_FAKE_DRIVER")
    try:
        found: Gpus = dev_part("gpus", "KYB_GPUS=fake")(socket)
    except ExtraMissingError as error:
        raise GpuError(str(error)) from error
    return found


def load_pynvml() -> Any:
    """The module of nvidia-ml-py. Raises GpuError when it is not installed."""
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(f"no NVML: {error}; pip install nvidia-ml-py, or use KYB_GPUS=fake") from error
    return pynvml
