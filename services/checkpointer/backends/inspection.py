"""What /proc shows of GPU processes before they are parked or moved. Reads only; what cannot be read is unknown."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kybernate.cgroups import PROC
from services.checkpointer.backends.refusals import Process
from services.checkpointer.processes import Identity, thread_names

ALLOW_VARIABLE = "KYB_PARK_ALLOW"
"""In an engine's environment: allowances of its pod, by commas."""


class NoDeviceError(Exception):
    """A GPU cannot be reached from a container."""


@dataclass(frozen=True)
class Inspection:
    """Looks at processes; ``proc`` is another folder in tests only."""

    proc: Path = PROC

    def process(self, who: Identity, *, nccl: bool = True) -> Process:
        """Environment of one process, and with ``nccl`` its libraries and threads, which are long lists."""
        return Process(
            pid=who.pid,
            nccl_library=nccl and "/libnccl" in self._text(who, "maps"),
            threads=thread_names(who.pid, self.proc) if nccl else frozenset(),
            environment=self.environment(who),
        )

    def environment(self, who: Identity) -> dict[str, str]:
        """As it was when the process started."""
        pairs = [entry.partition("=") for entry in self._text(who, "environ").split("\0") if "=" in entry]
        return {name: value for name, _, value in pairs}

    def allowances(self, who: Identity) -> frozenset[str]:
        """What its pod allows (KYB_PARK_ALLOW)."""
        return names(self.environment(who).get(ALLOW_VARIABLE, ""))

    def name(self, pid: int) -> str:
        """What a process is called; empty when it is gone."""
        try:
            return (self.proc / str(pid) / "comm").read_text().strip()
        except OSError:
            return ""

    def uses_cuda(self, who: Identity) -> bool:
        """Whether it has the thread that the driver makes in CUDA processes. Needs no answer of the process."""
        return any(_is_cuda_thread(name) for name in thread_names(who.pid, self.proc))

    def check_device(self, who: Identity, gpu: str) -> None:
        """Whether a GPU's device node is in the process' /dev. Raises NoDeviceError saying what is missing."""
        minor = self._minor(gpu)
        if minor is None:
            raise NoDeviceError(f"{self.proc}/driver/nvidia/gpus does not know {gpu}; is the driver loaded?")
        node = self.proc / str(who.pid) / "root" / "dev" / f"nvidia{minor}"
        try:
            there = stat.S_ISCHR(os.stat(node).st_mode)
        except FileNotFoundError:
            there = False
        except OSError as error:
            raise NoDeviceError(
                f"{node} cannot be looked at: {error.strerror}; the checkpointer needs SYS_PTRACE"
            ) from error
        if not there:
            remedy = "write rebalance: true in its profile, and make the pod anew to give it the device node"
            raise NoDeviceError(f"/dev/nvidia{minor} of {gpu} is not in the container; {remedy}")

    def _minor(self, gpu: str) -> int | None:
        """N of /dev/nvidiaN, as the kernel driver tells."""
        for file in (self.proc / "driver" / "nvidia" / "gpus").glob("*/information"):
            lines = dict(line.partition(":")[::2] for line in file.read_text().splitlines())
            if lines.get("GPU UUID", "").strip().lower() == gpu.lower():
                minor = lines.get("Device Minor", "").strip()
                return int(minor) if minor.isdigit() else None
        return None

    def _text(self, who: Identity, name: str) -> str:
        try:
            return (self.proc / str(who.pid) / name).read_text(errors="replace")
        except OSError:
            return ""


def names(text: str) -> frozenset[str]:
    """A list by commas."""
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _is_cuda_thread(name: str) -> bool:
    """``cuda`` and eleven hexadecimal digits (research/checkpoint.md §2.1)."""
    digits = name.removeprefix("cuda")
    return name.startswith("cuda") and len(digits) == 11 and all(char in "0123456789abcdef" for char in digits)
