"""Questions to engines over HTTP: are they healthy, do they still compute."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import chain, repeat

import aiohttp

from kybernate.engines import METRICS_PATHS, requests_in
from kybernate.http_api import content_of, unanswered
from services.gpu_manager.core.inputs import EngineProbe, EngineSeen, WallTime

Receive = Callable[[EngineSeen], Awaitable[None]]

AGAIN_SECONDS = 0.05
"""Wall seconds between two questions to the same engine."""
SOON_SECONDS = (0.005, 0.01, 0.02)
"""The first of them while a switch waits for its victim: a request that has just ended is counted for a moment."""
ANSWER_SECONDS = 2.0
"""Wall seconds in which an engine has to answer."""


class EngineProbes:
    """One task per open question; each answer goes to ``receive``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._tasks: dict[EngineProbe, asyncio.Task[None]] = {}

    def follow(self, probes: list[EngineProbe], group: asyncio.TaskGroup, receive: Receive) -> None:
        """Ask these questions, and only these, from now on."""
        for probe in [probe for probe in self._tasks if probe not in probes]:
            self._tasks.pop(probe).cancel()
        for probe in probes:
            if probe not in self._tasks:
                self._tasks[probe] = group.create_task(self._ask(probe, receive), name=f"probe {probe.seat}")

    async def _ask(self, probe: EngineProbe, receive: Receive) -> None:
        pauses, before = chain(SOON_SECONDS if probe.idle else (), repeat(AGAIN_SECONDS)), ""
        while True:
            asked_at = WallTime(time.monotonic())
            healthy, running, said = await self._answer(probe)
            seen = EngineSeen(probe.seat, probe.container_id, healthy, running, asked_at, said)
            if probe.idle or healthy or asked_at > probe.since or said != before:
                before = said
                await receive(seen)
            await asyncio.sleep(next(pauses))

    async def _answer(self, probe: EngineProbe) -> tuple[bool, int | None, str]:
        """(whether it answers well, how many requests it works on, else what it answered). None: not known.

        Not known: its metrics do not say, or not in time, or at too great a length, or it cannot be reached. Only a
        refused connection proves that no process listens on its port; without a route, a name or a file descriptor to
        ask with it may compute.
        """
        deadline = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        path = ""
        try:
            for path in METRICS_PATHS if probe.idle else ("/health",):
                async with self._session.get(probe.endpoint + path, timeout=deadline) as answer:
                    if not probe.idle:
                        good = answer.status == 200
                        return good, None, "" if good else f"{path} answered {answer.status}"
                    running = requests_in(await content_of(answer)) if answer.status == 200 else None
                if running is not None:
                    return True, running, ""
            return True, None, ""
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return False, 0 if refused else None, f"{path}: {unanswered(error.os_error).lower()}"
        except TimeoutError:
            return False, None, f"{path}: no answer within {ANSWER_SECONDS:.0f} s"
        except (aiohttp.ClientError, OSError):
            return False, None, f"{path}: the connection ended without an answer"
