"""NvmlGpus in a child process, since LD_LIBRARY_PATH is read at a process' start: the real wheel on the stub.

``python reader.py FOLDER``: FOLDER stands for /sys/bus/pci/devices. Each line on stdin is ``[method, arguments…]``,
each line on stdout ``{"ok": …}`` or ``{"error": text}``.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from kybernate.gpus import GpuError
from kybernate.gpus.nvml import NvmlGpus
from kybernate.gpus.nvml_hardware import read_ports
from kybernate.gpus.nvml_reader import NvmlReader


def plain(found):
    return found if isinstance(found, dict) else [asdict(one) for one in found]


def cliques(nvml):
    """The fabric's clique of each GPU, as the rule for switches gets it."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = [read_ports(nvml, handle).clique for handle in handles]
    return [clique and (list(clique[0]), clique[1]) for clique in found]


async def main() -> None:
    gpus, blocking = NvmlGpus(Path(sys.argv[1])), NvmlReader()
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, *arguments = json.loads(line)
        try:
            if method == "cliques":
                answer = {"ok": blocking.call(cliques)}
            elif method == "memory":
                answer = {"ok": blocking.memory()}
            else:
                answer = {"ok": plain(await getattr(gpus, method)(*arguments))}
        except GpuError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    blocking.close()
    await gpus.close()


asyncio.run(main())
