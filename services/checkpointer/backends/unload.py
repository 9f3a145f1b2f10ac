"""Engines that load models on demand: Ollama, and llama.cpp's server in router mode.

A park unloads the models in memory, which stay in the page cache; an activation loads the same ones again.
"""

import contextlib
from dataclasses import dataclass

from services.checkpointer.backends.engine import EngineCalls, EngineRefusedError, SleepingEngine
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.core.answers import MISSHAPEN

FOR_EVER = -1
IN_MEMORY = ("loading", "loaded", "sleeping")
"""States of llama.cpp's models that hold memory; a model that is downloaded, or downloads, holds none."""


@dataclass(frozen=True)
class Unload(SleepingEngine):
    """One server of either kind; ``/api/ps`` tells Ollama."""

    http: EngineCalls
    loads = True

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:  # noqa: ARG002
        """Without an API to unload."""
        await self.loaded(seat, seconds)
        return ""

    async def loaded(self, seat: SeatProcesses, seconds: float) -> tuple[str, ...]:
        """Models in memory."""
        ollama, models = await self._models(seat, seconds)
        return tuple(name for name, state in models.items() if ollama or state in IN_MEMORY)

    async def asleep(self, seat: SeatProcesses, seconds: float) -> bool | None:
        """True when no model is in memory or on its way."""
        return not await self.loaded(seat, seconds)

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:
        """Unload what is in memory; it answers before the memory is free."""
        ollama, models = await self._models(seat, seconds)
        for name, state in models.items():
            if ollama:
                await self._keep(seat, name, 0, seconds)
            elif state in IN_MEMORY:
                await self._post(seat, "/models/unload", {"model": name}, seconds)

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:
        """Load what was in memory at the park; llama.cpp answers before it is."""
        ollama, models = await self._models(seat, seconds)
        for name in seat.models:
            if ollama:
                await self._keep(seat, name, FOR_EVER, seconds)
            elif models.get(name) not in IN_MEMORY:  # llama.cpp refuses to load those
                await self._post(seat, "/models/load", {"model": name}, seconds)

    async def _models(self, seat: SeatProcesses, seconds: float) -> tuple[bool, dict[str, str]]:
        """(True for Ollama, state of each model; of Ollama only those in memory)."""
        reply = await self.http.call(seat, "GET", "/api/ps", seconds=seconds)
        with contextlib.suppress(*MISSHAPEN):
            if reply.status == 200 and isinstance(reply.body, dict):
                return True, {str(one["name"]): "loaded" for one in reply.body.get("models") or ()}
            reply = await self.http.call(seat, "GET", "/models", seconds=seconds)
            found = reply.body.get("data") if reply.status == 200 and isinstance(reply.body, dict) else None
            if found:
                return False, {str(one["id"]): str(one["status"].get("value")) for one in found}
        raise EngineRefusedError("it cannot unload: neither Ollama nor llama-server in router mode (no --model)")

    async def _keep(self, seat: SeatProcesses, model: str, keep_alive: int, seconds: float) -> None:
        """An empty request that loads (FOR_EVER) or unloads (0) a model; embedding models have another path."""
        body = {"model": model, "keep_alive": keep_alive}
        reply = await self.http.call(seat, "POST", "/api/generate", seconds=seconds, body=body)
        if reply.status != 200:
            await self._post(seat, "/api/embed", {**body, "input": ""}, seconds)

    async def _post(self, seat: SeatProcesses, path: str, body: dict[str, object], seconds: float) -> None:
        reply = await self.http.call(seat, "POST", path, seconds=seconds, body=body)
        if reply.status != 200:
            raise EngineRefusedError(f"{path} answers {reply.status} for {body['model']}: {reply.text[:200]}")
