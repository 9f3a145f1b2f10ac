"""Calls libcuda and NVML in a child process, since each call may hang or crash: ``python -m`` this module.

Writes one JSON line before each step, ``{"begin": step}``, and one with its facts. Creates no context and changes
nothing: about other processes it only requests the restore thread.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kybernate.cuda import support
from kybernate.cuda.ctypes_api import CheckpointApi, CudaUnavailableError
from kybernate.gpus.nvml_reader import NvmlReader
from kybernate.gpus.port import GpuError


def main() -> None:
    """Run the probe."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the facts

        def write(**facts: Any) -> None:
            output.write(json.dumps(facts) + "\n")
            output.flush()

        read_cuda(write, read_nvml(write))


def read_nvml(write: Callable[..., None]) -> list[int]:
    """Read GPUs and processes; returns the pids that use a GPU."""
    write(begin="NVML")
    reader = NvmlReader()
    try:
        write(release=reader.driver_version(), gpu_count=reader.count())
        persistence, gpus, uses = reader.persistence(), reader.gpus(), reader.gpu_processes()
    except GpuError as error:
        write(nvml_trouble=str(error))
        return []
    finally:
        reader.close()
    write(gpus=[asdict(gpu) for gpu in gpus], persistence=persistence, uses=[asdict(use) for use in uses])
    return sorted({use.pid for use in uses})


def read_cuda(write: Callable[..., None], pids: list[int]) -> None:
    """Load and initialize libcuda, and try its access to the processes."""
    write(begin="loading libcuda")
    try:
        cuda = CheckpointApi()
        version = cuda.driver_version()[1]
        write(binding=cuda.binding, cuda_version=version)
        write(begin="cuInit")
        began = time.monotonic()
        code = cuda.init()
        write(init_code=code, init_seconds=time.monotonic() - began)
        for pid in pids if code == 0 and support(version).checkpoint else ():
            write(begin=f"cuCheckpointProcessGetRestoreThreadId of process {pid}")
            write(answers={pid: cuda.restore_tid(pid)[0]})
    except CudaUnavailableError as error:
        write(trouble=str(error))


if __name__ == "__main__":
    main()
