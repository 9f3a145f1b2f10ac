"""The engine behind the HTTP server: loading, computing requests in model time, sleeping, counting."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.libcuda import CudaError
from kybernate.dev.fakes.engine.lies import Lie, Lies
from kybernate.dev.fakes.engine.llama import Llama
from kybernate.dev.fakes.engine.memory import PARTS, WEIGHTS, Vram
from kybernate.dev.fakes.engine.protocol import ApiError, Generation
from kybernate.dev.fakes.gpu.client import DriverError

LATE_SECONDS = 5.0
"""Model seconds by which ``Lie.SLEEP_LATE`` delays the memory."""


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
    sleeps: bool = True
    """Whether the engine's own sleep frees memory: ``--enable-sleep-mode``, ``--enable-memory-saver``."""
    lies: Lies = field(default_factory=Lies)


class AbortedError(Exception):
    """A request was ended early by the engine."""


class Engine:
    """One model, loaded once, maybe asleep."""

    def __init__(self, options: EngineOptions, vram: Vram, clock: Clock, llama: Llama | None = None) -> None:
        self.options = options
        self.llama = llama
        """Computes the answers; None: they are made up."""
        self.ready = False
        self.asleep: set[str] = set()
        """Parts of its memory that it says it has given back."""
        self.sleep_level = 0
        self.garbled = False
        """The weights are not those of the model."""
        self.waiting = 0
        self.running = 0
        self.totals: Counter[str] = Counter()
        self.failed = asyncio.Event()
        """Set when the engine cannot go on; the process ends."""
        self.failure = ""
        self.hangs = asyncio.Event()
        """Set when a lie leaves a request without an answer."""
        self._broken = ""
        """``broken``: requests fail; ``wedged``: they are never answered; the server looks well."""
        self._turns: Counter[str] = Counter()
        self._vram = vram
        self._clock = clock
        self._places = asyncio.Semaphore(options.max_running)
        self._changing = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._aborting = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._later: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Load the weights, then take the memory. Raises DriverError or CudaError when there is no room."""
        await asyncio.sleep(self._clock.to_wall(self.options.load_seconds))
        await self._vram.take()
        if self.llama is not None:
            await self.llama.load()
        self.ready = True

    @property
    def paused(self) -> bool:
        """Whether new requests wait until ``resume``."""
        return not self._open.is_set()

    @asynccontextmanager
    async def computing(self, request: str, prompt_tokens: int) -> AsyncIterator[None]:
        """A request's turn, with its prompt computed. Raises ApiError when the driver refuses."""
        if not self.ready:
            raise ApiError(503, "ServiceUnavailableError", "the model is still loading; try again later")
        self.waiting += 1
        counted = False
        try:
            if self._broken == "wedged":
                await self._hang()
            if self._broken:
                raise ApiError(500, "EngineDeadError", "EngineCore encountered an issue")
            if not self.asleep:  # a request to a sleeping engine is never served: the driver counts it
                await self._open.wait()
            async with self._places, self._vram.computing(request):
                if self._vram.given:
                    self._broken = "broken"
                    raise ApiError(500, "EngineDeadError", "an illegal memory access was encountered")
                self.waiting, self.running, counted = self.waiting - 1, self.running + 1, True
                self._idle.clear()
                await self._compute(prompt_tokens / self.options.prefill_tokens_per_second)
                self.totals["prompt_tokens"] += prompt_tokens
                yield
        except (CudaError, DriverError) as error:
            raise ApiError(500, "EngineDeadError", f"the engine cannot compute: {error}") from error
        finally:
            if counted:
                self.running -= 1
                if not self.running:
                    self._idle.set()
            else:
                self.waiting -= 1

    async def pieces(self, generation: Generation) -> AsyncIterator[tuple[int, str]]:
        """The answers as they are computed: (index of the prompt, text). Raises AbortedError where ``pause`` aborts."""
        chunks = generation.tokens if self._clock.speed <= 1 else self.options.max_chunks
        generation = replace(generation, garbled=self.garbled)
        aborted = self._aborting
        for index in range(len(generation.prompts)):
            for tokens, text in generation.pieces(index, chunks if generation.stream else 1):
                await self._compute(tokens / self.options.tokens_per_second, aborted)
                if aborted.is_set():
                    self.totals["finished/abort"] += 1
                    raise AbortedError
                self.totals["generation_tokens"] += tokens
                yield index, text
        self.totals[f"finished/{generation.finish_reason}"] += 1

    async def pause(self, mode: str) -> None:
        """Let no request begin. Those that run: ``abort`` ends them, ``wait`` waits for them, ``keep`` neither."""
        self._open.clear()
        if mode == "abort":
            self._aborting.set()
            self._aborting = asyncio.Event()
        if mode != "keep":
            await self._idle.wait()

    def resume(self) -> None:
        """Let requests begin."""
        self._open.set()

    async def release(self, parts: Iterable[str] = PARTS, *, keeps: bool = True, level: int = 1) -> None:
        """Give parts of the memory back; ``keeps``: the weights are copied and come back. A client that goes away does
        not end it, as a scheduler in another process does not hear of that. Raises ApiError."""
        await self._to_its_end(self._release(parts, keeps=keeps, level=level))

    async def take_back(self, parts: Iterable[str] = PARTS) -> None:
        """Take parts back, to the end as well. Raises CudaError or DriverError without room: then nothing has changed;
        and ApiError."""
        if Lie.WAKE_CUT in self.options.lies.since:
            await self._take_back(parts)
        else:
            await self._to_its_end(self._take_back(parts))

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        await asyncio.shield(task)

    async def _release(self, parts: Iterable[str], *, keeps: bool, level: int) -> None:
        async with self._changing:
            self._turns["sleep"] += 1
            new = [part for part in parts if part not in self.asleep]
            await self._misbehave(Lie.SLEEP_FAILS, Lie.SLEEP_HANGS)
            if self._lies(Lie.SLEEP_NOOP) or not new:
                return
            self.garbled |= WEIGHTS in new and not keeps
            if self._lies(Lie.SLEEP_LATE):
                self._later.add(asyncio.create_task(self._give_later(new)))
            elif self.options.sleeps and not self._lies(Lie.SLEEP_IGNORED):
                await self._vram.give(new[:1] if self._lies(Lie.SLEEP_HALF) or self._lies(Lie.SLEEP_DIES) else new)
            if self._lies(Lie.SLEEP_DIES):
                _kill()
            if self.llama is not None and WEIGHTS in new:
                await self.llama.unload()
            if self._lies(Lie.SLEEP_BREAKS):
                self._broken = "broken"
            self.asleep.update(new)
            self.sleep_level = level

    async def _take_back(self, parts: Iterable[str]) -> None:
        async with self._changing:
            self._turns["wake"] += 1
            old = [part for part in parts if part in self.asleep]
            await self._misbehave(None, Lie.WAKE_HANGS)
            if self._lies(Lie.WAKE_FAILS):
                raise DriverError("alloc", 2, "OUT_OF_MEMORY", "wake-up found no room on the GPU")
            if self._lies(Lie.WAKE_NOOP) or not old:
                return
            if self._lies(Lie.WAKE_DIES):
                await self._vram.take_back(old[:1])
                _kill()
            if self.options.sleeps and not self._lies(Lie.WAKE_IGNORED):
                await self._vram.take_back(old)
            if self.llama is not None and WEIGHTS in old:
                await self.llama.load()
            self.garbled |= self._lies(Lie.WAKE_GARBLES)
            if self._lies(Lie.WAKE_BREAKS) or self._lies(Lie.WAKE_WEDGES):
                self._broken = "wedged" if self._lies(Lie.WAKE_WEDGES) else "broken"
            self.asleep.difference_update(old)
            if not self.asleep:
                self.sleep_level = 0

    def die(self, why: str) -> None:
        """End the process, as an engine does whose scheduler raised an exception."""
        self.failure = why
        self.failed.set()

    async def reload(self) -> None:
        """Read the weights again."""
        await asyncio.sleep(self._clock.to_wall(self.options.load_seconds))
        self.garbled = False

    def _lies(self, lie: Lie) -> bool:
        return self.options.lies.holds(lie, self._turns[lie.partition("-")[0]])

    async def _misbehave(self, fails: Lie | None, hangs: Lie) -> None:
        if fails is not None and self._lies(fails):
            raise ApiError(500, "InternalServerError", "the call failed")
        if self._lies(hangs):
            self._broken = "wedged"  # the loop that computes waits for the call
            await self._hang()

    async def _hang(self) -> None:
        self.hangs.set()
        await asyncio.Event().wait()

    async def _give_later(self, parts: list[str]) -> None:
        await asyncio.sleep(self._clock.to_wall(LATE_SECONDS))
        await self._vram.give(parts)

    async def _compute(self, model_seconds: float, aborted: asyncio.Event | None = None) -> None:
        """One stretch of GPU work. Relative times only: after SIGCONT nothing is made up for."""
        await self._vram.runs()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((aborted or asyncio.Event()).wait(), self._clock.to_wall(model_seconds))
        await self._vram.runs()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
