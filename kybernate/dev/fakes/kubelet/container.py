"""What kubelet knows about one container, and how long it waits after a crash."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kybernate.dev.fakes.kubelet.manifest import ContainerSpec
from kybernate.dev.fakes.kubelet.process import Process


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
    process: Process | None = None
    container_id: str = ""
    started_at: str = ""
    starts: int = 0
    done: bool = False

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self.state

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
