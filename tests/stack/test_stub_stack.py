"""A whole stack whose services and engines reach the fake GPUs through NVIDIA's libraries only (stubs of them)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kybernate.config_errors import ConfigError
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.stubs import build
from kybernate.dev.stack import LAPTOP, Stack, StackError, StackOptions
from kybernate.dev.stack.options import check
from tests.until import until

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
gpuTopology:
  groups: [{name: G0, gpus: [0]}]
policy: {name: quantum, settings: {idleSeconds: 1}}
"""
MODELS = ("tiny", "small")


@pytest.fixture(autouse=True)
def _own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """Two models on one GPU that holds one of them."""
    shipped = {pod["metadata"]["name"]: pod for pod in yaml.safe_load_all((LAPTOP / "pods-cuda.yaml").read_text())}
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "pods.yaml").write_text(yaml.safe_dump_all([_pod(shipped["qwen3-32b"], model) for model in MODELS]))
    options = StackOptions(
        driver="stub",
        config=tmp_path / "config.yaml",
        pods=tmp_path / "pods.yaml",
        port=0,
        gpus=1,
        speed=10.0,
        announce=False,
    )
    async with Stack(options) as started:
        yield started


def _pod(shipped: dict[str, Any], model: str) -> dict[str, Any]:
    """A shipped pod for another model."""
    text = yaml.safe_dump(shipped)
    pod: dict[str, Any] = yaml.safe_load(text.replace("qwen3-32b", model))
    return pod


@pytest.mark.timeout(150)
async def test_a_request_to_a_parked_model_is_answered_and_nothing_is_violated(stack: Stack) -> None:
    seats = await stack.ready(100)
    assert sorted(seat["state"] for seat in seats) == ["active", "parked"]
    parked = next(seat for seat in seats if seat["state"] == "parked")["model"]
    async with await FakeDriverClient.connect(stack.layout.driver_socket) as driver:
        before = await driver.call("stats")
        (holder,) = {entry["pid"] for entry in (await driver.call("processes"))["processes"] if entry["bytes"]}
        environment = _environment(holder)
        assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        assert environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert environment["LD_LIBRARY_PATH"].startswith(str(stack.layout.stubs))
        assert "KYB_FAKE_GPU" not in environment, "the fake's own variables are not for CUDA processes"
        assert "libcuda.so.1" in Path(f"/proc/{holder}/maps").read_text()

        assert await _ask(stack.url, parked) == expected_text(parked, "hi", 12)

        after = await driver.call("stats")
        assert after["violations"]["count"] == 0, after["violations"]
        assert after["restores"] == before["restores"] + 1
        await until(lambda: _stopped(holder), what="the active engine is stopped")
    helpers = [Path(f"/proc/{note.name.partition('-')[0]}/cmdline") for note in _notes(stack.folder)]
    commands = [path.read_text().split("\0") for path in helpers if path.exists()]
    assert commands
    assert not any("--fake" in command for command in commands)


def test_without_a_c_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.StubError, match="no C compiler"):
        build.build_stubs()

    async def start() -> None:
        async with Stack(StackOptions(driver="stub", port=0, announce=False)):
            pass

    with pytest.raises(StackError, match=r"--driver stub: no C compiler .*install gcc"):
        asyncio.run(start())


def test_pods_must_name_the_backend_that_the_driver_needs() -> None:
    with pytest.raises(ConfigError, match=r"'fake'.* parks on fake GPUs only; write kyb.ai/backend: cuda"):
        check(StackOptions(driver="stub", pods=LAPTOP / "pods.yaml"))
    with pytest.raises(ConfigError, match=r"'cuda'.* cannot park on fake GPUs; write kyb.ai/backend: fake"):
        check(StackOptions(pods=LAPTOP / "pods-cuda.yaml"))
    assert len(check(StackOptions(driver="stub")).pods) == len(check(StackOptions()).pods) == 7


def test_both_files_of_pods_are_the_same_but_for_the_driver() -> None:
    fake, cuda = (list(yaml.safe_load_all((LAPTOP / name).read_text())) for name in ("pods.yaml", "pods-cuda.yaml"))
    for pod in cuda:
        assert pod["metadata"]["annotations"]["kyb.ai/backend"] == "cuda"
        pod["metadata"]["annotations"]["kyb.ai/backend"] = "fake"
        pod["spec"]["containers"][0]["command"].remove("--cuda")
    assert cuda == fake


async def _ask(url: str, model: str) -> str:
    body = {"model": model, "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["choices"][0]["message"]["content"])


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _notes(folder: Path) -> list[Path]:
    return [note for note in (folder / "state" / "helpers").iterdir() if note.name[0].isdigit()]
