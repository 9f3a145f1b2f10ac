"""An engine whose tokens a GPU computes: a decoder with seeded random weights, in PyTorch, behind OpenAI's chat API.

``python -m bench.gpu.engine --model NAME --gib 20`` fills that much of the first visible GPU with layers of Llama's
shape (8B's: 4096 wide, 32 heads) and decodes greedily, byte by byte, by replays of one CUDA graph, as real engines do.
The same prompt always gives the same text, so a text that differs after a park shows damaged weights.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from aiohttp import web

WIDTH, HEADS, INNER, BYTES = 4096, 32, 14336, 256
LAYER_BYTES = 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
CONTEXT = 256


class Decoder:
    """``layers`` decoder layers in bfloat16 with a static cache. It decodes one text at a time."""

    def __init__(self, layers: int, seed: int, device: str, width: int = WIDTH, inner: int = INNER) -> None:
        self._width, self._device = width, torch.device(device)
        random = torch.Generator(device=self._device)
        random.manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            return made.normal_(0.0, 1.2 / shape[-1] ** 0.5, generator=random)

        self._embedding = weight(BYTES, width)
        self._layers = [
            (weight(3 * width, width), weight(width, width), weight(2 * inner, width), weight(width, inner))
            for _ in range(layers)
        ]
        shape = (layers, 2, HEADS, CONTEXT, width // HEADS)
        self._cache = torch.zeros(shape, dtype=torch.bfloat16, device=self._device)
        self._places = torch.arange(CONTEXT, device=self._device)
        self._token = torch.zeros(1, dtype=torch.long, device=self._device)
        self._place = torch.zeros(1, dtype=torch.long, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._next = self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._next = self._step()
        torch.cuda.synchronize()

    def _step(self) -> torch.Tensor:
        """The token behind the present one, at its place."""
        x = self._embedding[self._token]
        hidden = (self._places > self._place).view(1, 1, CONTEXT)
        for number, (qkv, out, gate_up, down) in enumerate(self._layers):
            query, key, value = (_normed(x) @ qkv.T).view(3, HEADS, 1, self._width // HEADS)
            cache = self._cache[number]
            cache[0].index_copy_(1, self._place, key)
            cache[1].index_copy_(1, self._place, value)
            scores = (query @ cache[0].transpose(1, 2)).float() / (self._width // HEADS) ** 0.5
            seen = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(torch.bfloat16) @ cache[1]
            x = x + seen.view(1, self._width) @ out.T
            gate, up = (_normed(x) @ gate_up.T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ down.T
        return (_normed(x) @ self._embedding.T).float().argmax(-1)

    def tokens(self, prompt: bytes, count: int) -> Iterator[int]:
        """``count`` bytes behind the prompt, of which the last half of the context is read."""
        read = prompt[-(CONTEXT // 2) :] or b" "
        token = 0
        for place in range(len(read) + min(count, CONTEXT // 2) - 1):
            self._token.fill_(read[place] if place < len(read) else token)
            self._place.fill_(place)
            if self._graph is not None:
                self._graph.replay()
                token = int(self._next)
            else:
                token = int(self._step())
            if place >= len(read) - 1:
                yield token


def _normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


class Engine:
    """The HTTP side."""

    def __init__(self, model: str, decoder: Decoder) -> None:
        self._model, self._decoder = model, decoder
        self._turn = asyncio.Lock()

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = await request.json()
        prompt = "\n".join(str(one.get("content", "")) for one in asked.get("messages", ()))
        count = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 32)
        head = {"id": f"chatcmpl-{time.monotonic_ns():x}", "created": int(time.time()), "model": self._model}
        if not asked.get("stream"):
            text = "".join([_shown(token) async for token in self._decoded(prompt, count)])
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
            usage["total_tokens"] = sum(usage.values())
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        async for token in self._decoded(prompt, count):
            choice = {"index": 0, "delta": {"content": _shown(token)}, "finish_reason": None}
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _decoded(self, prompt: str, count: int) -> AsyncIterator[int]:
        """Tokens as they come, from a thread: the loop answers /health meanwhile."""
        async with self._turn:
            tokens = self._decoder.tokens(prompt.encode(), count)
            while (token := await asyncio.to_thread(next, tokens, None)) is not None:
                yield token


def _shown(token: int) -> str:
    """A byte as one character of text."""
    return chr(32 + token % 95)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.engine")
    parser.add_argument("--model", required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    seed = sum(options.model.encode())
    torch.set_grad_enabled(False)
    if torch.cuda.is_available():
        decoder = Decoder(max(1, int(options.gib * 2**30 / LAYER_BYTES)), seed, "cuda")
    else:
        decoder = Decoder(2, seed, "cpu", width=128, inner=256)
    engine = Engine(options.model, decoder)
    web.run_app(engine.app(), host=os.environ.get("POD_IP", "127.0.0.1"), port=options.port, print=None)


if __name__ == "__main__":
    main()
