"""The GPUs of this machine: what they are, their links, memory in use, processes and XID events. From NVML or the fake.

The only package that calls NVML; nvidia-ml-py is imported only when NVML is asked for, so that a laptop needs no NVIDIA
library. The types (Gpu, Link, …) are those of ``kybernate.machine``. Light to import.
"""

from kybernate.gpus.port import GpuError, Gpus, open_gpus
from kybernate.machine import Gpu, GpuEvent, GpuProcess, Link, Mig, PcieLevel, distance

__all__ = [
    "Gpu",
    "GpuError",
    "GpuEvent",
    "GpuProcess",
    "Gpus",
    "Link",
    "Mig",
    "PcieLevel",
    "distance",
    "open_gpus",
]
