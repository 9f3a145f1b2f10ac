"""Calls libcuda and NVML in a child process, since each call may hang or crash: ``python -m`` this module.

Writes one JSON line before each step, ``{"begin": step}``, and one with its facts. Creates no context and changes
nothing: about other processes it only requests the restore thread.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from kybernate.cuda import support
from kybernate.cuda.ctypes_api import CheckpointApi, CudaUnavailableError
from kybernate.gpus.nvml_reader import NvmlReader
from kybernate.gpus.port import GpuError


def main() -> None:
    """Run the probe."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the facts
        probe = _DriverProbe(output)
        probe.read_cuda(probe.read_nvml())


class _DriverProbe:
    """Makes the calls and writes the facts."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def read_nvml(self) -> list[int]:
        """Read GPUs and processes; returns the pids that use a GPU."""
        self._write(begin="NVML")
        reader = NvmlReader()
        try:
            self._write(release=reader.driver_version(), gpu_count=reader.count())
            persistence = reader.persistence()
            gpus = [
                {
                    "uuid": gpu.uuid,
                    "minor": gpu.minor,
                    "name": gpu.name,
                    "total_bytes": gpu.memory_bytes,
                    "persistence": persistence.get(gpu.uuid),
                    "mig": gpu.mig_enabled,
                }
                for gpu in reader.gpus()
            ]
            uses = reader.gpu_processes()
        except GpuError as error:
            self._write(nvml_trouble=str(error))
            return []
        finally:
            reader.close()
        self._write(gpus=gpus, uses=[asdict(use) for use in uses])
        return sorted({use.pid for use in uses})

    def read_cuda(self, pids: list[int]) -> None:
        """Load and initialize libcuda, and try its access to the processes."""
        self._write(begin="loading libcuda")
        try:
            cuda = CheckpointApi()
            version = cuda.driver_version()[1]
            self._write(binding=cuda.binding, cuda_version=version)
            self._write(begin="cuInit")
            began = time.monotonic()
            code = cuda.init()
            self._write(init_code=code, init_seconds=time.monotonic() - began)
            for pid in pids if code == 0 and support(version).checkpoint else ():
                self._write(begin=f"cuCheckpointProcessGetRestoreThreadId of process {pid}")
                self._write(answers={pid: cuda.restore_tid(pid)[0]})
        except CudaUnavailableError as error:
            self._write(trouble=str(error))

    def _write(self, **facts: Any) -> None:
        self._output.write(json.dumps(facts) + "\n")
        self._output.flush()


if __name__ == "__main__":
    main()
