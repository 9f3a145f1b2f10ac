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
import openai
import pytest

from kybernate.dev.fakes.engine.memory import split
from kybernate.dev.fakes.engine.protocol import (
    ApiError,
    chat_prompt,
    expected_embedding,
    expected_text,
    prompt_tokens,
    read_generation,
    read_json,
)
from kybernate.dev.nats_server import free_port
from tests.fakes.daemons import engine
from tests.until import until

GIB = 2**30


@pytest.fixture
async def served(node: SimpleNamespace) -> AsyncIterator[SimpleNamespace]:
    """A ready engine on the first two GPUs."""
    port = free_port()
    async with (
        engine(node.socket, port, node.gpus[:2], "--vram", "40GiB") as started,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy")
        yield SimpleNamespace(process=started, http=http, url=f"http://127.0.0.1:{port}", node=node)


async def healthy(http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get("/health") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False


def chat(prompt: str = "hello", tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, **more}


async def post(served: SimpleNamespace, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with served.http.post(path, data=data) as answer:
        return answer.status, await answer.json() if "json" in answer.content_type else await answer.text()


async def violations(node: SimpleNamespace) -> dict[str, int]:
    found: dict[str, int] = (await node.client.call("stats"))["violations"]["by_kind"]
    return found


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


async def test_the_openai_client_gets_chat_completions_whole_and_streamed(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model="m", messages=messages, max_tokens=20)
        assert whole.choices[0].message.content == expected_text("m", "hello", 20)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 20)
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == expected_text("m", "hello", 20)
        assert sum(map(bool, texts)) == 10, "at most ten parts above speed 1"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 22
        unlimited = await client.chat.completions.create(model="m", messages=messages)
        assert unlimited.choices[0].finish_reason == "stop"


async def test_the_openai_client_gets_completions_embeddings_models_and_errors(served):
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        both = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=5)
        assert [choice.text for choice in both.choices] == [expected_text("m", "a", 5), expected_text("m", "b", 5)]
        stream = await client.completions.create(model="m", prompt="a", max_tokens=5, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected_text("m", "a", 5)
        vectors = await client.embeddings.create(model="m", input=["a", "b"])
        assert [one.embedding for one in vectors.data] == [expected_embedding("m", "a"), expected_embedding("m", "b")]
        plain = await client.embeddings.create(model="m", input="a", encoding_format="float")
        assert plain.data[0].embedding == vectors.data[0].embedding
        assert [model.id async for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError, match="`x` does not exist"):
            await client.completions.create(model="x", prompt="a")
        with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
            await client.completions.create(model="m", prompt="a", max_tokens=0)
    assert await violations(served.node) == {}


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
    port = free_port()
    async with (
        engine(node.socket, port, node.gpus[:1], "--max-running", "1"),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        served = SimpleNamespace(http=http)
        await until(lambda: healthy(http), what="the engine is healthy")
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


async def test_sleep_frees_all_but_a_residue_and_wake_up_takes_it_back(served):
    for _ in range(2):
        assert (await post(served, "/sleep?level=1", {}))[0] == 200
        async with served.http.get("/is_sleeping") as answer:
            assert await answer.json() == {"is_sleeping": True}
        assert await used(served) == [GIB, GIB, 0, 0]
        async with served.http.get("/metrics") as answer:
            assert 'sleep_state="weights_offloaded"} 1.0' in await answer.text()
        for _ in range(2):
            assert (await post(served, "/wake_up", {}))[0] == 200
        assert await used(served) == [20 * GIB, 20 * GIB, 0, 0]
    assert (await post(served, "/v1/chat/completions", chat()))[0] == 200
    assert await violations(served.node) == {}


async def used(served: SimpleNamespace) -> list[int]:
    return [gpu["used_bytes"] for gpu in (await served.node.client.call("devices"))["gpus"]]


async def test_a_request_to_a_sleeping_engine_fails_and_is_punished(served):
    await post(served, "/sleep", {})
    status, body = await post(served, "/v1/chat/completions", chat(stream=True))
    assert (status, body["error"]["type"]) == (500, "EngineDeadError")
    assert await violations(served.node) == {"request-without-memory": 1}


async def test_an_engine_that_wakes_up_without_room_sleeps_on(served):
    await post(served, "/sleep", {})
    await served.node.client.call("attach", seat="other")
    await served.node.client.call("alloc", gpu=served.node.gpus[0], bytes=70 * GIB)
    assert (await post(served, "/wake_up", {}))[0] == 500
    assert await used(served) == [71 * GIB, GIB, 0, 0]
    await served.node.client.call("free", gpu=served.node.gpus[0], bytes=70 * GIB)
    assert (await post(served, "/wake_up", {}))[0] == 200
    assert (await post(served, "/v1/chat/completions", chat()))[0] == 200


async def test_a_lie_and_an_api_are_chosen_by_options_and_environment(node):
    port = free_port()
    env = {"KYB_FAKE_LIES": "sleep-ignored", "VLLM_SERVER_DEV_MODE": "1"}
    options = ("--api", "vllm", "--enable-sleep-mode", "--lie", "wake-garbles@2", "--vram", "4GiB")
    async with (
        engine(node.socket, port, node.gpus[:1], *options, more_env=env),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy")
        served, texts = SimpleNamespace(http=http, node=node), []
        for _ in range(2):
            assert (await post(served, "/sleep", {}))[1] == {"status": "sleeping", "level": 1}
            assert (await used(served))[0] == 4 * GIB
            assert (await post(served, "/wake_up", {}))[1]["status"] == "awake"
            _, body = await post(served, "/v1/chat/completions", chat())
            texts.append(body["choices"][0]["message"]["content"])
        assert [text == expected_text("m", "hello", 20) for text in texts] == [True, False]


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_an_engine_may_be_killed_in_the_middle_of_a_call(node, path):
    port, lie = free_port(), {"/sleep": "sleep-dies", "/wake_up": "wake-dies"}[path]
    async with (
        engine(node.socket, port, node.gpus[:1], "--lie", lie) as started,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy")
        served = SimpleNamespace(http=http, node=node)
        if path == "/wake_up":
            await post(served, "/sleep", {})
        with pytest.raises(aiohttp.ClientError):
            await post(served, path, {})
        assert await started.wait() == -signal.SIGKILL


async def test_an_unknown_lie_is_refused():
    pipe = asyncio.subprocess.PIPE
    async with engine(Path("/nonexistent"), free_port(), ["GPU-a"], "--lie", "white", stderr=pipe) as started:
        _, errors = await started.communicate()
    assert (started.returncode, b"sleep-noop" in errors) == (2, True)


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
    port, pipe = free_port(), asyncio.subprocess.PIPE
    async with (
        engine(node.socket, port, node.gpus[:1], stderr=pipe) as started,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy")
        node.daemon.kill()
        _, errors = await asyncio.wait_for(started.communicate(), 10)
        assert started.returncode == 3
        assert b"engine.driver_lost" in errors


async def test_sigterm_ends_it_at_once_even_with_a_request_running(served):
    request = asyncio.create_task(post(served, "/v1/chat/completions", chat(tokens=60_000, stream=True)))
    await until(lambda: runs(served, 1), what="requests running at the engine: 1")
    served.process.terminate()
    assert await asyncio.wait_for(served.process.wait(), 60) == 0
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await request


async def test_without_a_driver_it_says_what_to_set():
    pipe = asyncio.subprocess.PIPE
    async with engine(Path("/nonexistent/driver.sock"), free_port(), [], stderr=pipe) as started:
        _, errors = await started.communicate()
    assert started.returncode == 2
    assert b"KYB_FAKE_GPU" in errors
