"""The fake engine on libcuda: memory, work and parking as a CUDA process has them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs.build import build_stubs
from kybernate.dev.nats_server import free_port
from tests.fakes.daemons import driver, healthy, process
from tests.until import until

GIB = 2**30
SEAT = "1x-test.s00"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    """A fake machine of two GPUs, and what a container on it gets."""
    socket = tmp_path / "driver.sock"
    stubs = await asyncio.to_thread(build_stubs)
    async with driver(socket, "--speed", "100", "--gpus", "2") as _, await FakeDriverClient.connect(socket) as client:
        gpus = [gpu["uuid"] for gpu in (await client.call("devices"))["gpus"]]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
        env |= {"LD_LIBRARY_PATH": str(stubs), "KYB_FAKE_DRIVER": str(socket), "KYB_SPEED": "100"}
        env |= {"KYB_GPU_SEAT": SEAT, "NVIDIA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_VISIBLE_DEVICES": "0,1"}
        yield SimpleNamespace(client=client, gpus=gpus, env=env)


def engine(
    node: SimpleNamespace, port: int, *options: str, env: Mapping[str, str] | None = None, **more: int
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    arguments = ("-m", "kybernate.dev.fakes.engine", "--cuda", "--model", "m", "--port", str(port), *options)
    return process(*arguments, env={**node.env, **(env or {})}, **more)


@pytest.fixture
async def served(node: SimpleNamespace) -> AsyncIterator[SimpleNamespace]:
    port = free_port()
    async with (
        engine(node, port, "--vram", "40GiB") as started,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        await until(lambda: healthy(http), what="the engine is healthy", timeout=30)
        yield SimpleNamespace(pid=started.pid, http=http, node=node)


async def held(node: SimpleNamespace) -> dict[str, int]:
    """GiB by seat and GPU."""
    found = (await node.client.call("processes"))["processes"]
    return {f"{entry['seat']}@{node.gpus.index(entry['gpu'])}": entry["bytes"] // GIB for entry in found}


async def ask(served: SimpleNamespace, tokens: int = 20) -> str:
    body = {"model": "m", "max_tokens": tokens, "prompt": "hello"}
    async with served.http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["text"])


async def test_it_takes_the_memory_of_its_visible_gpus_and_computes(served: SimpleNamespace) -> None:
    assert await held(served.node) == {f"{SEAT}@0": 20, f"{SEAT}@1": 20}
    assert await ask(served) == expected_text("m", "hello", 20)
    assert (await served.node.client.call("stats"))["requests"] == 1


async def test_sleep_gives_the_memory_back_but_for_the_residue(served: SimpleNamespace) -> None:
    for path, expected in (("sleep", 1), ("wake_up", 20)):
        async with served.http.post(f"/{path}") as answer:
            assert answer.status == 200, await answer.text()
        assert await held(served.node) == {f"{SEAT}@0": expected, f"{SEAT}@1": expected}
    assert await ask(served) == expected_text("m", "hello", 20)


async def test_an_answer_stands_still_while_the_process_is_parked(served: SimpleNamespace) -> None:
    driver = served.node.client
    body = {"model": "m", "max_tokens": 4000, "prompt": "hello", "stream": True}  # ten parts of 0.7 s
    async with served.http.post("/v1/completions", json=body) as answer:
        first = await anext(aiter(answer.content))
        assert first.startswith(b"data: ")
        await driver.call("lock", pid=served.pid)
        waiting = asyncio.create_task(answer.content.read())
        done, _ = await asyncio.wait([waiting], timeout=1.5)  # more than one part takes
        assert not done
        await driver.call("unlock", pid=served.pid)
        rest = await waiting
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_engine_whose_cuda_calls_wait_can_be_ended(served: SimpleNamespace) -> None:
    body = {"model": "m", "max_tokens": 4000, "prompt": "hello", "stream": True}
    async with served.http.post("/v1/completions", json=body) as answer:
        await anext(aiter(answer.content))
        await served.node.client.call("lock", pid=served.pid)
        reading = asyncio.create_task(answer.content.read())
        await asyncio.wait([reading], timeout=1.5)  # by then the next part has asked the GPU for something
        os.kill(served.pid, signal.SIGTERM)

        async def gone() -> bool:
            return not await held(served.node)

        await until(gone, what="the engine's memory is free", timeout=30)
        await asyncio.gather(reading, return_exceptions=True)


async def test_what_is_missing_is_named(node: SimpleNamespace) -> None:
    cases: tuple[tuple[tuple[str, ...], dict[str, str], int, bytes], ...] = (
        ((), {"CUDA_VISIBLE_DEVICES": ""}, 1, b"cuInit answered CUDA_ERROR_NO_DEVICE"),
        ((), {"LD_LIBRARY_PATH": ""}, 1, b"name the folder of the stub in LD_LIBRARY_PATH"),
        (("--vram", "400GiB"), {}, 1, b"CUDA_ERROR_OUT_OF_MEMORY"),
    )
    for options, env, code, text in cases:
        pipe = asyncio.subprocess.PIPE
        async with engine(node, free_port(), *options, env=env, stderr=pipe) as started:
            _, errors = await asyncio.wait_for(started.communicate(), 30)
            assert (started.returncode, text in errors) == (code, True), errors
