"""The sleep APIs of the fake engines, and each of their lies: what the vendors document, and no more."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kybernate.clock import Clock
from kybernate.dev.fakes.engine.apis import ApiOptions
from kybernate.dev.fakes.engine.app import build_app
from kybernate.dev.fakes.engine.engine import Engine, EngineOptions
from kybernate.dev.fakes.engine.lies import Lie, Lies
from kybernate.dev.fakes.engine.memory import Vram
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import DriverError
from kybernate.engines import requests_in
from tests.until import until

TOTAL, RESIDUE = 100, 10


class Ram:
    """Two GPUs of a made-up machine."""

    def __init__(self) -> None:
        self.gpus = ["GPU-a", "GPU-b"]
        self.used = dict.fromkeys(self.gpus, 0)
        self.room = dict.fromkeys(self.gpus, 1000)

    async def alloc(self, gpu: str, count: int) -> None:
        if self.used[gpu] + count > self.room[gpu]:
            raise DriverError("alloc", 2, "OUT_OF_MEMORY", "no room")
        self.used[gpu] += count

    async def free(self, gpu: str, count: int) -> None:
        self.used[gpu] -= count

    async def runs(self) -> None:
        return


class Served:
    """An engine behind HTTP."""

    def __init__(self, engine: Engine, ram: Ram, http: "TestClient[Any, Any]") -> None:
        self.engine, self.ram, self.http = engine, ram, http

    async def __call__(self, path: str, body: Any = None, method: str = "POST", **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.http.request(method, path, data=data, **more) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if "json" in answer.content_type else text

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return await self(path, method="GET", **more)

    async def text(self, **more: Any) -> str:
        """What it answers."""
        body = {"model": "m", "prompt": "hello", "max_tokens": 8, "temperature": 0, "seed": 1}
        status, answer = await self("/v1/completions", body, **more)
        return str(answer["choices"][0]["text"]) if status == 200 else f"{status}"

    async def ends(self, path: str) -> str:
        """Why the engine ends at a call, which it does not answer."""
        call = asyncio.create_task(self(path, {}))
        await until(self.engine.failed.is_set, what="the engine has ended")
        assert not call.done()
        call.cancel()
        await asyncio.wait([call])
        return self.engine.failure

    @property
    def used(self) -> int:
        return sum(self.ram.used.values())


@asynccontextmanager
async def serving(api: str, lies: str = "", *, sleeps: bool = True, **options: Any) -> AsyncIterator[Served]:
    ram, clock = Ram(), Clock(200.0)
    residue = 0 if api in ("ollama", "llamacpp") else RESIDUE
    engine = Engine(
        EngineOptions("m", sleeps=sleeps, lies=Lies.read(lies)), Vram(ram, None, TOTAL, residue, clock), clock
    )
    await engine.load()
    async with TestClient(TestServer(build_app(engine, api, ApiOptions(**options)))) as http:
        yield Served(engine, ram, http)


GOOD = expected_text("m", "hello", 8)


async def test_answers_to_greedy_requests_with_a_seed_are_the_same_each_time():
    async with serving("vllm") as it:
        assert {await it.text() for _ in range(3)} == {GOOD}


async def test_the_model_is_listed():
    async with serving("vllm") as it:
        assert [model["id"] for model in (await it.get("/v1/models"))[1]["data"]] == ["m"]


# vLLM


async def test_vllm_has_sleep_endpoints_in_dev_mode_only_and_no_key_protects_them():
    async with serving("vllm", dev_mode=False) as it:
        assert (await it("/sleep"))[0] == 404
        assert (await it.get("/is_sleeping"))[0] == 404
    async with serving("vllm", key="secret") as it:
        assert (await it("/sleep"))[0] == 200
        assert (await it("/wake_up"))[0] == 200
        assert await it.text() == "401"
        assert await it.text(headers={"Authorization": "Bearer secret"}) == GOOD


async def test_vllm_level_1_gives_all_but_the_residue_and_brings_the_weights_back():
    async with serving("vllm") as it:
        for _ in range(2):  # the second is no error and changes nothing
            assert await it("/sleep?level=1&mode=wait") == (200, {"status": "sleeping", "level": 1})
            assert (it.used, await it.get("/is_sleeping")) == (RESIDUE, (200, {"is_sleeping": True}))
        assert 'sleep_state="weights_offloaded"} 1.0' in (await it.get("/metrics"))[1]
        assert (await it.get("/health"))[0] == 200, "health says nothing about sleep"
        for _ in range(2):
            assert await it("/wake_up") == (200, {"status": "awake", "tags": None})
        assert (it.used, await it.get("/is_sleeping")) == (TOTAL, (200, {"is_sleeping": False}))
        assert await it.text() == GOOD


async def test_vllm_level_2_answers_garbage_until_the_weights_are_read_again():
    async with serving("vllm") as it:
        await it("/sleep?level=2")
        assert (await it("/collective_rpc", {"method": "reload_weights"}))[0] == 500
        assert (await it("/wake_up?tags=weights"))[1] == {"status": "sleeping", "tags": ["weights"]}
        assert it.used < TOTAL
        assert (await it("/wake_up?tags=kv_cache"))[1] == {"status": "awake", "tags": ["kv_cache"]}
        assert await it.text() != GOOD
        assert (await it("/collective_rpc", {"method": "reload_weights"}))[0] == 200
        assert await it.text() == GOOD


async def test_a_request_to_an_engine_that_is_half_awake_ends_the_engine():
    async with serving("vllm") as it:
        await it("/sleep")
        await it("/wake_up?tags=weights")
        assert await it.text() == "500"
        await it("/wake_up?tags=kv_cache")
        assert (await it.text(), (await it.get("/health"))[0]) == ("500", 200), "for good, and health does not tell"


async def test_vllm_level_0_is_a_pause_that_also_says_sleeping():
    async with serving("vllm") as it:
        assert (await it("/sleep?level=0"))[0] == 200
        assert (it.used, await it.get("/is_sleeping")) == (TOTAL, (200, {"is_sleeping": True}))
        waiting = asyncio.create_task(it.text())
        await until(lambda: it.engine.waiting == 1, what="the request waits")
        await it("/wake_up?tags=scheduling")
        assert await waiting == GOOD


@pytest.mark.parametrize("path", ["/sleep?level=3", "/sleep?level=one", "/sleep?mode=now"])
async def test_vllm_refuses_what_is_no_level_or_mode(path):
    async with serving("vllm") as it:
        assert (await it(path))[0] == 400
        assert (await it.get("/is_sleeping"))[1] == {"is_sleeping": False}


async def running(it: Served, tokens: int = 200) -> "asyncio.Task[tuple[int, Any]]":
    """A request that is being computed."""
    task = asyncio.create_task(it("/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": tokens}))
    await until(lambda: it.engine.running == 1, what="a request runs")
    return task


async def test_vllms_sleep_loses_requests_that_run_unless_it_shall_wait():
    async with serving("vllm") as it:
        request = await running(it)
        assert (await it("/sleep?mode=wait"))[0] == 200
        assert (await request)[1]["choices"][0]["text"] == expected_text("m", "hello", 200)
        await it("/wake_up")
        request = await running(it, 60_000)
        assert (await it("/sleep"))[0] == 200
        choice = (await request)[1]["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "abort")
        assert 'finished_reason="abort"} 1.0' in (await it.get("/metrics"))[1]


async def test_vllm_discards_the_kv_cache_of_a_paused_engine_only():
    async with serving("vllm") as it:
        assert (await it("/release_kv_cache_memory"))[0] == 500
        assert await it("/pause?mode=wait") == (200, {"status": "paused"})
        assert await it("/release_kv_cache_memory") == (200, {"status": "kv_cache_released"})
        assert (it.used < TOTAL, await it.get("/is_paused")) == (True, (200, {"is_paused": True}))
        assert (await it("/wake_up?tags=kv_cache"))[1]["status"] == "awake"
        assert (it.used, await it.text()) == (TOTAL, GOOD)


async def test_vllm_without_room_stays_asleep_and_may_be_asked_again():
    async with serving("vllm") as it:
        await it("/sleep")
        it.ram.room["GPU-b"] = 20
        assert (await it("/wake_up"))[0] == 500
        assert (it.used, await it.get("/is_sleeping")) == (RESIDUE, (200, {"is_sleeping": True}))
        it.ram.room["GPU-b"] = 1000
        assert (await it("/wake_up"))[1]["status"] == "awake"
        assert await it.text() == GOOD


async def test_vllm_without_its_flag_says_asleep_and_keeps_its_memory():
    async with serving("vllm", sleeps=False) as it:
        assert (await it("/sleep"))[0] == 200
        assert (it.used, await it.get("/is_sleeping")) == (TOTAL, (200, {"is_sleeping": True}))


async def test_vllm_whose_sleep_failed_is_left_paused():
    async with serving("vllm", "sleep-fails") as it:
        assert (await it("/sleep"))[0] == 500
        assert (it.used, await it.get("/is_sleeping")) == (TOTAL, (200, {"is_sleeping": True}))
        assert (await it("/wake_up"))[1]["status"] == "awake"
        assert await it.text() == GOOD


# SGLang


async def test_sglang_releases_and_resumes_once_and_a_second_resume_ends_it():
    async with serving("sglang") as it:
        assert (await it("/release_memory_occupation"))[0] == 400, "the body must be there"
        for _ in range(2):
            assert await it("/release_memory_occupation", {}) == (200, None)
        assert it.used == RESIDUE
        assert await it("/resume_memory_occupation", {}) == (200, None)
        assert (it.used, await it.text()) == (TOTAL, GOOD)
        assert "KeyError" in await it.ends("/resume_memory_occupation")


async def test_sglang_ends_when_it_releases_while_a_request_runs_or_resumes_without_room():
    async with serving("sglang") as it:
        request = await running(it, 60_000)
        assert "idle" in await it.ends("/release_memory_occupation")
        request.cancel()
    async with serving("sglang") as it:
        await it("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
        it.ram.room["GPU-a"] = 20
        await it.ends("/resume_memory_occupation")


async def test_sglang_without_its_flags_keeps_memory_or_answers_garbage():
    async with serving("sglang", sleeps=False) as it:
        assert (await it("/release_memory_occupation", {}))[0] == 200
        assert it.used == TOTAL
    async with serving("sglang", cpu_backup=False) as it:
        await it("/release_memory_occupation", {})
        await it("/resume_memory_occupation", {})
        assert await it.text() != GOOD


async def test_sglangs_key_protects_all_but_probes_and_metrics_need_a_flag():
    async with serving("sglang", key="secret", metrics=False) as it:
        assert (await it("/release_memory_occupation", {}))[0] == 401
        assert (await it("/release_memory_occupation", {}, headers={"Authorization": "Bearer secret"}))[0] == 200
        assert (await it.get("/metrics"))[0] == 404
    async with serving("sglang", key="secret") as it:
        assert (await it.get("/health"))[0] == 200
        assert 'sglang:num_running_reqs{model_name="m"} 0.0' in (await it.get("/metrics"))[1]


@pytest.mark.parametrize(
    ("api", "path"),
    [
        ("vllm", "/metrics"),
        ("sglang", "/metrics"),
        ("llamacpp", "/metrics?model=m&autoload=false"),
    ],
)
async def test_the_load_of_an_engine_is_read_in_its_own_names(api, path):
    async with serving(api) as it:
        it.engine.running, it.engine.waiting = 3, 2
        metrics = (await it.get(path))[1].encode()
        assert requests_in(metrics) == 5


# llama.cpp and Ollama


async def status(it: Served) -> str:
    return str((await it.get("/models"))[1]["data"][0]["status"]["value"])


async def test_llamacpp_unloads_and_loads_after_its_answer_and_refuses_what_is_done():
    async with serving("llamacpp", autoload=False) as it:
        assert await it("/models/unload", {"model": "m"}) == (200, {"success": True})
        await until(lambda: it.used == 0, what="the memory is free")
        assert (await status(it), (await it.get("/health"))[0], await it.text()) == ("unloaded", 200, "400")
        assert (await it("/models/unload", {"model": "m"}))[0] == 400
        assert (await it("/models/load", {"model": "x"}))[0] == 404
        assert await it("/models/load", {"model": "m"}) == (200, {"success": True})
        await until(lambda: it.used == TOTAL, what="the memory is taken")
        await until(lambda: it.engine.asleep == set(), what="loaded")
        assert (await it("/models/load", {"model": "m"}))[0] == 400
        assert await it.text() == GOOD


@pytest.mark.parametrize(
    ("path", "status", "held"),
    [("/metrics?model=m", 200, TOTAL), ("/props?model=m", 200, TOTAL), ("/metrics?model=m&autoload=false", 400, 0)],
)
async def test_a_question_about_an_unloaded_model_loads_it_at_llamacpp_unless_it_says_not_to(path, status, held):
    async with serving("llamacpp") as it:
        await it("/models/unload", {"model": "m"})
        await until(lambda: it.used == 0, what="the memory is free")
        assert ((await it.get(path))[0], it.used) == (status, held)


async def test_llamacpp_without_room_stays_unloaded():
    async with serving("llamacpp", autoload=False) as it:
        await it("/models/unload", {"model": "m"})
        await until(lambda: it.used == 0, what="the memory is free")
        it.ram.room["GPU-a"] = 1
        assert (await it("/models/load", {"model": "m"}))[0] == 200

        async def failed() -> bool:
            return await status(it) == "unloaded"

        await until(failed, what="the load has failed")
        assert it.used == 0


async def test_llamacpps_metrics_are_of_a_named_model_and_behind_a_flag_and_a_key():
    async with serving("llamacpp", key="k", metrics=False) as it:
        key = {"Authorization": "Bearer k"}
        assert (await it.get("/metrics"))[0] == 401
        assert (await it.get("/metrics", headers=key))[0] == 400
        assert (await it.get("/metrics?model=m", headers=key))[0] == 501
        assert (await it.get("/models"))[0] == 200


async def test_ollama_unloads_in_the_background_and_any_request_loads_again():
    async with serving("ollama") as it:
        assert (await it.get("/health"))[0] == 404
        assert (await it.get("/metrics"))[0] == 404
        assert await it.get("/") == (200, "Ollama is running")
        code, body = await it("/api/generate", {"model": "m", "keep_alive": 0})
        assert (code, body["done_reason"]) == (200, "unload")
        await until(lambda: it.used == 0, what="the memory is free")
        assert (await it.get("/api/ps"))[1] == {"models": []}
        assert await it.text() == GOOD
        assert (it.used, len((await it.get("/api/ps"))[1]["models"])) == (TOTAL, 1)
        assert (await it("/api/generate", {"model": "x", "keep_alive": 0}))[0] == 404


async def test_ollama_finishes_what_runs_before_it_unloads():
    async with serving("ollama") as it:
        request = await running(it)
        assert (await it("/api/generate", {"model": "m", "keep_alive": 0}))[1]["done_reason"] == "unload"
        assert it.used == TOTAL
        assert (await request)[1]["choices"][0]["text"] == expected_text("m", "hello", 200)
        await until(lambda: it.used == 0, what="the memory is free")


# Lies


async def sleeps(it: Served) -> tuple[int, bool, int]:
    """Status of the call, what it says then, its memory."""
    code, _ = await it("/sleep?mode=wait")
    return code, (await it.get("/is_sleeping"))[1]["is_sleeping"], it.used


@pytest.mark.parametrize(
    ("lie", "seen"),
    [
        (Lie.SLEEP_NOOP, (200, False, TOTAL)),
        (Lie.SLEEP_IGNORED, (200, True, TOTAL)),
        (Lie.SLEEP_HALF, (200, True, TOTAL - 45)),
        (Lie.SLEEP_LATE, (200, True, TOTAL)),
        (Lie.SLEEP_FAILS, (500, True, TOTAL)),
        (Lie.SLEEP_BREAKS, (200, True, RESIDUE)),
    ],
)
async def test_lies_of_sleep(lie, seen):
    async with serving("vllm", f"{lie}@2") as it:
        assert await sleeps(it) == (200, True, RESIDUE), "not before its turn"
        await it("/wake_up")
        assert await sleeps(it) == seen
        if lie is Lie.SLEEP_LATE:
            await until(lambda: it.used == RESIDUE, what="the memory is free")
        await it("/wake_up")
        assert (it.used, await it.text()) == (TOTAL, "500" if lie is Lie.SLEEP_BREAKS else GOOD)
        assert (await it.get("/health"))[0] == 200


def test_a_lie_that_is_unknown_is_refused():
    assert Lies.read("wake-dies@3,sleep-noop").since == {Lie.WAKE_DIES: 3, Lie.SLEEP_NOOP: 1}
    with pytest.raises(ValueError, match="white"):
        Lies.read("white")
