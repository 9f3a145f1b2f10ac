"""The HTTP side: OpenAI's paths; ``apis.py`` has those of each engine."""

import contextlib
import time

from aiohttp import web

from kybernate.dev.fakes.engine import families, protocol
from kybernate.dev.fakes.engine.apis import APIS, Api, ApiOptions, Handler, read_json
from kybernate.dev.fakes.engine.engine import AbortedError, Engine
from kybernate.dev.fakes.engine.llama import Llama
from kybernate.dev.fakes.engine.protocol import (
    ApiError,
    Chunks,
    Generation,
    embedding_base64,
    expected_embedding,
    new_id,
    prompt_tokens,
)


def build_app(engine: Engine, api: str = "vllm", options: ApiOptions | None = None) -> web.Application:
    """The application; ``engine`` may still be loading. ``api``: whose sleep API it has (``APIS``)."""
    own = APIS[api](engine, options or ApiOptions())
    http = _Http(engine, own)
    app = web.Application(client_max_size=64 << 20, middlewares=[_errors, http.authorize])
    app.add_routes(
        [
            *own.routes(),
            web.get("/v1/models", http.models),
            web.post("/v1/chat/completions", http.chat),
            web.post("/v1/completions", http.completions),
            web.post("/v1/embeddings", http.embeddings),
            *[web.post(path, http.text) for path in families.STYLES],
            *[web.post(path, http.other) for path in families.OTHERS],
            web.post("/v1/audio/transcriptions", http.transcription),
        ]
    )
    return app


class _Http:
    def __init__(self, engine: Engine, api: Api) -> None:
        self._engine = engine
        self._api = api
        self._options = engine.options
        self._created = int(time.time())

    @web.middleware
    async def authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._api.authorized(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response(protocol.models(self._options.model, self._options.max_model_len, self._created))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def embeddings(self, request: web.Request) -> web.Response:
        body = protocol.read_body(await read_json(request), self._options.model)
        if self._engine.llama is not None:
            raise ApiError(501, "not_supported_error", "this engine has no embeddings")
        inputs = protocol.read_inputs(body, "input")
        tokens = sum(map(prompt_tokens, inputs))
        await self._api.before(request)
        async with self._engine.computing(new_id("embd"), tokens):
            vectors = [expected_embedding(self._options.model, text) for text in inputs]
        encoded: list[str | list[float]] = [*vectors]
        if body.get("encoding_format") == "base64":
            encoded = [embedding_base64(vector) for vector in vectors]
        return web.json_response(protocol.embeddings(self._options.model, encoded, tokens))

    async def text(self, request: web.Request) -> web.Response:
        """Responses and messages; a stream comes in one piece."""
        generation = families.read(
            request.path, await read_json(request), self._options.model, self._options.max_model_len
        )
        await self._api.before(request)
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            texts = [text async for _, text in self._engine.pieces(generation)]
        if generation.stream:
            body = families.events(request.path, generation, texts)
            return web.Response(body=body, content_type="text/event-stream")
        return web.json_response(families.STYLES[request.path][0].whole(generation, "".join(texts)))

    async def other(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        answer = families.other(request.path, body, self._options.model, self._options.max_model_len)
        await self._api.before(request)
        async with self._engine.computing(new_id("other"), 1):
            return web.json_response(answer)

    async def transcription(self, request: web.Request) -> web.Response:
        form = await request.post()
        protocol.read_body(dict(form), self._options.model)
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise ApiError(400, "BadRequestError", "file: Field required", "file")
        audio = file.file.read()
        await self._api.before(request)
        async with self._engine.computing(new_id("audio"), max(1, len(audio) // 1000)):
            return web.json_response({"text": families.transcription(self._options.model, audio)})

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        generation = protocol.read_generation(
            await read_json(request),
            model=self._options.model,
            chat=chat,
            id=new_id("chatcmpl" if chat else "cmpl"),
            max_model_len=self._options.max_model_len,
        )
        await self._api.before(request)
        if self._engine.llama is not None:
            return await self._relay(request, generation, self._engine.llama)
        if generation.stream:
            return await self._stream(request, generation)
        texts = {}
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            with contextlib.suppress(AbortedError):
                async for index, text in self._engine.pieces(generation):
                    texts[index] = text
        return web.json_response(protocol.whole(generation, texts))

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chunks, aborted = Chunks(generation), False
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            await response.prepare(request)
            if opening := chunks.opening():
                await response.write(opening)
            try:
                async for index, text in self._engine.pieces(generation):
                    await response.write(chunks.text(index, text))
            except AbortedError:
                aborted = True
        # The driver knows that the request has ended before the client can: a checkpoint may follow at once.
        await response.write(chunks.closing(aborted=aborted))
        await response.write_eof()
        return response

    async def _relay(self, request: web.Request, generation: Generation, llama: Llama) -> web.StreamResponse:
        """llama.cpp's answer; its last piece once the driver knows that the request has ended."""
        response, last = web.StreamResponse(), b""
        async with self._engine.computing(generation.id, generation.prompt_tokens):
            async for status, kind, piece in llama.answer(request.path, await request.read()):
                if not response.prepared:
                    response.set_status(status)
                    response.content_type = kind.partition(";")[0]
                    await response.prepare(request)
                await response.write(last)
                last = piece
        await response.write(last)
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
