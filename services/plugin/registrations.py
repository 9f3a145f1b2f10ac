"""One registration per resource, each a task of its own: a resource comes and goes without the others noticing."""

import asyncio
from collections.abc import Callable, Iterable

from kybernate.health import Health
from kybernate.logs import get_logger
from services.plugin.kubelet import Registration


class Registrations:
    """The registrations of a node."""

    def __init__(self, group: asyncio.TaskGroup, make: Callable[[str], Registration], health: Health) -> None:
        self._group, self._make, self._health = group, make, health
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, resources: Iterable[str]) -> None:
        """Be registered for exactly these."""
        wanted = list(resources)
        for resource in [name for name in self._tasks if name not in wanted]:
            get_logger().info("plugin.withdrawn", resource=resource)
            self._tasks.pop(resource).cancel()
            self._health.conditions.pop(resource, None)
        for resource in wanted:
            if resource not in self._tasks:
                registration = self._make(resource)
                self._health.conditions[resource] = registration.why_not
                task = self._group.create_task(registration.keep(), name=f"register {resource}")
                self._tasks[resource] = task
