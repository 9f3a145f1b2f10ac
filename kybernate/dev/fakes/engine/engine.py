"""The engine behind the HTTP server: loading, computing requests in model time, sleeping, counting."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.libcuda import CudaError
from kybernate.dev.fakes.engine.memory import Vram
from kybernate.dev.fakes.engine.protocol import ApiError, Generation
from kybernate.dev.fakes.gpu.client import DriverError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the fake model is like. Times are model seconds."""

    model: str
    load_seconds: float = 0.5
    tokens_per_second: float = 60.0
    prefill_tokens_per_second: float = 8000.0
    max_chunks: int = 10
    """Most parts of a streamed answer above speed 1."""
    max_running: int = 256
    """Requests computed at the same time; others wait."""
    max_model_len: int = 131_072


class Engine:
    """One model, loaded once, maybe asleep."""

    def __init__(self, options: EngineOptions, vram: Vram, clock: Clock) -> None:
        self.options = options
        self.ready = False
        self.sleep_level = 0
        self.waiting = 0
        self.running = 0
        self.totals: Counter[str] = Counter()
        self.failed = asyncio.Event()
        """Set when the engine cannot go on; the process ends."""
        self._vram = vram
        self._clock = clock
        self._places = asyncio.Semaphore(options.max_running)
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Load the weights, then take the memory. Raises DriverError or CudaError when there is no room."""
        await self._clock.sleep(self.options.load_seconds)
        await self._vram.take()
        self.ready = True

    @asynccontextmanager
    async def computing(self, request: str, prompt_tokens: int) -> AsyncIterator[None]:
        """A request's turn, with its prompt computed. Raises ApiError when the driver refuses."""
        if not self.ready:
            raise ApiError(503, "ServiceUnavailableError", "the model is still loading; try again later")
        self.waiting += 1
        counted = False
        try:
            async with self._places, self._vram.computing(request):
                self.waiting, self.running, counted = self.waiting - 1, self.running + 1, True
                await self._compute(prompt_tokens / self.options.prefill_tokens_per_second)
                self.totals["prompt_tokens"] += prompt_tokens
                yield
        except (CudaError, DriverError) as error:
            raise ApiError(500, "EngineDeadError", f"the engine cannot compute: {error}") from error
        finally:
            if counted:
                self.running -= 1
            else:
                self.waiting -= 1

    async def pieces(self, generation: Generation) -> AsyncIterator[tuple[int, str]]:
        """The answers as they are computed: (index of the prompt, text)."""
        chunks = generation.tokens if self._clock.speed <= 1 else self.options.max_chunks
        for index in range(len(generation.prompts)):
            for tokens, text in generation.pieces(index, chunks if generation.stream else 1):
                await self._compute(tokens / self.options.tokens_per_second)
                self.totals["generation_tokens"] += tokens
                yield index, text
        self.totals[f"finished/{generation.finish_reason}"] += 1

    async def sleep(self, level: int) -> None:
        """Give the memory back. Raises ApiError while requests are being computed."""
        async with self._changing:
            if self.running or self.waiting:
                text = f"{self.running} requests run and {self.waiting} wait; drain the engine before it sleeps"
                raise ApiError(409, "ConflictError", text)
            if not self.ready or self.sleep_level:
                return
            self.sleep_level = level
            await self._vram.sleep()

    async def wake(self) -> None:
        """Take the memory back; without room the engine is dead, as a real one is. Raises ApiError."""
        async with self._changing:
            if not self.sleep_level:
                return
            try:
                await self._vram.wake()
                if self.sleep_level == 2:  # level 2 threw the weights away
                    await self._clock.sleep(self.options.load_seconds)
            except (CudaError, DriverError) as error:
                self.failed.set()
                raise ApiError(500, "EngineDeadError", f"wake-up failed: {error}") from error
            self.sleep_level = 0

    async def _compute(self, model_seconds: float) -> None:
        """One stretch of GPU work. Relative times only: after SIGCONT nothing is made up for."""
        await self._vram.runs()
        await self._clock.sleep(model_seconds)
        await self._vram.runs()
