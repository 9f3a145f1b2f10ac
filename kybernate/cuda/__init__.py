"""The CUDA driver's checkpoint API: the only package of the product that speaks to libcuda. Light to import.

Two bindings offer the same calls: cuda-bindings where it is installed, and ctypes on ``libcuda.so.1``.
"""

from kybernate.cuda.codes import Result, State, result_name, state_name
from kybernate.cuda.port import Binding, CheckpointApi, CudaUnavailableError, GpuPairs, open_cuda
from kybernate.cuda.support import Support, support, why_no_checkpoint
from kybernate.cuda.uuids import gpu_pairs

__all__ = [
    "Binding",
    "CheckpointApi",
    "CudaUnavailableError",
    "GpuPairs",
    "Result",
    "State",
    "Support",
    "gpu_pairs",
    "open_cuda",
    "result_name",
    "state_name",
    "support",
    "why_no_checkpoint",
]
