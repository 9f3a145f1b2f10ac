"""The CUDA driver's checkpoint API: the only package that calls libcuda. Light to import."""

from kybernate.cuda.codes import (
    FREED_SHARE,
    HOST_BYTES_PER_VRAM_BYTE,
    CudaResult,
    CudaState,
    gpu_pairs,
    result_name,
    state_name,
    support,
    why_no_checkpoint,
)
from kybernate.cuda.port import CheckpointApi, CudaUnavailableError


def open_cuda() -> CheckpointApi:
    """The driver library of this machine, not initialized. Raises CudaUnavailableError."""
    from kybernate.cuda.ctypes_api import CtypesApi

    return CtypesApi()
