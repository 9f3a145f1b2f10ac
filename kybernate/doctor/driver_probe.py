"""Asks libcuda and NVML in a process of its own, since each call may hang or crash: ``python -m`` this module.

Writes one JSON line before each step, ``{"begin": step}``, and one with what it found. Makes no context, and changes
nothing: of other processes it asks only for the restore thread.
"""

import argparse
import json
import sys
import time
from typing import Any

from kybernate.cuda import CudaUnavailableError, open_cuda, support
from kybernate.nvml_reader import NvmlReader, NvmlUnreadableError


def main() -> None:
    """Parse the command line and ask."""
    parser = argparse.ArgumentParser(prog="kybernate.doctor.driver_probe")
    parser.add_argument("--binding", choices=["auto", "bindings", "ctypes"], default="auto")
    binding = parser.parse_args().binding
    pids = _ask_nvml()
    _ask_cuda(binding, pids)


def _ask_nvml() -> list[int]:
    """GPUs and processes; returns who uses a GPU."""
    _say(begin="NVML")
    reader = NvmlReader()
    try:
        _say(release=reader.driver_version(), gpu_count=reader.count())
        memory = reader.memory()
        gpus = [{**gpu._asdict(), "used_bytes": memory[gpu.uuid][0]} for gpu in reader.gpus()]
        uses = reader.processes()
    except NvmlUnreadableError as error:
        _say(nvml_trouble=str(error))
        return []
    finally:
        reader.close()
    _say(gpus=gpus, uses=[use._asdict() for use in uses])
    return sorted({use.pid for use in uses})


def _ask_cuda(binding: Any, pids: list[int]) -> None:
    _say(begin="loading libcuda")
    try:
        cuda = open_cuda(binding)
        version = cuda.driver_version()[1]
        _say(binding=cuda.binding, cuda_version=version)
        _say(begin="cuInit")
        began = time.monotonic()
        code = cuda.init()
        _say(init_code=code, init_seconds=time.monotonic() - began)
        for pid in pids if code == 0 and support(version).checkpoint else ():
            _say(begin=f"cuCheckpointProcessGetRestoreThreadId of process {pid}")
            _say(answers={pid: cuda.restore_tid(pid)[0]})
    except CudaUnavailableError as error:
        _say(trouble=str(error))


def _say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
