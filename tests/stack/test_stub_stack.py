"""A whole stack whose services and engines reach the fake GPUs through NVIDIA's libraries only (stubs of them)."""

import asyncio
from pathlib import Path

import pytest
import yaml

from kybernate.config_errors import ConfigError
from kybernate.dev.fakes.stubs import build
from kybernate.dev.stack import LAPTOP, Stack, StackError, StackOptions
from kybernate.dev.stack.options import check
from tests.stack.client import running
from tests.stack.pods import ONE_GROUP, small_node
from tests.until import until


@pytest.mark.timeout(150)
async def test_a_request_to_a_parked_model_is_answered_and_nothing_is_violated(tmp_path: Path) -> None:
    shipped = next(one for one in (LAPTOP / "pods-cuda.yaml").read_text().split("---") if "qwen3-32b" in one)
    config = ONE_GROUP + "policy: {name: quantum, settings: {idleSeconds: 1}}\n"
    pods = [f"---{shipped.replace('qwen3-32b', model)}" for model in ("tiny", "small")]
    async with running(small_node(tmp_path, config, pods, driver="stub", speed=10), 100) as here:
        stack, seats = here.stack, await here.seats()
        assert sorted(seat["state"] for seat in seats.values()) == ["active", "parked"]
        before = await here.driver("stats")
        (holder,) = {entry["pid"] for entry in (await here.driver("processes"))["processes"] if entry["bytes"]}
        environment = _environment(holder)
        assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")
        assert environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert environment["LD_LIBRARY_PATH"].startswith(str(stack.layout.stubs))
        assert "KYB_FAKE_GPU" not in environment, "the fake's own variables are not for CUDA processes"
        assert "libcuda.so.1" in Path(f"/proc/{holder}/maps").read_text()

        await here.answered(*(model for model, seat in seats.items() if seat["state"] == "parked"))
        assert (await here.driver("stats"))["restores"] == before["restores"] + 1
        await until(lambda: _stopped(holder), what="the active engine is stopped")
        notes = [note.name.partition("-")[0] for note in (stack.folder / "state" / "helpers").iterdir()]
        helpers = [Path(f"/proc/{pid}/cmdline") for pid in notes if pid.isdigit()]
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


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
