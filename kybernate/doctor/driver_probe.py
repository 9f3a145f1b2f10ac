"""Asks libcuda and NVML in a process of its own, since each call may hang or crash: ``python -m`` this module.

Writes one JSON line before each step, ``{"begin": step}``, and one with what it found. Makes no context, and changes
nothing: of other processes it asks only for the restore thread.
"""

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO

from kybernate.cuda import Binding, CudaUnavailableError, open_cuda, support
from kybernate.gpus.nvml_reader import NvmlReader, NvmlUnreadableError


def main() -> None:
    """Parse the command line and ask."""
    parser = argparse.ArgumentParser(prog="kybernate.doctor.driver_probe")
    parser.add_argument("--binding", choices=["auto", "bindings", "ctypes"], default="auto")
    binding = parser.parse_args().binding
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not get between the answers
        probe = _Probe(answers)
        probe.ask_cuda(binding, probe.ask_nvml())


class _Probe:
    """Asks, and says what it found."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def ask_nvml(self) -> list[int]:
        """GPUs and processes; returns who uses a GPU."""
        self._say(begin="NVML")
        reader = NvmlReader()
        try:
            self._say(release=reader.driver_version(), gpu_count=reader.count())
            memory = reader.memory()
            gpus = [{**gpu._asdict(), "used_bytes": memory.get(gpu.uuid, (0, 0))[0]} for gpu in reader.gpus()]
            uses = reader.processes()
        except NvmlUnreadableError as error:
            self._say(nvml_trouble=str(error))
            return []
        finally:
            reader.close()
        self._say(gpus=gpus, uses=[use._asdict() for use in uses])
        return sorted({use.pid for use in uses})

    def ask_cuda(self, binding: Binding, pids: list[int]) -> None:
        """Load, initialize, and try whether it reaches the processes."""
        self._say(begin="loading libcuda")
        try:
            cuda = open_cuda(binding)
            version = cuda.driver_version()[1]
            self._say(binding=cuda.binding, cuda_version=version)
            self._say(begin="cuInit")
            began = time.monotonic()
            code = cuda.init()
            self._say(init_code=code, init_seconds=time.monotonic() - began)
            for pid in pids if code == 0 and support(version).checkpoint else ():
                self._say(begin=f"cuCheckpointProcessGetRestoreThreadId of process {pid}")
                self._say(answers={pid: cuda.restore_tid(pid)[0]})
        except CudaUnavailableError as error:
            self._say(trouble=str(error))

    def _say(self, **facts: Any) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()


if __name__ == "__main__":
    main()
