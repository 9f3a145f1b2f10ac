"""Containers as local processes: address, environment, start, end, status, and the back-off after a crash."""

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.kubelet.manifest import ContainerSpec
from kybernate.dev.guard import CONTAINER, kill_left_over
from kybernate.programs import INSTALLED

_LAUNCH = Path(__file__).with_name("launch.py")
POD_NICENESS = "5"
_CLEAR_SECONDS = 0.01
FALLBACK_BYTES = 2048


class StartError(Exception):
    """A container cannot be created; the text is what the runtime would say."""


def free_address(ports: Sequence[int], rng: random.Random) -> str:
    """A loopback address for one pod on which these TCP ports are free. Raises StartError after 50 tries."""
    for _ in range(50):
        address = f"127.{rng.randint(1, 254)}.{rng.randint(0, 254)}.{rng.randint(2, 254)}"
        if all(_free(address, port) for port in ports):
            return address
    raise StartError(f"failed to set up the pod's network: no address in 127.0.0.0/8 has ports {list(ports)} free")


def host_address(address: str, ports: Sequence[int]) -> str:
    """The node's own address for a pod with ``hostNetwork``. Raises StartError when one of its ports is taken."""
    taken = [port for port in ports if not _free(address, port)]
    if taken:
        raise StartError(f"hostNetwork: port {taken[0]} of {address} is taken; give each such pod its own kyb.ai/port")
    return address


def base_environment() -> dict[str, str]:
    """What every container gets: this machine's environment without what is the stack's own, this Python on PATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    env["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), env.get("PATH", os.defpath)))
    paths = [path for path in env.pop("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(INSTALLED))]
    return env | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


@dataclass
class ContainerProcess:
    """A running container: one process that leads its own session."""

    child: asyncio.subprocess.Process
    mark: str
    """What its processes inherit, also those that leave its session."""
    cgroup: Path | None = None
    """The folder of its control group; None: it shares kubelet's."""

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], log: Path, cgroups: Path | None = None
    ) -> "ContainerProcess":
        """Start it with output appended to ``log``, in a new control group below ``cgroups``, if given. Raises
        StartError when the command does not exist."""
        if shutil.which(command[0], path=env.get("PATH")) is None:
            raise StartError(f'exec: "{command[0]}": executable file not found in $PATH')
        mark = secrets.token_hex(32)
        cgroup = None if cgroups is None else cgroups / mark
        inside: tuple[str, ...] = ()
        if cgroup is not None:
            cgroup.mkdir()
            inside = ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), POD_NICENESS, *inside, *command),
                env={**env, CONTAINER: mark},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(child, mark, cgroup)

    @property
    def container_id(self) -> str:
        """As kubelet reports it: with a control group as containerd gives it, which names no pod."""
        return f"process://{self.pid}" if self.cgroup is None else f"containerd://{self.cgroup.name}"

    @property
    def pid(self) -> int:
        """The process id; stays the same from launch to exit."""
        return self.child.pid

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the container's whole process group; nothing happens when it is gone."""
        if self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)

    async def wait(self) -> int:
        """Until it ends, and what it has left with it, as in a container that loses its first process; the exit code as
        a container runtime gives it (128 + signal)."""
        code = await self.child.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        while not self._cleared():  # noqa: ASYNC110 -- the kernel reports no end of what is no child
            await asyncio.sleep(_CLEAR_SECONDS)
        return code if code >= 0 else 128 - code

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM, then SIGKILL after the grace period (a stopped process only hears the latter)."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    def _cleared(self) -> bool:
        """End what has outlived the first process, as the end of a pid namespace does; True once nothing is left."""
        if kill_left_over(self.mark, CONTAINER):
            return False
        if self.cgroup is None:
            return True
        try:
            self.cgroup.rmdir()
        except OSError:  # also what bears no mark
            for pid in (self.cgroup / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            return False
        return True


def _free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class BackOff:
    """Crash back-off in wall seconds: the first restart is at once, then doubling up to the maximum.

    Kubelet's 10 s and 300 s would make every test wait; the shape is the same. Twice the maximum without a crash
    starts over.
    """

    first_seconds: float = 0.2
    max_seconds: float = 5.0

    def delay(self, crashes: int) -> float:
        """Pause before the restart after so many crashes in a row."""
        return 0.0 if crashes <= 1 else float(min(self.max_seconds, self.first_seconds * 2 ** (crashes - 2)))


@dataclass
class Container:
    """What kubelet knows about one container."""

    spec: ContainerSpec
    state: dict[str, Any] = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: dict[str, Any] = field(default_factory=dict)
    process: ContainerProcess | None = None
    container_id: str = ""
    log: Path | None = None
    log_from: int = 0
    """Where the output of its last run begins there."""
    started_at: str = ""
    starts: int = 0
    done: bool = False

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

    def last_output(self) -> str:
        """What it wrote last, as kubelet reports an end with ``FallbackToLogsOnError``."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - FALLBACK_BYTES, self.log_from if self.log_from <= size else 0))
            return file.read().decode(errors="replace")
        return ""

    def waits(self, reason: str, message: str = "") -> None:
        """It is not running, for this reason; an end that was reported moves to ``lastState``."""
        if "terminated" in self.state:
            self.last_state = self.state
        self.state = {"waiting": {"reason": reason} | ({"message": message} if message else {})}

    def status(self) -> dict[str, Any]:
        """v1 ContainerStatus."""
        return {
            "name": self.spec.name,
            "image": self.spec.image,
            "imageID": "",
            "containerID": self.container_id,
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.running or (self.spec.init and self.done),
            "started": self.running,
            "restartCount": max(0, self.starts - 1),
        }


def rfc3339() -> str:
    """Now, as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
