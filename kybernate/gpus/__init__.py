"""The GPUs of this machine: what they are, their links, memory in use, processes and XID events. From NVML or the fake.

The only package that calls NVML; nvidia-ml-py is imported only when NVML is asked for, so that a laptop needs no NVIDIA
library. The types (Gpu, Link, …) are those of ``kybernate.machine``. Light to import.
"""

from pathlib import Path

from kybernate.gpus.port import GpuError, Gpus


def open_gpus(fakes: bool, socket: Path | None = None) -> Gpus:
    """GPUs of this machine, by NVML, or of the fake driver at ``socket`` (extra ``dev``). Raises GpuError."""
    if not fakes:
        from kybernate.gpus.nvml import NvmlGpus

        return NvmlGpus()
    if socket is None:
        raise GpuError("fake GPUs need the socket of the fake driver; set KYB_FAKE_DRIVER")
    from kybernate.extras import ExtraMissingError, dev_part

    try:
        found: Gpus = dev_part("gpus", "KYB_DRIVER=fake")(socket)
    except ExtraMissingError as error:
        raise GpuError(str(error)) from error
    return found
