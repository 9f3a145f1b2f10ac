"""The fake engine over real HTTP: as vLLM answers, and as it behaves around the GPU."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from kybernate.dev.fakes.engine.memory import split
from kybernate.dev.fakes.engine.protocol import (
    ApiError,
    chat_prompt,
    expected_text,
    prompt_tokens,
    read_generation,
    read_json,
)
from kybernate.dev.nats_server import free_port
from tests.fakes.daemons import engine, healthy, ready
from tests.until import until

GIB = 2**30


@pytest.fixture
async def served(node: SimpleNamespace) -> AsyncIterator[SimpleNamespace]:
    """A ready engine on the first two GPUs."""
    async with ready(node, "--vram", "40GiB", gpus=2) as engine:
        yield engine


def chat(prompt: str = "hello", tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **more}


async def post(served: SimpleNamespace, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with served.http.post(path, data=data) as answer:
        return answer.status, await answer.json() if "json" in answer.content_type else await answer.text()


async def violations(node: SimpleNamespace) -> dict[str, int]:
    return (await node.client.call("stats"))["violations"]["by_kind"]


async def metric(served: SimpleNamespace, name: str) -> float:
    async with served.http.get("/metrics") as answer:
        (line,) = [line for line in (await answer.text()).splitlines() if line.startswith(name + "{")]
        return float(line.rpartition(" ")[2])


def test_answers_are_a_function_of_model_prompt_and_length():
    text = expected_text("m", "hello", 20)
    assert text == expected_text("m", "hello", 20)
    assert text.startswith(expected_text("m", "hello", 5) + " ")
    assert len(text.split()) == 20
    assert len({text, expected_text("n", "hello", 20), expected_text("m", "hellp", 20)}) == 3
    assert expected_text("m", "", 0) == ""


def test_the_prompt_of_a_chat_and_its_tokens():
    a, image, b = {"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}
    parts = {"role": "user", "content": [a, image, b]}
    assert chat_prompt([parts]) == "ab"
    assert chat_prompt([{"role": "system", "content": "x"}, parts]) == "system: x\nuser: ab"
    assert [prompt_tokens("a" * length) for length in (0, 1, 4, 5)] == [1, 1, 1, 2]


def test_memory_is_spread_evenly():
    assert split(10, ["a", "b", "c"]) == {"a": 4, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("body", "status", "part"),
    [
        (b"{", 400, "not JSON"),
        ([], 400, "JSON object"),
        ({}, 400, "model parameter"),
        ({"model": "x"}, 404, "does not exist"),
        ({"model": "m"}, 400, "messages"),
        (chat(tokens=-1), 400, "max_tokens"),
        (chat(n=2), 400, "n=1"),
        (chat(tokens=10**9), 400, "maximum context length"),
    ],
)
def test_errors_have_openais_shape(body, status, part):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        read_generation(read_json(data), model="m", chat=True, id="1", max_model_len=1000)
    assert caught.value.status == status
    assert set(caught.value.body["error"]) == {"message", "type", "param", "code"}
    assert part in caught.value.body["error"]["message"]


async def test_errors_over_http(served):
    status, body = await post(served, "/v1/chat/completions", b"{")
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    status, body = await post(served, "/v1/nothing", {})
    assert (status, body["error"]["code"]) == (404, 404)
    status, body = await post(served, "/sleep?level=9", {})
    assert (status, body["error"]["param"]) == (400, "level")


async def test_memory_is_taken_after_the_load_and_only_then_it_is_healthy(node):
    port = free_port()
    options = ("--vram", "40GiB", "--load-seconds", "30")
    async with (
        engine(node.socket, port, node.gpus[:2], *options, speed=40.0),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        served = SimpleNamespace(http=http)
        status, body = (await until(lambda: answers(served), what="the engine answers"))[0]
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        async with http.get("/health") as answer:
            assert answer.status == 503
        assert (await node.client.call("processes"))["processes"] == []
        await until(lambda: healthy(http), what="the engine is healthy")
        taken = {entry["gpu"]: entry["bytes"] for entry in (await node.client.call("processes"))["processes"]}
        assert taken == dict.fromkeys(node.gpus[:2], 20 * GIB)


async def answers(served: SimpleNamespace) -> list[tuple[int, Any]]:
    try:
        return [await post(served, "/v1/chat/completions", chat())]
    except aiohttp.ClientConnectionError:
        return []


async def test_time_is_prefill_and_tokens_in_model_seconds(served):
    began = time.monotonic()
    await post(served, "/v1/chat/completions", chat("x" * 4 * 8000, 600, stream=True))
    assert time.monotonic() - began > (1 + 10) / 100


async def test_running_requests_show_in_the_metrics_and_a_client_that_leaves_ends_its_request(served):
    request = asyncio.create_task(post(served, "/v1/chat/completions", chat(tokens=60_000)))
    await until(lambda: runs(served, 1), what="requests running at the engine: 1")
    assert await metric(served, "vllm:num_requests_waiting") == 0
    request.cancel()
    await until(lambda: runs(served, 0), what="requests running at the engine: 0")
    for verb in ("lock", "checkpoint"):
        await served.node.client.call(verb, pid=served.process.pid, epoch=1)
    assert await violations(served.node) == {}


async def runs(served: SimpleNamespace, count: int) -> bool:
    return await metric(served, "vllm:num_requests_running") == count


async def test_requests_beyond_the_places_wait(node):
    async with ready(node, "--max-running", "1") as served:
        requests = [asyncio.create_task(post(served, "/v1/chat/completions", chat(tokens=60_000))) for _ in range(2)]
        await until(lambda: waits(served, 1), what="requests waiting at the engine: 1")
        assert await metric(served, "vllm:num_requests_running") == 1
        for request in requests:
            request.cancel()
        await until(lambda: waits(served, 0), what="requests waiting at the engine: 0")


async def waits(served: SimpleNamespace, count: int) -> bool:
    return await metric(served, "vllm:num_requests_waiting") == count


async def test_a_request_survives_park_freeze_and_activation_and_is_punished(served):
    pid, call = served.process.pid, served.node.client.call
    request = asyncio.create_task(post(served, "/v1/chat/completions", chat(tokens=6000, stream=True)))
    await until(lambda: runs(served, 1), what="requests running at the engine: 1")
    await call("lock", pid=pid, epoch=1)
    await call("checkpoint", pid=pid, epoch=1)
    os.kill(pid, signal.SIGSTOP)
    assert (await call("processes"))["processes"] == []
    os.kill(pid, signal.SIGCONT)
    await call("restore", pid=pid, epoch=1)
    assert await runs(served, 1), "locked: nothing is computed"
    await call("unlock", pid=pid, epoch=1)
    status, body = await request
    assert status == 200
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == expected_text("m", "hello", 6000)
    assert await violations(served.node) == {"checkpoint-with-request": 1}


async def test_a_request_to_a_locked_engine_waits_and_is_punished(served):
    await served.node.client.call("lock", pid=served.process.pid, epoch=1)
    request = asyncio.create_task(post(served, "/v1/chat/completions", chat()))
    await until(lambda: waits(served, 1), what="requests waiting at the engine: 1")
    await served.node.client.call("unlock", pid=served.process.pid, epoch=1)
    status, body = await request
    assert (status, body["choices"][0]["message"]["content"]) == (200, expected_text("m", "hello", 20))
    assert await violations(served.node) == {"request-not-running": 1}


async def used(served: SimpleNamespace) -> list[int]:
    return [gpu["used_bytes"] for gpu in (await served.node.client.call("devices"))["gpus"]]


async def test_a_request_to_a_sleeping_engine_fails_and_is_punished(served):
    await post(served, "/sleep", {})
    status, body = await post(served, "/v1/chat/completions", chat(stream=True))
    assert (status, body["error"]["type"]) == (500, "EngineDeadError")
    assert await violations(served.node) == {"request-without-memory": 1}


async def test_a_lie_and_an_api_are_chosen_by_options_and_environment(node):
    env = {"KYB_FAKE_LIES": "sleep-ignored", "VLLM_SERVER_DEV_MODE": "1"}
    options = ("--api", "vllm", "--enable-sleep-mode", "--lie", "wake-garbles@2", "--vram", "4GiB")
    async with ready(node, *options, more_env=env) as served:
        texts = []
        for _ in range(2):
            assert (await post(served, "/sleep", {}))[1] == {"status": "sleeping", "level": 1}
            assert (await used(served))[0] == 4 * GIB
            assert (await post(served, "/wake_up", {}))[1]["status"] == "awake"
            _, body = await post(served, "/v1/chat/completions", chat())
            texts.append(body["choices"][0]["message"]["content"])
        assert [text == expected_text("m", "hello", 20) for text in texts] == [True, False]


async def test_an_engine_without_room_or_with_a_taken_address_ends_with_a_reason(served):
    pipe, port = asyncio.subprocess.PIPE, int(served.url.rpartition(":")[2])
    for options, port_, part in (
        (("--vram", "70GiB"), free_port(), b"OUT_OF_MEMORY"),
        (("--vram", "1GiB"), port, b"address already in use"),
    ):
        async with engine(served.node.socket, port_, served.node.gpus[:1], *options, stderr=pipe) as second:
            _, errors = await asyncio.wait_for(second.communicate(), 10)
        assert second.returncode == 1
        assert part in errors


async def test_an_engine_whose_driver_dies_ends_with_a_reason(node):
    async with ready(node, stderr=asyncio.subprocess.PIPE) as served:
        node.daemon.kill()
        _, errors = await asyncio.wait_for(served.process.communicate(), 10)
        assert served.process.returncode == 3
        assert b"engine.driver_lost" in errors


async def test_sigterm_ends_it_at_once_even_with_a_request_running(served):
    request = asyncio.create_task(post(served, "/v1/chat/completions", chat(tokens=60_000, stream=True)))
    await until(lambda: runs(served, 1), what="requests running at the engine: 1")
    served.process.terminate()
    assert await asyncio.wait_for(served.process.wait(), 60) == 0
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await request


@pytest.mark.parametrize(
    ("gpus", "options", "part"), [([], (), b"KYB_FAKE_GPU"), (["GPU-a"], ("--lie", "white"), b"sleep-noop")]
)
async def test_without_a_driver_or_with_an_unknown_lie_it_says_what_to_set(gpus, options, part):
    pipe = asyncio.subprocess.PIPE
    async with engine(Path("/nonexistent/driver.sock"), free_port(), gpus, *options, stderr=pipe) as started:
        _, errors = await started.communicate()
    assert (started.returncode, part in errors) == (2, True), errors
