"""``/ui/plan``: what ``kyb plan`` answers for the requests that the routers served in the last hours.

The simulator is the extra ``lab``, which the production image does not have: it runs in a separate process, at low
priority, and the view is offered only where it is installed.
"""

import asyncio
import contextlib
import importlib.util
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from aiohttp import web

from kybernate.clock import Clock
from kybernate.http_api import ApiError
from kybernate.logs import get_logger
from services.console.core.served import ServedRequest

PACKAGES = ("kybernate.lab", "matplotlib", "numba", "numpy")
"""What the simulator and its plots are made of."""
MOST_REQUESTS = 20_000
"""Requests that are remembered, the latest ones."""
NICENESS = "19"
"""Of the simulator: requests come first."""
MOST_AGE_SECONDS = 86_400.0
MOST_SECONDS = 300.0
"""After so long a plan is given up."""
REPORT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class PlanView:
    """``served`` remembers a request; ``run`` is a job."""

    def __init__(self, clock: Clock) -> None:
        self.offered = all(importlib.util.find_spec(name) is not None for name in PACKAGES)
        self._clock = clock
        self._served: deque[ServedRequest] = deque(maxlen=MOST_REQUESTS)
        self._goal: asyncio.Queue[tuple[float, float]] = asyncio.Queue(1)
        self._running = False
        self._progress = ""
        """The last line of the simulator that runs, or why the last plan failed."""
        self._report: tuple[float, str] | None = None
        """When it was made, and its page."""

    def served(self, request: ServedRequest) -> None:
        """Remember a request."""
        if self.offered:
            self._served.append(request)

    async def state(self, _: web.Request) -> web.StreamResponse:
        """Whether a plan can be made, is being made, or was made."""
        self._forget()
        body = {
            "offered": self.offered,
            "requests": len(self._served),
            "hours": round((time.time() - self._served[0][0]) / 3600, 2) if self._served else 0.0,
            "running": self._running or self._goal.full(),
            "progress": self._progress,
            "made_at": self._report and self._report[0],
        }
        return web.json_response(body)

    async def start(self, request: web.Request) -> web.StreamResponse:
        """Begin a plan: ``{"seconds": 20, "share": 0.95}``, the share of requests that waits at most so long."""
        if not self.offered:
            raise ApiError(404, "not_installed", "the simulator is not installed: pip install 'kybernate[lab]'")
        seconds, share = _goal(await request.text())
        self._forget()
        if not self._served:
            raise ApiError(409, "no_requests", "no request was served since the console started: nothing to plan with")
        if self._running or self._goal.full():
            raise ApiError(409, "plan_runs", "a plan is being made: wait for its end")
        self._goal.put_nowait((seconds, share))
        self._progress = ""
        return web.json_response({"requests": len(self._served)}, status=202)

    async def report(self, _: web.Request) -> web.StreamResponse:
        """The last plan's page."""
        if self._report is None:
            raise ApiError(404, "no_plan", "no plan has been made: POST /ui/plan")
        return web.Response(text=self._report[1], content_type="text/html", headers=REPORT_HEADERS)

    async def run(self) -> NoReturn:
        """Make the plans that are asked for, until cancelled."""
        while True:
            seconds, share = await self._goal.get()
            self._running = True
            try:
                async with asyncio.timeout(MOST_SECONDS):
                    await self._plan(seconds, share)
            except TimeoutError:
                self._progress = f"given up after {MOST_SECONDS:g} s; kyb plan with the router's log has no limit"
            except Exception as error:  # a view that is optional ends no router
                get_logger().warning("plan.failed", error=repr(error))
                self._progress = f"cannot be made: {error}"
            finally:
                self._running = False

    async def _plan(self, seconds: float, share: float) -> None:
        with TemporaryDirectory(prefix="kyb-plan-") as folder:
            trace, page = Path(folder) / "last-hours.jsonl", Path(folder) / "page.html"
            await asyncio.to_thread(_write_trace, trace, tuple(self._served), self._clock)
            goal = f"{self._clock.to_model(seconds):g}:{share:g}"
            process = await asyncio.create_subprocess_exec(
                *("nice", "-n", NICENESS, sys.executable, "-P", "-m", "kybernate"),
                *("plan", str(trace), "--slo", goal, "--page", str(page)),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                await self._follow(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if page.is_file():
                text = await asyncio.to_thread(page.read_text, encoding="utf-8")
                self._report, self._progress = (time.time(), text), ""

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._progress = line.decode(errors="replace").strip()[:300]
        await process.wait()

    def _forget(self) -> None:
        while self._served and self._served[0][0] < time.time() - MOST_AGE_SECONDS:
            self._served.popleft()


def _write_trace(path: Path, served: Sequence[ServedRequest], clock: Clock) -> None:
    """Write the requests as a router's log has them, in model seconds."""
    first = served[0][0]
    with path.open("w", encoding="utf-8") as trace:
        for at, model, seconds, held in served:
            line = {
                "event": "request.ended",
                "timestamp": datetime.fromtimestamp(first + clock.to_model(at - first), UTC).isoformat(),
                "status": 200,
                "model": model,
                "seconds": clock.to_model(seconds),
                "held_seconds": clock.to_model(held),
            }
            print(json.dumps(line), file=trace)


def _goal(text: str) -> tuple[float, float]:
    """(seconds, share) of a request's body. Raises ApiError 400."""
    try:
        body: dict[str, Any] = json.loads(text or "{}")
        seconds, share = float(body.get("seconds", 20.0)), float(body.get("share", 0.95))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        seconds = share = -1.0
    if not (0 < seconds <= MOST_AGE_SECONDS and 0 < share <= 1):
        raise ApiError(400, "invalid_goal", 'write {"seconds": 20, "share": 0.95}: seconds over 0, a share up to 1')
    return seconds, share
