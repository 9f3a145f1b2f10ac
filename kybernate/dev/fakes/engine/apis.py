"""The HTTP APIs by which engines sleep, with health and metrics, as each vendor documents them and nothing else.

Sources: vLLM 0.32.0 (``entrypoints/serve/dev/sleep``, ``entrypoints/rl/online``, ``v1/engine/core.py``), SGLang 0.5.23
(``srt/entrypoints/http_server.py``, ``weight_updater.py``), llama.cpp (``server/README.md``, ``server-models.cpp``),
Ollama (``docs/api.md``, ``server/routes.go``).
``tests/fakes/test_vendor_sources.py`` compares names and parameters with the vendors' wheels.
"""

import asyncio
import hmac
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kybernate.dev.fakes.engine import protocol
from kybernate.dev.fakes.engine.engine import Engine
from kybernate.dev.fakes.engine.libcuda import CudaError
from kybernate.dev.fakes.engine.memory import KV_CACHE, PARTS, WEIGHTS
from kybernate.dev.fakes.engine.protocol import ApiError
from kybernate.dev.fakes.gpu.client import DriverError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the server was started."""

    key: str = ""
    """``--api-key``."""
    dev_mode: bool = True
    """``VLLM_SERVER_DEV_MODE=1``: without it vLLM has no sleep endpoints."""
    cpu_backup: bool = True
    """SGLang's ``--enable-weights-cpu-backup``: without it weights are garbage after a resume."""
    metrics: bool = True
    """SGLang's ``--enable-metrics``, llama.cpp's ``--metrics``."""
    autoload: bool = True
    """llama.cpp without ``--no-models-autoload``: a request loads an unloaded model."""


class Api(ABC):
    """What all have: OpenAI's paths are served beside it."""

    def __init__(self, engine: Engine, options: ApiOptions) -> None:
        self.engine = engine
        self.options = options

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """The engine's own paths."""

    @abstractmethod
    def open(self, path: str) -> bool:
        """Whether a path needs no API key."""

    def authorized(self, request: web.Request) -> bool:
        """Whether a request may pass."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return not self.options.key or self.open(request.path) or hmac.compare_digest(token, self.options.key)

    async def before(self, request: web.Request) -> None:  # noqa: B027 (most engines do nothing)
        """Called with each request for the model, before it is computed. Raises ApiError."""

    async def _wake(self, parts: tuple[str, ...] = PARTS) -> None:
        """Take memory back; without room nothing has changed. Raises ApiError."""
        try:
            await self.engine.take_back(parts)
        except (CudaError, DriverError) as error:
            raise ApiError(500, "InternalServerError", f"CUDA out of memory: {error}") from error


class VllmApi(Api):
    """vLLM: sleep levels, tags, pause; all below dev mode, and none of it behind the API key."""

    def routes(self) -> list[web.RouteDef]:
        """Paths of vLLM."""
        always = [web.get(path, self.health) for path in ("/health", "/ping")]
        always += [web.get("/metrics", self.metrics), web.get("/version", self.version)]
        if not self.options.dev_mode:
            return always
        return [
            *always,
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.post("/release_kv_cache_memory", self.release_kv_cache_memory),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            web.post("/collective_rpc", self.collective_rpc),
        ]

    def open(self, path: str) -> bool:
        """The API key protects OpenAI's paths only."""
        return not path.startswith(("/v1", "/v2", "/inference", "/cohere"))

    async def health(self, _: web.Request) -> web.Response:
        """200 from the end of the load, whatever the GPU does."""
        return web.Response(status=200 if self.engine.ready else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """vLLM's names."""
        return web.Response(text=metrics_text(self.engine))

    async def version(self, _: web.Request) -> web.Response:
        """The version that is played."""
        return web.json_response({"version": "0.32.0"})

    async def sleep(self, request: web.Request) -> web.Response:
        """Pause, then give memory back; asleep already: 200 and nothing."""
        level = _choice(request, "level", ("0", "1", "2"), "1")
        mode = _choice(request, "mode", ("abort", "wait", "keep"), "abort")
        await self.engine.pause(mode)
        if level != "0":
            await self.engine.release(keeps=level == "1", level=int(level))
            if not self.engine.asleep:
                self.engine.resume()
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Take memory back; requests begin again once all of it is there."""
        tags = request.query.getall("tags", [])
        parts = [tag for tag in tags if tag != "scheduling"]
        if not tags or (parts and set(parts) <= self.engine.asleep):  # another tag: a warning in the log, and 200
            await self._wake(tuple(parts) or PARTS)
        if not self.engine.asleep:
            self.engine.resume()
        status = "sleeping" if self.engine.asleep else "awake"
        return web.json_response({"status": status, "tags": tags or None})

    async def is_sleeping(self, _: web.Request) -> web.Response:
        """True also while only paused."""
        return web.json_response({"is_sleeping": self.engine.paused or bool(self.engine.asleep)})

    async def release_kv_cache_memory(self, _: web.Request) -> web.Response:
        """Discard the KV cache of a paused engine whose memory is all there."""
        if not self.engine.paused or self.engine.running:
            raise ApiError(500, "InternalServerError", "release_kv_cache_memory() requires a completed pause first")
        if self.engine.asleep:
            text = "release_kv_cache_memory() requires all executor memory to be resident"
            raise ApiError(500, "InternalServerError", text)
        await self.engine.release((KV_CACHE,))
        return web.json_response({"status": "kv_cache_released"})

    async def pause(self, request: web.Request) -> web.Response:
        """Let no request begin."""
        await self.engine.pause(_choice(request, "mode", ("abort", "wait", "keep"), "abort"))
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        """Let requests begin, even to an engine that sleeps."""
        self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        """The scheduler's state."""
        return web.json_response({"is_paused": self.engine.paused})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """There is none."""
        return web.Response()

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """``reload_weights`` only: what level 2 needs between its two wake-ups."""
        body = await read_json(request)
        if not isinstance(body, dict) or body.get("method") != "reload_weights":
            raise ApiError(400, "BadRequestError", "Missing 'method' in request body", "method")
        if WEIGHTS in self.engine.asleep:
            raise ApiError(500, "InternalServerError", "reload_weights: the weights have no memory")
        await self.engine.reload()
        return web.json_response({"results": [None]})


class SglangApi(Api):
    """SGLang: release and resume by tags. There is no state to ask; an exception of the scheduler ends the server."""

    _TAGS = (KV_CACHE, WEIGHTS, "cuda_graph")

    def __init__(self, engine: Engine, options: ApiOptions) -> None:
        super().__init__(engine, options)
        self._offloaded: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        """Paths of SGLang."""
        metrics = [web.get("/metrics", self.metrics)] if self.options.metrics else []
        return [
            web.get("/health", self.health),
            web.get("/health_generate", self.health),
            web.get("/model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.route("*", "/release_memory_occupation", self.release),
            web.route("*", "/resume_memory_occupation", self.resume),
            *metrics,
        ]

    def open(self, path: str) -> bool:
        """The API key protects all but probes and metrics."""
        return path.startswith(("/health", "/ready", "/metrics"))

    async def health(self, _: web.Request) -> web.Response:
        """Generates one token; a server that released its memory must not be asked."""
        try:
            async with self.engine.computing(protocol.new_id("HEALTH_CHECK"), 1):
                return web.Response()
        except ApiError:
            return web.Response(status=503)

    async def model_info(self, _: web.Request) -> web.Response:
        """The model's path."""
        return web.json_response({"model_path": self.engine.options.model, "is_generation": True})

    async def server_info(self, _: web.Request) -> web.Response:
        """Its arguments."""
        saver = {"enable_memory_saver": self.engine.options.sleeps}
        return web.json_response(saver | {"enable_weights_cpu_backup": self.options.cpu_backup, "version": "0.5.23"})

    async def metrics(self, _: web.Request) -> web.Response:
        """SGLang's names."""
        labels = {"model_name": self.engine.options.model}
        gauges = {"num_running_reqs": self.engine.running, "num_queue_reqs": self.engine.waiting}
        return web.Response(text=_gauges("sglang", labels, gauges))

    async def release(self, request: web.Request) -> web.Response:
        """Only of an idle server."""
        tags = await self._tags(request)
        if self.engine.running or self.engine.waiting:
            self.engine.die("AssertionError: release_memory_occupation should be called only when server is idle.")
            await asyncio.Event().wait()
        self._offloaded.update(tags)
        await self.engine.release(_parts(tags), keeps=self.options.cpu_backup)
        return web.json_response(None)

    async def resume(self, request: web.Request) -> web.Response:
        """Once: a tag that is not released ends the server, and so does missing room."""
        tags = await self._tags(request)
        if not tags <= self._offloaded:
            self.engine.die(f"KeyError: {min(tags - self._offloaded)!r}")
            await asyncio.Event().wait()
        try:
            await self.engine.take_back(_parts(tags))
        except (CudaError, DriverError) as error:
            self.engine.die(f"torch_memory_saver: CUDA out of memory: {error}")
            await asyncio.Event().wait()
        self._offloaded -= tags
        return web.json_response(None)

    async def _tags(self, request: web.Request) -> set[str]:
        """Of the body, which must be a JSON object. Raises ApiError."""
        if request.method not in ("GET", "POST"):
            raise ApiError(405, "MethodNotAllowed", "Method Not Allowed")
        raw = await request.read()
        body = protocol.read_json(raw) if raw else None
        if not isinstance(body, dict) or not isinstance(body.get("tags"), list | None):
            raise ApiError(400, "BadRequestError", "body: Field required", "body")
        return set(body.get("tags") or self._TAGS)


class LlamaCppApi(Api):
    """llama.cpp's router mode: load and unload answer before it is done; what is done already is refused."""

    def __init__(self, engine: Engine, options: ApiOptions) -> None:
        super().__init__(engine, options)
        self._changing: asyncio.Task[None] | None = None
        self._status = "loaded"

    def routes(self) -> list[web.RouteDef]:
        """Paths of the router."""
        return [
            web.get("/health", self.health),
            web.get("/models", self.models),
            web.get("/v1/models", self.models),
            web.get("/props", self.props),
            web.get("/metrics", self.metrics),
            web.post("/models/load", self.load),
            web.post("/models/unload", self.unload),
        ]

    def open(self, path: str) -> bool:
        """The API key protects all but probes and the list of models."""
        return path in ("/health", "/v1/health", "/models", "/v1/models")

    async def before(self, request: web.Request) -> None:
        """A request loads an unloaded model unless that is switched off, for all or by its query."""
        if self._status == "loaded" or not self.engine.ready:
            return
        asked = request.query.get("autoload")
        if asked not in ("true", "1") if asked else not self.options.autoload:
            raise ApiError(400, "invalid_request_error", "model is not loaded")
        if self._status == "unloaded":
            self._begin("loading", self._take_back())
        if self._changing is not None:
            await asyncio.wait([self._changing])
        if self._status != "loaded":
            raise ApiError(500, "server_error", "model failed to load")

    async def health(self, _: web.Request) -> web.Response:
        """Of the router, whatever its model does."""
        return web.json_response({"status": "ok"}) if self.engine.ready else web.json_response({}, status=503)

    async def models(self, _: web.Request) -> web.Response:
        """The model and its status."""
        model = {"id": self.engine.options.model, "object": "model", "status": {"value": self._status}}
        return web.json_response({"object": "list", "data": [model]})

    async def props(self, request: web.Request) -> web.Response:
        """Of the router, or of a model, which it loads like any request."""
        if "model" in request.query:
            await self.before(request)
        return web.json_response({"role": "router", "is_sleeping": False})

    async def metrics(self, request: web.Request) -> web.Response:
        """Of one model, which it loads like any request."""
        if "model" not in request.query:
            raise ApiError(400, "invalid_request_error", "model name is missing from the request")
        await self.before(request)
        if not self.options.metrics:
            raise ApiError(501, "not_supported_error", "This server does not support metrics endpoint.")
        gauges = {"requests_processing": self.engine.running, "requests_deferred": self.engine.waiting}
        return web.Response(text=_gauges("llamacpp", {}, gauges))

    async def load(self, request: web.Request) -> web.Response:
        """Begin to load."""
        await self._named(request, 404)
        if self._status != "unloaded":
            raise ApiError(400, "invalid_request_error", "model is already running")
        self._begin("loading", self._take_back())
        return web.json_response({"success": True})

    async def unload(self, request: web.Request) -> web.Response:
        """Begin to unload; requests that run end early."""
        await self._named(request, 400)
        if self._status == "unloaded":
            raise ApiError(400, "invalid_request_error", "model is not running")
        self._begin("loaded", self._release())
        return web.json_response({"success": True})

    def _begin(self, status: str, work: Any) -> None:
        self._status = status
        self._changing = asyncio.create_task(work)

    async def _named(self, request: web.Request, status: int) -> None:
        body = await read_json(request)
        if not isinstance(body, dict) or body.get("model") != self.engine.options.model:
            raise ApiError(status, "invalid_request_error", "model is not found")

    async def _release(self) -> None:
        await self.engine.pause("abort")
        try:
            await self.engine.release()
        except ApiError:
            return
        finally:
            self.engine.resume()
        if self.engine.asleep:
            self._status = "unloaded"

    async def _take_back(self) -> None:
        try:
            await self._wake()
        except ApiError:
            self._status = "unloaded"
            return
        self._status = "unloaded" if self.engine.asleep else "loaded"


class OllamaApi(Api):
    """Ollama: a model is loaded by any request for it, and unloaded in the background after ``keep_alive: 0``."""

    def __init__(self, engine: Engine, options: ApiOptions) -> None:
        super().__init__(engine, options)
        self._unloading: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        """Paths of Ollama. There is no /health and no /metrics."""
        return [
            web.get("/", self.root),
            web.get("/api/version", self.version),
            web.get("/api/ps", self.ps),
            web.get("/api/tags", self.tags),
            web.post("/api/generate", self.generate),
        ]

    def open(self, path: str) -> bool:
        """There are no keys."""
        return bool(path)

    async def before(self, _: web.Request) -> None:
        """Load it."""
        if self.engine.asleep:
            await self._wake()

    async def root(self, _: web.Request) -> web.Response:
        """A text for people."""
        if not self.engine.ready:
            raise ApiError(503, "server_error", "loading")
        return web.Response(text="Ollama is running")

    async def version(self, _: web.Request) -> web.Response:
        """A version."""
        return web.json_response({"version": "0.40.12"})

    async def tags(self, _: web.Request) -> web.Response:
        """Models on disk."""
        return web.json_response({"models": [self._model()]})

    async def ps(self, _: web.Request) -> web.Response:
        """Models in memory."""
        return web.json_response({"models": [] if self.engine.asleep or not self.engine.ready else [self._model()]})

    async def generate(self, request: web.Request) -> web.Response:
        """Without a prompt: load, or unload where ``keep_alive`` is 0."""
        body = await read_json(request)
        if not isinstance(body, dict) or body.get("model") != self.engine.options.model:
            return web.json_response({"error": f"model '{body.get('model')}' not found"}, status=404)
        if body.get("prompt"):
            return web.json_response({"error": "the fake engine generates by OpenAI's paths only"}, status=400)
        if body.get("keep_alive") in (0, "0", "0s"):
            self._unloading = asyncio.create_task(self._unload())
            reason = "unload"
        else:
            await self.before(request)
            reason = "load"
        return web.json_response({"model": body["model"], "response": "", "done": True, "done_reason": reason})

    async def _unload(self) -> None:
        await self.engine.pause("wait")  # a runner is expired when its last request has ended
        try:
            await self.engine.release()
        except ApiError:
            pass
        finally:
            self.engine.resume()

    def _model(self) -> dict[str, Any]:
        return {"name": self.engine.options.model, "model": self.engine.options.model}


APIS: Mapping[str, type[Api]] = {
    "vllm": VllmApi,
    "sglang": SglangApi,
    "llamacpp": LlamaCppApi,
    "ollama": OllamaApi,
}


def metrics_text(engine: Engine) -> str:
    """All metrics of vLLM."""
    model = engine.options.model.replace("\\", "\\\\").replace('"', '\\"')
    labels = f'engine="0",model_name="{model}"'
    usage = engine.running / engine.options.max_running
    totals = engine.totals
    finished = {f'{labels},finished_reason="{why}"': totals[f"finished/{why}"] for why in ("stop", "length", "abort")}
    states = {f'{labels},sleep_state="{name}"': engine.sleep_level == at for at, name in enumerate(_SLEEP_STATES)}
    lines = [
        *_metric("num_requests_running", "gauge", "Requests being computed.", {labels: engine.running}),
        *_metric("num_requests_waiting", "gauge", "Requests waiting to be computed.", {labels: engine.waiting}),
        *_metric("kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all.", {labels: usage}),
        *_metric("prompt_tokens_total", "counter", "Prompt tokens computed.", {labels: totals["prompt_tokens"]}),
        *_metric("generation_tokens_total", "counter", "Tokens answered.", {labels: totals["generation_tokens"]}),
        *_metric("request_success_total", "counter", "Requests answered to the end.", finished),
        *_metric("engine_sleep_state", "gauge", "1 for the state that the engine is in.", states),
    ]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, samples: Mapping[str, float]) -> list[str]:
    family = f"vllm:{name}"
    values = [f"{family}{{{labels}}} {float(value)}" for labels, value in samples.items()]
    return [f"# HELP {family} {text}", f"# TYPE {family} {kind}", *values]


def _gauges(prefix: str, labels: Mapping[str, str], values: Mapping[str, int], separator: str = ":") -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return "".join(
        f"# TYPE {prefix}{separator}{name} gauge\n{prefix}{separator}{name}{{{inside}}} {float(value)}\n"
        for name, value in values.items()
    )


def _parts(tags: set[str]) -> tuple[str, ...]:
    return tuple(part for part in PARTS if part in tags)


def _choice(request: web.Request, name: str, known: tuple[str, ...], usual: str) -> str:
    """A query parameter. Raises ApiError."""
    value = request.query.get(name, usual)
    if value not in known:
        raise ApiError(400, "BadRequestError", f"{name}={value!r}; one of {', '.join(known)}", name)
    return value


async def read_json(request: web.Request) -> Any:
    """A request's body. Raises ApiError."""
    return protocol.read_json(await request.read())
