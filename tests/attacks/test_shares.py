"""Keys that want more than their share: permits, wakes, signals, names of requests; and requests without a key."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kybernate.api_keys import Tenant, dump, make
from kybernate.seat import SeatState
from tests.attacks.stack import RawEngine, Stack, call, receive, serving

PATH = "/v1/chat/completions"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.fixture
def shares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, RawEngine, dict[str, bytes]]]:
    folder = tmp_path_factory.mktemp("shares")
    rows, keys = [], {}
    for name, scopes, tenant in (
        ("a-app", ["infer", "signals"], "a"),
        ("a-gateway", ["infer", "gateway"], "a"),
        ("b-app", ["infer"], "b"),
        ("viewer", ["view"], None),
    ):
        row, token = make(name, scopes)
        rows.append(row.model_copy(update={"tenant": tenant}))
        keys[name] = b"Authorization: Bearer " + token.encode()
    tenants = [Tenant(name="a", models=("llama", "m-*"), concurrency=40), Tenant(name="b")]
    (folder / "keys.yaml").write_text(dump(rows, tenants))
    with RawEngine() as engine, Stack(folder / "stack", api_keys_file=folder / "keys.yaml") as stack:
        yield stack, engine, keys


def test_permits_leave_places_for_calls(shares: tuple[Stack, RawEngine, dict[str, bytes]]) -> None:
    stack, engine, keys = shares
    stack.seat("s0", "llama", engine.endpoint, SeatState.ACTIVE, keys["viewer"], max_requests=16)
    assert stack.get("/v1/hold?model=llama", keys["a-app"]).status == 403, "permits need a scope of their own"
    ends, granted = threading.Event(), []

    def loop() -> None:
        while not ends.is_set():
            granted.append(stack.get("/v1/hold?model=llama&timeout=1s", keys["a-gateway"]).status)

    threads = [threading.Thread(target=loop) for _ in range(24)]
    for thread in threads:
        thread.start()
    took = []
    try:
        until = time.monotonic() + 4
        while time.monotonic() < until:
            began = time.monotonic()
            assert stack.post(PATH, call(), keys["b-app"]).status == 200
            took.append(time.monotonic() - began)
            time.sleep(0.02)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert sorted(took)[len(took) // 2] < 0.2
    assert granted.count(200) <= 40 * 4, "a permit counts in its tenant's concurrency until it expires"
    assert granted.count(200) >= 16


def test_a_tenant_wakes_a_bounded_number_of_models(shares: tuple[Stack, RawEngine, dict[str, bytes]]) -> None:
    stack, engine, keys = shares
    for at in range(50):
        stack.seat(f"w{at}", f"m-{at}", engine.endpoint, SeatState.PARKED, keys["viewer"])
    answers = [stack.post("/v1/wake", call(f"m-{at}"), keys["a-app"]) for at in range(50)]
    assert [answer.status for answer in answers] == [202] * 40 + [429] * 10
    assert stack.post("/v1/wake", call("m-3"), keys["a-app"]).status == 202, "one that it wakes already"
    assert stack.post("/v1/wake", call("m-49"), keys["b-app"]).status == 202


def test_signals_of_a_tenant_are_for_its_models(shares: tuple[Stack, RawEngine, dict[str, bytes]]) -> None:
    stack, engine, keys = shares
    stack.seat("s9", "secret", engine.endpoint, SeatState.ACTIVE, keys["viewer"])
    found = {}
    unknown = json.dumps({"source": "x", "id": "0", "data": {"model": "no-such-model", "waiting": 1}}).encode()
    stack.wait(
        lambda: stack.post("/v1/signals", unknown, keys["a-app"], b"Content-Type: application/json").status == 404,
        "all rows of the roster have arrived",
    )
    for model in ("secret", "no-such-model"):
        body = json.dumps({"source": "x", "id": "1", "data": {"model": model, "waiting": 1}}).encode()
        answer = stack.post("/v1/signals", body, keys["a-app"], b"Content-Type: application/json")
        found[model] = answer.status, answer.code
    assert set(found.values()) == {(404, "model_not_found")}


def test_a_request_of_another_tenant_cannot_take_its_name(shares: tuple[Stack, RawEngine, dict[str, bytes]]) -> None:
    stack, engine, keys = shares
    causes = {
        stack.post(PATH, call(), keys[name], b"X-Request-Id: mine").header("X-Kyb-Cause") for name in ("a-app", "b-app")
    }
    assert causes == {"a:mine", "b:mine"}
    stack.seat("s0", "llama", engine.endpoint, SeatState.ACTIVE, keys["viewer"])
    woken = stack.post("/v1/wake", call(), keys["b-app"], b"X-Request-Id: a:mine")
    assert json.loads(woken.body)["cause"] == "b:a:mine"
    permit = stack.get("/v1/hold?model=llama", keys["a-gateway"], b"X-Request-Id: mine")
    assert permit.header("X-Kyb-Cause") == "a:mine"


def test_without_a_key_nothing_costs_much(shares: tuple[Stack, RawEngine, dict[str, bytes]]) -> None:
    stack, _, keys = shares
    for path, status in (("/v1/models", 401), ("/v1/seats", 401), ("/nothing", 404), ("/openapi.json", 200)):
        assert stack.get(path).status == status
        one = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()
        last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        before = stack.cpu_seconds
        with stack.connect() as caller:
            sender = threading.Thread(target=caller.sendall, args=(one * 199 + last,))
            sender.start()
            answer = receive(caller)
            sender.join()
        assert answer.count(b"HTTP/1.1 %d " % status) == 200
        assert (stack.cpu_seconds - before) / 200 < 0.0012 if path != "/openapi.json" else True
    assert stack.get("/v1/models", keys["a-app"]).status == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
        (CHUNKED + b"a\x00: b\r\n\r\n", 400),
        (CHUNKED + b"a: b\rc\r\n\r\n", 400),
        (CHUNKED + b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
    ],
)  # fmt: skip
def test_what_proxies_refuse_is_refused_here(stack: Stack, head: bytes, status: int) -> None:
    response = stack.send(head, idle_seconds=1)
    assert response.status == status
    assert status == 200 or response.code == "invalid_http"


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/detokenize", "/pooling", "/classify", "/rerank", "/score", "/v2/rerank", "/infill", "/generate",
     "/v1/responses/input_tokens"],
)  # fmt: skip
def test_paths_of_engines_outside_v1_are_forwarded(stack: Stack, engine: RawEngine, path: str) -> None:
    assert stack.post(path, call()).status == 200
    assert engine.heads[0].startswith(b"POST %s HTTP/1.1\r\n" % path.encode())


def test_exact_further_paths_and_streams_and_websockets(folder: Path) -> None:
    with serving(folder, engine_paths="/v2/embed,/custom/generate") as (stack, engine):

        def events(connection: socket.socket, *_: bytes) -> bool:
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Accel-Buffering: yes\r\n"
                b"Content-Length: 9\r\n\r\ndata: 1\n\n"
            )
            return True

        engine.answer = events
        answer = stack.post("/custom/generate", call(stream=True))
        assert (answer.status, re.findall(rb"X-Accel-Buffering: *(.*)\r", answer.raw)) == (200, [b"no"])
        assert stack.post("/custom/generate/x", call()).status == 404
        assert stack.post("/v2/embed", call()).status == 200
        realtime = stack.get("/v1/realtime?model=llama")
        assert (realtime.status, realtime.code) == (501, "not_supported")
        assert b"WebSocket" in realtime.body
