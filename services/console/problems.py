"""What is wrong, for every view of the page: the findings of ``kyb doctor`` that are not OK."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from kybernate.bus.port import Bus, BusError
from kybernate.clock import to_beat
from kybernate.local_stack import find_stack
from kybernate.logs import get_logger
from services.console.api import OperatorApi
from services.console.core.cluster import Cluster
from services.console.routers import Routers

LOOK_SECONDS = 10.0
"""Between two examinations, while a page is open."""
STREAM_SECONDS = 3.0
MOST_PROBLEMS = 100
"""That pages get."""


class Problems:
    """Examines the stack as ``kyb doctor`` does, by what the console knows; its machine too, if that runs the stack."""

    def __init__(self, bus: Bus, cluster: Cluster, api: OperatorApi, routers: Routers) -> None:
        self._bus, self._cluster, self._api, self._routers = bus, cluster, api, routers
        self.troubles: Callable[[], dict[str, str]] = dict
        """What is wrong with the console, by condition."""
        self.url: Callable[[], str] = str
        """Of the console."""
        self.found: dict[str, Any] | None = None
        """``{"findings": [...], "count": n}``, failing ones first, or ``{"error": text}``; None: not read yet."""

    async def run(self, wanted: Callable[[], object]) -> NoReturn:
        """Examine while ``wanted``, until cancelled."""
        while True:
            if wanted():
                try:
                    self.found = await self._examine()
                except Exception as error:  # a line that is missing ends no console
                    get_logger().warning("problems.failed", error=repr(error))
                    self.found = {"error": f"problems cannot be read: {error}"}
            for _ in range(int(LOOK_SECONDS)):
                if not wanted():
                    self.found = None
                elif self.found is None:
                    break
                await asyncio.sleep(to_beat(1.0))

    async def _examine(self) -> dict[str, Any]:
        managers, history = await asyncio.gather(self._api.explained(), self._stream_trouble())
        return await asyncio.to_thread(self._check, tuple(managers), tuple(self._routers.states()), history)

    def _check(
        self, managers: tuple[dict[str, Any], ...], routers: tuple[dict[str, Any], ...], history: str
    ) -> dict[str, Any]:
        # A tenth of the console's start, and needed only once a page is open.
        from kybernate.doctor.model import Severity
        from kybernate.doctor.stack import StackFacts, check_stack
        from kybernate.extras import dev_part

        now, stack = time.time(), local_stack(self.url())
        seats = tuple(row.model_dump(mode="json") for row in list(self._cluster.seats.rows.values()))
        facts = StackFacts(
            url=self.url(),
            unmet=self.troubles(),
            routers=routers,
            seats=seats,
            gpus=tuple(gpu.model_dump(mode="json") for gpu in list(self._cluster.gpus.rows.values())),
            managers=managers,
            history=history,
            skew_seconds=max([0.0, *(float(seat["reported_at"]) - now for seat in seats)]),
            now=now,
            **({} if stack is None else dev_part("local_facts", "the stack of kyb up")(stack, seats)),
        )
        findings = [found for found in check_stack(facts) if found.level is not Severity.OK]
        findings.sort(key=lambda found: found.level is not Severity.FAIL)
        return {"findings": [asdict(found) for found in findings[:MOST_PROBLEMS]], "count": len(findings)}

    async def _stream_trouble(self) -> str:
        """Why stored events cannot be read; empty: they can."""
        try:
            async with asyncio.timeout(STREAM_SECONDS):
                async for _ in self._bus.replay(since=time.time()):
                    break
        except TimeoutError:
            return "past events cannot be read: nothing in time"
        except BusError as error:
            return f"past events cannot be read: {error}"
        return ""


def local_stack(url: str) -> dict[str, Any] | None:
    """The stack of ``kyb up`` that the console at this URL belongs to; None: another one, or a cluster's."""
    stack = find_stack()
    return stack if stack is not None and stack.get("console") == url else None
