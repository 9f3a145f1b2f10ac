"""Freezes and thaws all processes of a container.

A parked process that makes a CUDA call may crash or block for ever, so it is frozen while it is parked. A driver call
about a frozen process hangs, so none is made. The freezer of the container's control group is used if it exists, else
SIGSTOP, which parent processes notice and which misses a concurrent fork: it is repeated until no process runs.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kybernate.cgroups import Cgroup, Cgroups
from kybernate.logs import get_logger
from services.checkpointer.core.failures import StepFailedError
from services.checkpointer.processes import ProcessIdentity, send, stopped

POLL_SECONDS = 0.001
SIGSTOP = "SIGSTOP"

Living = Callable[[], list[ProcessIdentity]]
"""The container's processes as they are now."""


@dataclass(frozen=True)
class Freezer:
    """Freezes and thaws containers."""

    cgroups: Cgroups
    seconds: float
    """Wall seconds that a freeze or thaw may take."""

    def stopped(self, process: ProcessIdentity) -> bool:
        """True if a signal stopped it or its control group is frozen."""
        return stopped(process, self.cgroups.proc) or self.cgroups.frozen(process.pid)

    def means(self, cgroup: Cgroup | None) -> str:
        """How this container would be frozen: ``cgroup v2``, ``cgroup v1`` or ``SIGSTOP``."""
        if cgroup is None or cgroup.freezer is None or not os.access(cgroup.freezer, os.W_OK):
            return SIGSTOP
        return f"cgroup {_version(cgroup.freezer)}"

    async def freeze(self, cgroup: Cgroup | None, living: Living) -> None:
        """Stop all processes. Raises StepFailedError; a control group that did not freeze in time is thawed before."""
        if cgroup is not None and cgroup.freezer is not None and self.means(cgroup) != SIGSTOP:
            try:
                await self._set(cgroup.freezer, frozen=True)
            except OSError as error:
                get_logger().warning("freezer.refused", cgroup=cgroup.path, error=str(error), instead=SIGSTOP)
            else:
                return
        await self._signal(living, signal.SIGSTOP)

    async def thaw(self, cgroup: Cgroup | None, living: Living) -> None:
        """Let all processes run, however they were frozen. Raises StepFailedError."""
        if cgroup is not None and cgroup.freezer is not None:
            try:
                await self._set(cgroup.freezer, frozen=False)
            except OSError as error:
                if any(self.cgroups.frozen(process.pid) for process in living()):
                    raise StepFailedError(f"{cgroup.freezer} cannot be written: {error.strerror}") from error
        await self._signal(living, signal.SIGCONT)

    def release(self, cgroup: Cgroup | None, living: Living) -> None:
        """Thaw without waiting for the effect: for processes that were killed or are about to terminate."""
        if cgroup is not None and cgroup.freezer is not None:
            try:
                _write(cgroup.freezer, frozen=False)
            except OSError as error:
                get_logger().warning("freezer.refused", cgroup=cgroup.path, error=str(error))
        try:
            for process in living():
                send(process, signal.SIGCONT)
        except PermissionError as error:
            get_logger().warning("freezer.refused", signal="SIGCONT", error=str(error))

    async def _set(self, file: Path, *, frozen: bool) -> None:
        """Write the state and wait for it. Raises OSError if the write fails, StepFailedError if it takes no effect."""
        _write(file, frozen=frozen)
        deadline = time.monotonic() + self.seconds
        while _state(file) is not frozen:
            if time.monotonic() > deadline:
                if frozen:
                    _write(file, frozen=False)
                    raise StepFailedError(f"{file.parent} did not freeze within {self.seconds:.1f} s")
                raise StepFailedError(f"{file.parent} stays frozen; a control group above it is frozen: thaw that")
            await asyncio.sleep(POLL_SECONDS)
            if frozen and _version(file) == "v1":
                _write(file, frozen=True)  # version 1 misses new processes: write again

    async def _signal(self, living: Living, signum: signal.Signals) -> None:
        deadline = time.monotonic() + self.seconds
        until_stopped = signum is signal.SIGSTOP
        settled: list[ProcessIdentity] | None = None
        try:
            for process in living():
                send(process, signum)
            while True:
                found = living()
                wrong = [one for one in found if stopped(one, self.cgroups.proc) is not until_stopped]
                if not wrong and (found == settled or not until_stopped):
                    return
                # A process may have forked after it was listed and before it stopped: require the same list twice.
                settled = None if wrong else found
                if time.monotonic() > deadline:
                    raise StepFailedError(f"{signum.name} did not take effect on pids {[one.pid for one in wrong]}")
                if wrong:
                    await asyncio.sleep(POLL_SECONDS)
                for process in wrong if until_stopped else ():
                    send(process, signum)  # forked meanwhile
        except PermissionError as error:
            text = f"{signum.name} refused: {error.strerror}; run as the engines' user or root"
            raise StepFailedError(text) from error


def _version(file: Path) -> str:
    return "v2" if file.name == "cgroup.freeze" else "v1"


def _write(file: Path, *, frozen: bool) -> None:
    words = ("1", "0") if _version(file) == "v2" else ("FROZEN", "THAWED")
    file.write_text(words[0] if frozen else words[1])


def _state(file: Path) -> bool | None:
    """True if all in it is frozen, False if thawed, None in between."""
    try:
        if _version(file) == "v2":
            lines = file.with_name("cgroup.events").read_text().splitlines()
            return "frozen 1" in lines
        return {"FROZEN": True, "THAWED": False}.get(file.read_text().strip())
    except FileNotFoundError:
        return False  # the container ended
