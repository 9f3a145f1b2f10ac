"""The link between GPUs and host memory: more transfers than it carries at full speed share it fairly. Pure."""

import math

from kybernate.dev.fakes.gpu.process import Operation
from kybernate.dev.fakes.gpu.world import World


class Link:
    """All copies under way. Each keeps the seconds of full speed that it has left."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at = 0.0
        """The ends of all copies are as of then."""

    def share(self) -> None:
        """Set when each copy ends: before copies begin or stop, and after."""
        now = self._world.now
        while copies := self.copies(self._at):
            speed = min(1.0, self._world.spec.lanes / len(copies))
            for copy in copies:
                longer = (copy.copied_at - self._at) * (copy.speed / speed - 1)
                copy.copied_at, copy.ends_at, copy.speed = copy.copied_at + longer, copy.ends_at + longer, speed
            self._at = min(copy.copied_at for copy in copies)
            if self._at > now:
                break
        self._at = now

    def copies(self, at: float) -> list[Operation]:
        """Operations whose copy has not ended then; none where any number runs at full speed."""
        operations = (process.operation for process in self._world.processes.values() if self._world.spec.lanes)
        return [one for one in operations if one is not None and at < one.copied_at < math.inf]
