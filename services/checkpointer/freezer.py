"""Stopping all processes of a container at once, and letting them run on.

A parked process that makes a CUDA call may crash or block for ever, so it is frozen while it is parked; a driver call
about a frozen one hangs, so nobody is asked about meanwhile. The freezer of the container's control group is used where
there is one, else SIGSTOP, which the processes' parents see and a fork can slip through: it is sent until none runs.
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
from services.checkpointer.processes import ProcessIdentity, send, stopped

POLL_SECONDS = 0.001
SIGSTOP = "SIGSTOP"

Living = Callable[[], list[ProcessIdentity]]
"""The container's processes as they are now."""


class FreezeError(Exception):
    """It did not take effect; the text says what stands in the way."""


@dataclass(frozen=True)
class Freezer:
    """Freezes and thaws containers."""

    cgroups: Cgroups
    seconds: float
    """Wall seconds that a freeze or thaw may take."""

    def stopped(self, process: ProcessIdentity) -> bool:
        """Whether it does not run: stopped by a signal, or its control group is frozen."""
        return stopped(process, self.cgroups.proc) or self.cgroups.frozen(process.pid)

    def means(self, cgroup: Cgroup | None) -> str:
        """How this container would be frozen: ``cgroup v2``, ``cgroup v1`` or ``SIGSTOP``."""
        if cgroup is None or cgroup.freezer is None or not os.access(cgroup.freezer, os.W_OK):
            return SIGSTOP
        return f"cgroup {_version(cgroup.freezer)}"

    async def freeze(self, cgroup: Cgroup | None, living: Living) -> None:
        """No process runs when this returns. Raises FreezeError; whatever was frozen by then runs again."""
        if cgroup is not None and cgroup.freezer is not None and self.means(cgroup) != SIGSTOP:
            try:
                await self._set(cgroup.freezer, frozen=True)
            except OSError as error:
                get_logger().warning("freezer.refused", cgroup=cgroup.path, error=str(error), instead=SIGSTOP)
            else:
                return
        await self._signal(living, signal.SIGSTOP)

    async def thaw(self, cgroup: Cgroup | None, living: Living) -> None:
        """Everything runs when this returns, however it was frozen. Raises FreezeError."""
        if cgroup is not None and cgroup.freezer is not None:
            try:
                await self._set(cgroup.freezer, frozen=False)
            except OSError as error:
                if any(self.cgroups.frozen(process.pid) for process in living()):
                    raise FreezeError(f"{cgroup.freezer} cannot be written: {error.strerror}") from error
        await self._signal(living, signal.SIGCONT)

    def release(self, cgroup: Cgroup | None, living: Living) -> None:
        """Ask for a thaw and wait for nothing: for processes that have been killed, or are to end by themselves."""
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
        """Write and wait. Raises OSError when it cannot be written, FreezeError when it takes no effect."""
        _write(file, frozen=frozen)
        deadline = time.monotonic() + self.seconds
        while _state(file) is not frozen:
            if time.monotonic() > deadline:
                if frozen:
                    _write(file, frozen=False)
                    raise FreezeError(f"{file.parent} did not freeze within {self.seconds:.1f} s")
                raise FreezeError(f"{file.parent} stays frozen; a control group above it is frozen: thaw that")
            await asyncio.sleep(POLL_SECONDS)
            if frozen and _version(file) == "v1":
                _write(file, frozen=True)  # version 1 must be told again while processes come and go

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
                # A parent may have forked after the list was made and before it stopped: the list must repeat itself.
                settled = None if wrong else found
                if time.monotonic() > deadline:
                    raise FreezeError(f"{signum.name} did not take effect on pids {[one.pid for one in wrong]}")
                if wrong:
                    await asyncio.sleep(POLL_SECONDS)
                for process in wrong if until_stopped else ():
                    send(process, signum)  # forked meanwhile
        except PermissionError as error:
            raise FreezeError(f"{signum.name} refused: {error.strerror}; run as the engines' user or root") from error


def _version(file: Path) -> str:
    return "v2" if file.name == "cgroup.freeze" else "v1"


def _write(file: Path, *, frozen: bool) -> None:
    words = ("1", "0") if _version(file) == "v2" else ("FROZEN", "THAWED")
    file.write_text(words[0] if frozen else words[1])


def _state(file: Path) -> bool | None:
    """Whether everything in it is frozen; None while it is on its way."""
    try:
        if _version(file) == "v2":
            lines = file.with_name("cgroup.events").read_text().splitlines()
            return "frozen 1" in lines
        return {"FROZEN": True, "THAWED": False}.get(file.read_text().strip())
    except FileNotFoundError:
        return False  # the container ended
