"""A seat whose engine is played here: its API as documented, its memory on one GPU, and the lies that engines tell.

The container is a real process, so that a kill is a kill; what the driver would list follows from the played memory.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from kybernate.messages import SeatTarget
from kybernate.node.host_memory import HostMemory
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver_calls import Timeouts, Usage, Use
from services.checkpointer.backends.engine import EngineBackend
from services.checkpointer.backends.host import open_host
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.backends.reservations import Headroom
from services.checkpointer.backends.restart import RestartBackend
from services.checkpointer.engine_http import AnswerCheck, open_engines
from services.checkpointer.processes import ProcessIdentity, identify

KEYS = Path(__file__)
"""Of engines that want one: any text will do."""
GIB = 2**30
GPU = "GPU-a"
FULL, RESIDUE = 40 * GIB, 2 * GIB


@dataclass(frozen=True)
class Waits(Timeouts):
    """Generous, unless a test waits for an effect that never comes."""

    base_seconds: float = 60.0
    settle_seconds: float = 0.3
    settle_floor_wall_seconds: float = 0.3
    effect_seconds: float = 60.0
    """Deadline of a call, and of its effect. The cases that wait in vain end alike if the call itself is late."""
    speed: float = 50.0
    """Shortens the time for which engine and driver must agree; the deadlines above are not divided by it."""

    def transfer(self, vram_bytes: int) -> float:
        """The same for any size."""
        return self.effect_seconds

    def wall(self, model_seconds: float) -> float:
        """As if time were real."""
        return model_seconds


WAITS, IN_VAIN = Waits(), Waits(effect_seconds=0.5)


@dataclass
class PlayedEngine:
    """One engine of the family ``kind``. ``lies``: what it does wrong."""

    kind: str
    lies: frozenset[str] = frozenset()
    held: int = FULL
    asleep: bool = False
    computing: int = 0
    version: str = "0.17.1"
    options: dict[str, bool] = field(
        default_factory=lambda: {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    )
    calls: list[str] = field(default_factory=list)
    resumed: int = 0
    end: Callable[[], None] = lambda: None
    """Ends the container."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        if request.method == "POST" and not request.path.startswith("/v1"):
            self.calls.append(request.path_qs)
        if request.path == "/health":
            return web.Response()
        if "misshapen" in self.lies and request.path in ("/api/ps", "/models", "/v1/models"):
            path = "/api/ps" if self.kind == "ollama" else "/models"
            return web.json_response({"models": [7], "data": ["m"]}, status=200 if path in request.path else 404)
        if request.path == "/v1/models" and self.kind != "ollama":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path == "/v1/completions":
            return web.json_response({"choices": [{"text": "gibberish" if self.held < FULL else "six seven"}]})
        if request.path == "/metrics":
            return web.Response(text=f"vllm:num_requests_running {self.computing}\n")
        return await getattr(self, f"_{self.kind}")(request, body)

    async def _sleep(self) -> None:
        if "late" in self.lies:
            asyncio.get_running_loop().call_later(0.2, self._release)
        elif "nothing" not in self.lies:
            self._release()
        self.asleep = "nothing" not in self.lies or "claims" in self.lies

    def _release(self) -> None:
        self.held = RESIDUE

    async def _wake(self) -> web.Response:
        self.resumed += 1
        if self.kind == "sglang" and self.resumed > 1:
            self.end()
        if "stays" not in self.lies:
            self.held = FULL
        self.asleep = "stays" in self.lies and "claims" not in self.lies
        return web.Response()

    async def _vllm(self, request: web.Request, body: Any) -> web.StreamResponse:
        match request.path:
            case "/version":
                return web.json_response({"version": self.version})
            case "/is_sleeping" if "mute" in self.lies and self.calls:
                return web.Response(status=500, text="EngineDeadError")
            case "/is_sleeping" if "no-dev-mode" not in self.lies:
                return web.json_response({"is_sleeping": self.asleep})
            case "/sleep":
                await self._sleep()
                return web.Response()
            case "/wake_up" if request.query.get("tags") in (None, "kv_cache"):
                return await self._wake()
            case "/wake_up":
                self.held = FULL // 2
                return web.Response()
            case "/collective_rpc" | "/reset_prefix_cache":
                assert request.path != "/collective_rpc" or body == {"method": "reload_weights"}
                return web.Response()
        return web.Response(status=404)

    async def _sglang(self, request: web.Request, body: Any) -> web.StreamResponse:
        match request.path:
            case "/get_server_info":
                return web.json_response(self.options)
            case "/release_memory_occupation" if body == {}:
                await self._sleep()
                return web.Response()
            case "/resume_memory_occupation" if body == {}:
                return await self._wake()
        return web.Response(status=404)

    async def _ollama(self, request: web.Request, body: Any) -> web.StreamResponse:
        match request.path:
            case "/api/ps":
                return web.json_response({"models": [] if self.asleep else [{"name": "m"}]})
            case "/api/generate":
                assert body["model"] == "m"
                if body["keep_alive"] == 0:
                    await self._sleep()
                    return web.Response()
                return await self._wake()
        return web.Response(status=404)

    async def _llamacpp(self, request: web.Request, body: Any) -> web.StreamResponse:
        match request.path:
            case "/models":
                status = {"value": "sleeping" if "idle" in self.lies else "unloaded" if self.asleep else "loaded"}
                return web.json_response(
                    {"data": [{"id": "m", "status": status}, {"id": "d", "status": {"value": "downloaded"}}]}
                )
            case "/models/unload":
                await self._sleep()
                return web.Response()
            case "/models/load":
                return web.Response(status=400, text="already running") if "idle" in self.lies else await self._wake()
        return web.Response(status=404)


@dataclass
class Readings:
    """What the driver lists: one process with the memory that the engine holds; ``others``: bytes of another seat."""

    engine: PlayedEngine
    pid: int
    alive: Callable[[], bool]
    others: int = 0
    unlisted: int = 0
    """Bytes in use that belong to no listed process."""
    timeouts: Timeouts = WAITS
    lists: bool = True
    """False: it lists no processes, as on a virtual machine."""
    context: bool = True
    """The engine has a CUDA context."""

    @property
    def _uses(self) -> list[Use]:
        own = [Use(self.pid, GPU, self.engine.held, "")] if self.alive() and self.engine.held else []
        return own + ([Use(1, GPU, self.others, "")] if self.others else [])

    async def processes(self, *_: Any) -> list[Use]:
        return self._uses if self.lists else []

    async def memory(self, *_: Any) -> dict[str, tuple[int, int]]:
        return {GPU: (self.unlisted + sum(use.size or 0 for use in self._uses), 80 * GIB)}

    async def usage(self, *_: Any) -> Usage:
        return Usage(await self.processes(), await self.memory())

    async def survey(self, _: str, processes: Sequence[ProcessIdentity]) -> tuple[Usage, dict[ProcessIdentity, bool]]:
        return await self.usage(), dict.fromkeys(processes, self.context)


class Plenty(HostMemory):
    """Host memory without end."""

    async def free_bytes(self) -> int:
        return 1000 * GIB


@dataclass
class Stand:
    """The seat, its backend and its engine."""

    backend: EngineBackend | RestartBackend
    engine: PlayedEngine
    readings: Readings
    process: asyncio.subprocess.Process
    target: SeatTarget
    check: AnswerCheck
    notes: list[str] = field(default_factory=list)

    async def note(self, step: str, pid: int | None, detail: str = "") -> None:
        self.notes.append(step)

    async def found(self) -> SeatProcesses:
        """The seat as a park finds it."""
        seat = await self.backend.discover(self.target, "G0", 1)
        return await self.backend.prepare(await self.check.recorded(seat))

    async def parked(self) -> SeatProcesses:
        """The seat as an activation finds it."""
        seat = await self.found()
        assert (await self.backend.park(seat, self.note)).outcome == "parked"
        return seat.model_copy(update={"parked_on": seat.at, "baseline": {}})


@asynccontextmanager
async def played(engine: PlayedEngine, backend: str = "") -> AsyncIterator[Stand]:
    """An engine that runs, and a backend (its own, if none is named) that may park it."""
    process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    engine.end = lambda: process.kill() if process.returncode is None else None
    name = backend or {"ollama": "unload", "llamacpp": "unload"}.get(engine.kind, engine.kind)
    try:
        async with TestServer(engine.app()) as server, open_engines(KEYS.parent) as http:
            host = open_host(None, 1.0, fake_kubelet=True)
            host = replace(host, headroom=Headroom(Plenty(), None))
            one = open_backends(None, WAITS, host, http=http)[name]  # type: ignore[arg-type]
            readings = Readings(engine, process.pid, lambda: identify(process.pid) is not None)
            one.calls = one.evidence.calls = readings  # type: ignore[assignment]
            target = SeatTarget(
                seat="s00",
                pod_uid="u",
                container_id=f"process://{process.pid}",
                gpus=(GPU,),
                backend=name,
                endpoint=str(server.make_url("")).rstrip("/"),
            )
            yield Stand(one, engine, readings, process, target, AnswerCheck(http, seconds=5.0))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
