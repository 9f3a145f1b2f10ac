"""SGLang's memory saver: ``--enable-memory-saver --enable-weights-cpu-backup``.

Its API has no question about the state: ``/health_generate`` while it sleeps is a request that computes. A release
answers before the memory is free, and a second resume ends the server: the driver's list decides, and each call is made
once.
"""

from dataclasses import dataclass
from typing import Any

from services.checkpointer.backends.engine import EngineCalls, SleepingEngine, well
from services.checkpointer.backends.port import SeatProcesses

OPTIONS = ("--enable-memory-saver", "--enable-weights-cpu-backup")
"""Without the second its weights are garbage after a resume."""


@dataclass(frozen=True)
class Sglang(SleepingEngine):
    """One SGLang server."""

    http: EngineCalls

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:
        """Without the options that keep its weights, by its command line or else by its own report."""
        lacking = [option for option in OPTIONS if option not in command]
        if lacking:
            reported = await self._options(seat, seconds)
            lacking = [option for option in lacking if not reported.get(option[2:].replace("-", "_"))]
        return f"it would lose its weights: start SGLang with {' '.join(lacking)}" if lacking else ""

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:
        """One call."""
        await self._post(seat, "/release_memory_occupation", seconds)

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:
        """One call."""
        await self._post(seat, "/resume_memory_occupation", seconds)

    async def _options(self, seat: SeatProcesses, seconds: float) -> dict[str, Any]:
        for path in ("/server_info", "/get_server_info"):
            reply = await self.http.call(seat, "GET", path, seconds=seconds)
            if reply.status == 200 and isinstance(reply.body, dict):
                return reply.body
        return {}

    async def _post(self, seat: SeatProcesses, path: str, seconds: float) -> None:
        reply = await self.http.call(seat, "POST", path, seconds=seconds, body={})  # without a body: 422
        well(reply, path, seat.target.engine_key)
