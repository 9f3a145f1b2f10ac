"""The CUDA driver's checkpoint API: the only package that calls libcuda. Light to import.

Two bindings offer the same calls: cuda-bindings where it is installed, and ctypes on ``libcuda.so.1``.
"""

from kybernate.cuda.codes import (
    FREED_SHARE,
    HOST_BYTES_PER_VRAM_BYTE,
    CudaResult,
    CudaState,
    Support,
    gpu_pairs,
    result_name,
    state_name,
    support,
    why_no_checkpoint,
)
from kybernate.cuda.port import Binding, CheckpointApi, CudaUnavailableError, GpuPairs

__all__ = [
    "FREED_SHARE",
    "HOST_BYTES_PER_VRAM_BYTE",
    "Binding",
    "CheckpointApi",
    "CudaResult",
    "CudaState",
    "CudaUnavailableError",
    "GpuPairs",
    "Support",
    "gpu_pairs",
    "open_cuda",
    "result_name",
    "state_name",
    "support",
    "why_no_checkpoint",
]


def open_cuda(binding: Binding = "auto") -> CheckpointApi:
    """The driver library of this machine, not initialized. ``auto``: cuda-bindings if usable, else ctypes.

    Raises CudaUnavailableError.
    """
    if binding != "ctypes":
        from kybernate.cuda.bindings_api import BindingsApi

        try:
            return BindingsApi()
        except CudaUnavailableError:
            if binding == "bindings":
                raise
    from kybernate.cuda.ctypes_api import CtypesApi

    return CtypesApi()
