"""The CUDA driver's checkpoint API: the only package that calls libcuda, by ``ctypes_api``. Light to import."""

from kybernate.cuda.codes import (
    FREED_SHARE,
    HOST_BYTES_PER_VRAM_BYTE,
    CudaResult,
    CudaState,
    gpu_pairs,
    init_remedy,
    result_name,
    state_name,
    support,
    why_no_checkpoint,
)
