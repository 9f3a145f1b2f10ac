"""A server that follows llama-swap's rule, with made-up engines: ``python -m bench.swap_rule SPEED < groups.json``.

A group has one running model. Its requests are served at once, as long as there are any; others wait, and the one that
came first gets the group when nothing runs any more (llama-swap's scheduler ``fifo``). A swap takes the seconds that
the fake GPU driver takes for a checkpoint and a restore; an answer takes what the fake engine computes. It has no
process to talk to, so it costs less than llama-swap itself. Prints its port.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.dev.fakes.engine.protocol import prompt_tokens
from kybernate.dev.fakes.gpu.spec import MachineSpec


class SwapGroup:
    """The models of one group; ``sizes``: bytes of each."""

    def __init__(self, sizes: dict[str, int], speed: float) -> None:
        self._sizes, self._speed = sizes, speed
        self._running = next(iter(sizes))
        self._swapping = False
        self._busy = 0
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._swaps: set[asyncio.Task[None]] = set()

    async def enter(self, model: str) -> None:
        """Wait until the model runs; then one more request of it is computed."""
        if self._swapping or model != self._running:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((model, turn))
            self._next()
            await turn
        else:
            self._busy += 1

    def leave(self) -> None:
        """A request has been answered."""
        self._busy -= 1
        self._next()

    def _next(self) -> None:
        if self._swapping or self._busy or not self._waiting:
            return
        self._swapping = True
        task = asyncio.create_task(self._swap(self._waiting[0][0]))
        self._swaps.add(task)
        task.add_done_callback(self._swaps.discard)

    async def _swap(self, model: str) -> None:
        if model != self._running:
            await asyncio.sleep(sum(_transfer(self._sizes[each]) for each in (self._running, model)) / self._speed)
        self._running, self._swapping = model, False
        waiting, self._waiting = self._waiting, deque()
        for wanted, turn in waiting:
            if wanted != model:
                self._waiting.append((wanted, turn))
            elif not turn.done():
                self._busy += 1
                turn.set_result(None)


def service_seconds(body: Mapping[str, Any]) -> float:
    """Model seconds that the fake engine computes the answer to a completion."""
    engine = EngineOptions("")
    read = prompt_tokens(body["prompt"]) / engine.prefill_tokens_per_second
    return read + float(body["max_tokens"]) / engine.tokens_per_second


def _transfer(size: int) -> float:
    spec = MachineSpec(())
    return spec.overhead_seconds + size / spec.bandwidth


async def serve(groups: list[dict[str, int]], speed: float) -> None:
    """Serve until the process is ended."""
    made = [(SwapGroup(sizes, speed), sizes) for sizes in groups]
    of = {model: group for group, sizes in made for model in sizes}

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        group = of[body["model"]]
        await group.enter(body["model"])
        try:
            await asyncio.sleep(service_seconds(body) / speed)
        finally:
            group.leave()
        return web.json_response({"choices": [{"text": ""}]})

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.load(sys.stdin), float(sys.argv[1])))
