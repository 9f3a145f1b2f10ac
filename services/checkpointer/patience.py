"""How long a call of the driver may take before it counts as hung. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each call may take, in model seconds; ``wall`` turns them into wall seconds with a floor."""

    lock_seconds: float = 10.0
    """How long submitted work may take to finish; given to the driver."""
    base_seconds: float = 30.0
    seconds_per_gib: float = 3.0
    """Slowest published bulk rate is about 1.1 GB/s, fixed cost up to 15 s per process."""
    settle_seconds: float = 5.0
    """How long memory may take to show as free, or room to appear."""
    slack_seconds: float = 5.0
    """Beyond the driver's own time-out."""
    floor_wall_seconds: float = 2.0
    """No deadline is shorter: a busy machine is not a hang."""
    settle_floor_wall_seconds: float = 2.0
    """Nor is the wait for memory."""
    speed: float = 1.0

    def wall(self, model_seconds: float) -> float:
        """Wall seconds of a deadline."""
        return max(model_seconds / self.speed, self.floor_wall_seconds)

    def transfer(self, vram_bytes: int) -> float:
        """Wall seconds within which a checkpoint, a restore, or a state read during one must end."""
        return self.wall(self.base_seconds + self.seconds_per_gib * vram_bytes / 2**30)

    def settle(self) -> float:
        """Wall seconds that memory may take to show as free, and a control group to freeze."""
        return max(self.settle_seconds / self.speed, self.settle_floor_wall_seconds)

    def lock_timeout(self) -> float:
        """Wall seconds that the driver may wait for submitted work."""
        return max(self.lock_seconds / self.speed, self.floor_wall_seconds / 2)

    def lock(self) -> float:
        """Wall seconds after which a lock is called hung; always above the driver's own time-out."""
        return self.lock_timeout() + self.wall(self.slack_seconds)
