"""The HTTP side: OpenAI's paths, vLLM's health, metrics and sleep mode."""

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kybernate.dev.fakes.engine import protocol
from kybernate.dev.fakes.engine.engine import Engine
from kybernate.dev.fakes.engine.protocol import (
    ApiError,
    Chunks,
    Generation,
    embedding_base64,
    expected_embedding,
    prompt_tokens,
)

_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def metrics_text(engine: Engine) -> str:
    """All metrics of an engine."""
    model = engine.options.model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{model}"'
    usage = engine.running / engine.options.max_running
    totals = engine.totals
    lines = [
        *_metric("num_requests_running", "gauge", "Requests being computed.", {labels: engine.running}),
        *_metric("num_requests_waiting", "gauge", "Requests waiting to be computed.", {labels: engine.waiting}),
        *_metric("kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all.", {labels: usage}),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens computed.", {labels: totals["prompt_tokens"]}),
        *_metric("generation_tokens_total", "counter", "Tokens answered.", {labels: totals["generation_tokens"]}),
        *_metric(
            "request_success_total",
            "counter",
            "Requests answered to the end.",
            {f'{labels},finished_reason="{why}"': totals[f"finished/{why}"] for why in ("stop", "length")},
        ),
        *_metric(
            "engine_sleep_state",
            "gauge",
            "1 for the state that the engine is in.",
            {f'{labels},sleep_state="{name}"': engine.sleep_level == level for level, name in enumerate(_SLEEP_STATES)},
        ),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, samples: dict[str, float]) -> list[str]:
    family = f"vllm:{name}"
    values = [f"{family}{{{labels}}} {float(value)}" for labels, value in samples.items()]
    return [f"# HELP {family} {text}", f"# TYPE {family} {kind}", *values]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(engine: Engine) -> web.Application:
    """The application; ``engine`` may still be loading."""
    http = _Http(engine)
    app = web.Application(client_max_size=64 << 20, middlewares=[_errors])
    app.add_routes(
        [
            web.get("/health", http.health),
            web.get("/ping", http.health),
            web.get("/metrics", http.metrics),
            web.get("/v1/models", http.models),
            web.post("/v1/chat/completions", http.chat),
            web.post("/v1/completions", http.completions),
            web.post("/v1/embeddings", http.embeddings),
            web.post("/sleep", http.sleep),
            web.post("/wake_up", http.wake_up),
            web.get("/is_sleeping", http.is_sleeping),
        ]
    )
    return app


class _Http:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._options = engine.options
        self._created = int(time.time())

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics_text(self._engine))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(protocol.models(self._options.model, self._options.max_model_len, self._created))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def embeddings(self, request: web.Request) -> web.Response:
        body = protocol.read_body(await _json(request), self._options.model)
        inputs = protocol.read_inputs(body, "input")
        tokens = sum(map(prompt_tokens, inputs))
        async with self._engine.computing(_new_id("embd"), tokens):
            vectors = [expected_embedding(self._options.model, text) for text in inputs]
        encoded: list[str | list[float]] = [*vectors]
        if body.get("encoding_format") == "base64":
            encoded = [embedding_base64(vector) for vector in vectors]
        return web.json_response(protocol.embeddings(self._options.model, encoded, tokens))

    async def sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, "BadRequestError", f"level={level!r}; levels are 1 and 2", "level")
        await self._engine.sleep(int(level))
        return web.Response()

    async def wake_up(self, _: web.Request) -> web.Response:
        await self._engine.wake()
        return web.Response()

    async def is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._engine.sleep_level > 0})

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        generation = protocol.read_generation(
            await _json(request),
            model=self._options.model,
            chat=chat,
            id=_new_id("chatcmpl" if chat else "cmpl"),
            max_model_len=self._options.max_model_len,
        )
        if generation.stream:
            return await self._stream(request, generation)
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            async for _ in self._engine.pieces(generation):
                pass
        return web.json_response(protocol.whole(generation))

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chunks = Chunks(generation)
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            await response.prepare(request)
            if opening := chunks.opening():
                await response.write(opening)
            async for index, text in self._engine.pieces(generation):
                await response.write(chunks.text(index, text))
        # The driver knows that the request has ended before the client can: a checkpoint may follow at once.
        await response.write(chunks.closing())
        await response.write_eof()
        return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        kind = "NotFoundError" if error.status == 404 else "BadRequestError"
        return web.json_response(ApiError(error.status, kind, error.reason).body, status=error.status)


async def _json(request: web.Request) -> Any:
    return protocol.read_json(await request.read())


def _new_id(kind: str) -> str:
    return f"{kind}-{os.urandom(12).hex()}"
