"""kubelet ↔ kyb-probe ↔ engine and manager, over real sockets."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from kybernate.http.server import HttpServer
from services.probe import server
from services.probe.server import ProbeServer
from services.probe.settings import ProbeSettings, ProbeSettingsError, ProbeTarget, read
from tests.until import until

TIMEOUT = 10.0
"""Kubelet's timeoutSeconds; long enough for a busy machine."""


@dataclass
class Engine:
    """Answers its health with ``status``, or not at all while ``frozen``."""

    status: int = 200
    frozen: bool = False
    requests: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path_qs} {request.headers.get('X-Token', '')}".strip())
        if self.frozen:
            await asyncio.Event().wait()
        return web.Response(status=self.status, text="engine", headers={"X-Engine": "yes"})


@dataclass
class Node:
    """The manager."""

    states: list[str] = field(default_factory=lambda: ["active"])
    """States it reports, one per request; the last one is repeated. Empty text: HTTP 503."""
    started: bool = False
    """Its seat has served before."""
    requests: int = 0
    stops: list[tuple[bool, bool]] = field(default_factory=list)
    """(wait, deleted), one per question of a preStop hook."""

    async def handle(self, _: web.Request) -> web.Response:
        self.requests += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if not state:
            return web.json_response({}, status=503)
        return web.json_response({"state": state, "since": hash(state) % 1000, "started": self.started})

    async def stop(self, _: web.Request) -> web.Response:
        self.requests += 1
        if not self.stops:
            return web.json_response({}, status=503)
        wait, deleted = self.stops.pop(0) if len(self.stops) > 1 else self.stops[0]
        return web.json_response({"wait": wait, "deleted": deleted})


@dataclass
class Stand:
    engine: Engine
    node: Node
    engine_port: int
    manager_port: int
    stack: AsyncExitStack
    http: aiohttp.ClientSession
    manager: HttpServer

    async def probe(self, *targets: ProbeTarget, **more: object) -> ProbeServer:
        given = {"host_ip": "127.0.0.1", "manager_port": self.manager_port, "pod_uid": "u1", "pod_ip": "127.0.0.1"}
        settings = ProbeSettings(**{**given, "health_port": 0, "targets": targets, **more})  # type: ignore[arg-type]
        return await self.stack.enter_async_context(ProbeServer(settings).serving())

    async def kubelet(self, kind: str = "liveness", *, scheme: str = "HTTP", timeout: float = TIMEOUT) -> int:
        """Send one probe to a new server; return the status."""
        probe = await self.probe(ProbeTarget(0, self.engine_port, kind, scheme, timeout))
        return await self.get(probe.ports[1])

    async def get(self, port: int, path: str = "/health?deep=1") -> int:
        async with self.http.get(f"http://127.0.0.1:{port}{path}", headers={"X-Token": "t"}) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    engine, node = Engine(), Node()
    one, two = web.Application(), web.Application()
    one.router.add_route("*", "/{path:.*}", engine.handle)
    two.router.add_get("/v1/pods/u1", node.handle)
    two.router.add_get("/v1/pods/u1/stop", node.stop)
    async with AsyncExitStack() as stack:
        serving = await stack.enter_async_context(HttpServer(one, "127.0.0.1", 0))
        manager = await stack.enter_async_context(HttpServer(two, "127.0.0.1", 0))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Stand(engine, node, serving.port, manager.port, stack, http, manager)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets little of the timeout, and the manager most of it."""
    monkeypatch.setattr(server, "ENGINE_SHARE", 0.05)
    monkeypatch.setattr(server, "ASK_SHARE", 0.9)


async def test_no_probe_reaches_an_engine_that_was_parked_since_the_one_before(stand: Stand) -> None:
    stand.node.states = ["active", "parked"]
    probe = await stand.probe(ProbeTarget(0, stand.engine_port, "liveness", "HTTP", TIMEOUT))
    assert [await stand.get(probe.ports[1]) for _ in range(3)] == [200, 200, 200]
    assert len(stand.engine.requests) == 1


@pytest.mark.parametrize("state", ["active", "starting"])
@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize("kind", ["startup", "liveness", "readiness"])
async def test_a_running_engine_answers_its_probes(stand: Stand, state: str, status: int, kind: str) -> None:
    stand.node.states, stand.engine.status = [state], status
    assert await stand.kubelet(kind) == status
    assert stand.engine.requests == ["GET /health?deep=1 t"]  # path and headers as kubelet sent them


@pytest.mark.parametrize("state", ["draining", "parking", "parked", "activating", "migrating"])
@pytest.mark.parametrize("kind", ["startup", "liveness", "readiness"])
async def test_a_parked_or_draining_engine_is_healthy_and_gets_no_probes(stand: Stand, state: str, kind: str) -> None:
    stand.node.states, stand.engine.frozen = [state], True
    assert await stand.kubelet(kind) == 200
    assert stand.engine.requests == []


async def test_an_engine_that_starts_again_is_healthy_while_it_loads(stand: Stand) -> None:
    """kyb-run starts it in its container, whose startup probe has passed long ago. Kubelet's new start is probed."""
    stand.node.states, stand.node.started, stand.engine.status = ["starting"], True, 503
    assert await stand.kubelet("liveness") == 200
    assert await stand.kubelet("readiness") == 200
    assert stand.engine.requests == []
    assert await stand.kubelet("startup") == 503


async def test_an_engine_that_was_ended_before_kubelet_had_seen_it_passes_its_startup_probe(stand: Stand) -> None:
    """It served for less than the period of the probe, and waits for a request: kubelet would end its container."""
    stand.node.states, stand.node.started, stand.engine.status = ["waiting", ""], True, 503
    assert await stand.kubelet("startup") == 200
    assert stand.engine.requests == []


@pytest.mark.parametrize("state", ["waiting", "backoff", "lost", "quarantined", "releasing", ""])
async def test_in_other_states_only_the_startup_probe_reaches_the_engine(stand: Stand, state: str) -> None:
    stand.node.states, stand.engine.status = [state], 503
    assert await stand.kubelet("liveness") == 200
    assert await stand.kubelet("readiness") == 200
    assert await stand.kubelet("startup") == 503


async def test_without_the_manager_no_engine_is_restarted(stand: Stand) -> None:
    await stand.manager.__aexit__()
    stand.engine.frozen = True
    assert await stand.kubelet("liveness") == 200
    stand.engine.frozen, stand.engine.status = False, 500
    assert await stand.kubelet("startup") == 500
    stand.engine.status = 200
    assert await stand.kubelet("startup") == 200


async def test_an_engine_last_known_as_parked_passes_its_startup_probe_without_the_manager(stand: Stand) -> None:
    stand.node.states = ["parked"]
    probe = await stand.probe(ProbeTarget(0, stand.engine_port, "startup", "HTTP", TIMEOUT))
    assert await stand.get(probe.ports[1]) == 200
    await stand.manager.__aexit__()
    probe.manager._at = float("-inf")
    stand.engine.status = 503
    assert await stand.get(probe.ports[1]) == 200


async def test_an_engine_that_is_parked_during_a_probe_is_healthy(stand: Stand, impatient: None) -> None:
    stand.node.states, stand.engine.frozen = ["active", "parking"], True
    assert await stand.kubelet() == 200
    assert stand.node.requests == 2
    stand.node.states, stand.engine.frozen, stand.engine.status = ["active", "draining"], False, 503
    assert await stand.kubelet() == 200  # its state changed during the probe


async def test_a_hanging_engine_fails_its_probe_within_the_timeout(stand: Stand, impatient: None) -> None:
    stand.engine.frozen = True
    assert await stand.kubelet() == 503


async def test_concurrent_probes_share_one_request_to_the_manager(stand: Stand) -> None:
    targets = [ProbeTarget(0, stand.engine_port, kind, "HTTP", TIMEOUT) for kind in ("liveness", "readiness")]
    probe = await stand.probe(*targets)
    assert await asyncio.gather(*(stand.get(port) for port in probe.ports[1:] * 3)) == [200] * 6
    assert stand.node.requests <= 3  # not one each, however slow the machine


async def test_a_tcp_probe_connects_to_the_engine(stand: Stand) -> None:
    assert await stand.kubelet(scheme="TCP") == 200
    probe = await stand.probe(ProbeTarget(0, 1, "liveness", "TCP", TIMEOUT))
    assert await stand.get(probe.ports[1]) == 503


async def test_kyb_probe_has_its_own_health_and_refuses_what_is_not_http(stand: Stand) -> None:
    probe = await stand.probe(ProbeTarget(0, stand.engine_port, "liveness", "HTTP", TIMEOUT))
    assert await stand.get(probe.ports[0], "/healthz") == 200
    assert await stand.get(probe.ports[0], "/") == 404
    reader, writer = await asyncio.open_connection("127.0.0.1", probe.ports[1])
    writer.write(b"nonsense\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_no_connections_of_others_keep_kubelet_out_or_take_its_memory(stand: Stand) -> None:
    """2,000 half heads of 60 kB took 75 MiB; the container has 40."""
    probe = await stand.probe(ProbeTarget(0, stand.engine_port, "liveness", "HTTP", TIMEOUT))
    callers, ends = [], []
    for n in range(3 * server.MOST_CONNECTIONS):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", probe.ports[0], local_addr=(f"127.0.0.{2 + n % 2}", 0)
        )
        callers.append(writer)
        ends.append(asyncio.create_task(reader.read()))
    assert await stand.get(probe.ports[1]) == 200
    oldest = 2 * server.MOST_CONNECTIONS + 1
    await until(lambda: sum(end.done() for end in ends) == oldest, what="the oldest made room", timeout=2)
    for writer in callers:
        writer.close()
    await asyncio.gather(*ends, return_exceptions=True)


async def test_a_connection_that_made_room_asks_the_manager_no_more(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    stand.node.stops = [(True, False)]
    probe = await stand.probe()

    def asking() -> int:
        return sum("ProbeServer._answer" in repr(task.get_coro()) for task in asyncio.all_tasks())

    for n in range(12):
        _, writer = await asyncio.open_connection("127.0.0.1", probe.ports[0])
        stand.stack.callback(writer.close)
        writer.write(b"GET /stop HTTP/1.1\r\n\r\n")
        await until(lambda n=n: stand.node.requests > n, what="it is asked", timeout=2)
    await until(lambda: asking() == 4, what="the others ended", timeout=2)


async def test_a_stop_of_kubelet_outlasts_connections_without_a_request(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one address: a pod of the node's own network has kubelet's."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    stand.node.stops = [(True, False)]
    probe = await stand.probe()
    stopping = asyncio.create_task(stand.get(probe.ports[0], "/stop"))
    await until(lambda: stand.node.requests, what="it is asked", timeout=2)
    for _ in range(8):
        _, writer = await asyncio.open_connection("127.0.0.1", probe.ports[0])
        stand.stack.callback(writer.close)
    assert await stand.get(probe.ports[0], "/healthz") == 200
    stand.node.stops = [(False, False)]
    assert await stopping == 200


async def check(port: int) -> bytes:
    """Kubelet's gRPC probe."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer: bytes = await call(b"", timeout=TIMEOUT)
        return answer


async def test_grpc_probes_reach_a_running_engine_and_are_answered_for_a_parked_one(stand: Stand) -> None:
    async def answer(_: bytes, __: object) -> bytes:
        return b"\x08\x02"  # NOT_SERVING

    handler = grpc.unary_unary_rpc_method_handler(answer)
    engine = grpc.aio.server()
    engine.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler}),)
    )
    port = engine.add_insecure_port("127.0.0.1:0")
    await engine.start()
    try:
        running = await stand.probe(ProbeTarget(0, port, "liveness", "GRPC", TIMEOUT))
        assert await check(running.ports[1]) == b"\x08\x02"
    finally:
        await engine.stop(None)
    stand.node.states = ["parked"]
    parked = await stand.probe(ProbeTarget(0, port, "liveness", "GRPC", TIMEOUT))
    assert await check(parked.ports[1]) == b"\x08\x01"


async def test_https_probes_reach_the_engine_without_verification(stand: Stand, tmp_path: Path) -> None:
    key, cert = tmp_path / "k", tmp_path / "c"
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=e -keyout {key} -out {cert}"
    subprocess.run(make.split(), check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    app = web.Application()
    app.router.add_get("/health", stand.engine.handle)
    secret = await stand.stack.enter_async_context(HttpServer(app, "127.0.0.1", 0, tls=context))
    probe = await stand.probe(ProbeTarget(0, secret.port, "liveness", "HTTPS", TIMEOUT))
    assert await stand.get(probe.ports[1]) == 200
    assert len(stand.engine.requests) == 1


def test_settings_are_read_from_the_environment_that_the_webhook_sets() -> None:
    target = {"listen": 9480, "port": 8000, "kind": "liveness", "scheme": "HTTP", "timeout": 2}
    env = {
        "KYB_HOST_IP": "10.0.0.1",
        "KYB_POD_UID": "u",
        "KYB_PROBE_TARGETS": json.dumps([target]),
        "KYB_X_PORT": "tcp",
    }
    found = read(env)
    assert (found.manager_port, found.health_port, found.targets) == (9471, 9479, (ProbeTarget(**target),))  # type: ignore[arg-type]
    for name, wrong, why in (
        ("KYB_HOST_IP", "", "is not set"),
        ("KYB_MANAGER_PORT", "tcp://1", "is not a port"),
        ("KYB_PROBE_TARGETS", "[1]", "write a JSON list"),
        ("KYB_PROBE_TARGETS", json.dumps([{**target, "kind": "x"}]), "kind is one of"),
    ):
        with pytest.raises(ProbeSettingsError, match=why):
            read({**env, name: wrong})


def test_the_program_imports_only_the_standard_library_and_names_a_missing_setting() -> None:
    code = (
        "import sys, services.probe.__main__; print(sorted({m.split('.')[0] for m in sys.modules} & set(sys.argv[1:])))"
    )
    heavy = ["aiohttp", "pydantic", "ssl", "kybernate", "structlog", "grpc"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, env=env, check=True)
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert loaded <= {"ssl"}  # asyncio imports it where it exists
    failed = subprocess.run(
        [sys.executable, "-m", "services.probe"], capture_output=True, text=True, env=env, check=False
    )
    assert failed.returncode == 2
    assert "KYB_HOST_IP is not set" in failed.stderr


@pytest.mark.parametrize(
    ("stops", "questions"),
    [
        ([(False, False)], 1),  # no seat with a process
        ([(True, False), (True, True), (True, True), (False, True)], 4),  # until its processes are gone
        ([(True, False), (False, True)], 2),  # this node's driver needs no checkpoint before the end
    ],
)
async def test_b8_a_prestop_hook_returns_when_kubelet_may_signal_the_engine(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, stops: list[tuple[bool, bool]], questions: int
) -> None:
    monkeypatch.setattr(server, "STOP_POLL_SECONDS", 0.01)
    stand.node.stops = list(stops)
    probe = await stand.probe()
    assert await stand.get(probe.ports[0], "/stop") == 200
    assert stand.node.requests == questions


@pytest.mark.parametrize("stops", [[(True, False)], []])
async def test_b8_a_prestop_hook_gives_up_without_a_deletion_or_a_manager(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, stops: list[tuple[bool, bool]]
) -> None:
    """Kubelet restarts the container of a pod that is not deleted: kubelet's signal is not to wait."""
    monkeypatch.setattr(server, "STOP_POLL_SECONDS", 0.01)
    monkeypatch.setattr(server, "STOP_SECONDS", 0.2)
    stand.node.stops = list(stops)
    probe = await stand.probe()
    assert await stand.get(probe.ports[0], "/stop") == 200
