"""A server that follows llama-swap's rule, with made-up engines: ``python -m bench.swap_rule SPEED < groups.json``; and
llama-swap itself, where ``KYB_LLAMA_SWAP`` names its binary.

A group has one running model. Its requests are served at once, as long as there are any; others wait, and the one that
came first gets the group when nothing runs any more (llama-swap's scheduler ``fifo``). A swap takes the seconds that
the fake GPU driver takes for a checkpoint and a restore; an answer takes what the fake engine computes. It has no
process to talk to, so it costs less than llama-swap itself. Prints its port.

llama-swap asks a new process for its health after 250 ms and then each second, of wall time: a binary for a comparison
at another speed than 1 has these two (``internal/process/process_command.go``) divided by the speed. Its processes are
``bench.swap_engine``, with the same seconds.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from bench.proxies import listens
from kybernate.dev.fakes.engine.engine import EngineOptions
from kybernate.dev.fakes.engine.protocol import prompt_tokens
from kybernate.dev.fakes.gpu.spec import MachineSpec
from kybernate.dev.nats_server import free_port

LLAMA_SWAP = os.environ.get("KYB_LLAMA_SWAP", "")
"""Path of a llama-swap; empty: there is none."""


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


@asynccontextmanager
async def swap_rule(groups: list[dict[str, int]], speed: float) -> AsyncIterator[str]:
    """The address of this server in a separate process. ``groups``: bytes of each model."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "bench.swap_rule", str(speed))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(groups).encode())
        process.stdin.close()
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def llama_swap(groups: list[dict[str, int]], speed: float) -> AsyncIterator[str]:
    """The address of llama-swap itself."""
    with tempfile.TemporaryDirectory() as folder:
        port, log, config = free_port(), Path(folder) / "log", Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(_config(groups, speed)))
        with log.open("wb") as out:
            command = (LLAMA_SWAP, "-config", str(config), "-listen", f"127.0.0.1:{port}")
            process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            await listens(port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


def _config(groups: list[dict[str, int]], speed: float) -> dict[str, Any]:
    """llama-swap's configuration: our groups are its groups, and no request is refused for their number."""
    engine = EngineOptions("")
    rates = f"{engine.prefill_tokens_per_second * speed} {engine.tokens_per_second * speed}"
    models = {
        model: {
            "cmd": f"{sys.executable} -m bench.swap_engine ${{PORT}} {seconds} {seconds} {rates}",
            "concurrencyLimit": 10_000,
        }
        for sizes in groups
        for model, seconds in ((model, _transfer(size) / speed) for model, size in sizes.items())
    }
    named = {f"g{i}": {"swap": True, "exclusive": False, "members": list(sizes)} for i, sizes in enumerate(groups)}
    return {"startPort": free_port(), "models": models, "groups": named}


if __name__ == "__main__":
    asyncio.run(serve(json.load(sys.stdin), float(sys.argv[1])))
