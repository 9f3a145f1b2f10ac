"""``kyb doctor gpu`` as people run it: without a GPU, on the fakes, on the stub libraries, on a driver that hangs."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kybernate.doctor.gpu import gather
from tests.cuda.recorder import Recorder, needs_no_driver
from tests.cuda.stub_node import stub_node

KYB = (sys.executable, "-c", "from kybernate.cli import main; main()", "doctor", "gpu")


def plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}


async def doctor(environment: Mapping[str, str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        *KYB, *arguments, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def checks(environment: Mapping[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and findings by check."""
    code, out, err = await doctor(environment, "-o", "json", *arguments)
    assert not err
    report = json.loads(out)
    assert report["ok"] is (code == 0)
    return code, {finding["check"]: finding for finding in report["findings"]}


@needs_no_driver
async def test_a_laptop_without_a_gpu_gets_one_line_per_finding() -> None:
    code, out, err = await doctor(plain())
    assert code == 1
    assert not err
    lines = out.splitlines()
    assert lines[0].startswith("FAIL libcuda      no NVIDIA driver on this machine: ")
    assert " → " in lines[0]
    assert all(line.split(" ")[0] in ("OK", "WARN", "FAIL") for line in lines)


async def test_the_fake_driver_is_a_good_machine() -> None:
    async with stub_node() as node:
        pid = await node.user(node.gpus[0])
        environment = plain() | {"KYB_DRIVER": "fake", "KYB_FAKE_DRIVER": str(node.folder / "driver.sock")}
        code, found = await checks(environment)
        assert code == 0, found
        assert found["nvml"]["finding"].startswith("2 x ")
        assert found["access"]["finding"] == "the driver reaches every process that uses CUDA (1)"
        assert f"({pid}): 40.0 GiB of VRAM" in found["memory"]["finding"]
        await node.inject("lost", gpu=node.gpus[1])
        code, found = await checks(environment)
        assert code == 1
        assert found["nvml"]["finding"] == "1 of 2 GPUs do not answer"


async def test_the_stub_libraries_are_asked_as_the_real_ones() -> None:
    async with stub_node() as node:
        await node.user(node.gpus[0], gib=1)
        code, found = await checks(node.environment())
        assert code == 0, found
        assert "through ctypes on libcuda.so.1" in found["libcuda"]["finding"]
        assert found["version"]["finding"].startswith("driver 580.95.05 can: park and activate, activate on other GPUs")
        assert found["access"]["level"] == "OK"
        assert found["persistence"]["finding"] == "on"
        code, found = await checks(node.environment(KYB_STUB_CUDA_VERSION="12040"))
        assert code == 1
        assert found["version"]["finding"].startswith("driver 550 has no checkpoint API; needs 570 or newer")


async def test_mig_is_named_by_gpu() -> None:
    async with stub_node(gpus=2, options=("--preset", "2xA100-half-mig")) as node:
        code, found = await checks(node.environment())
        assert code == 0
        assert found["mig"]["level"] == "WARN"


async def test_a_driver_that_hangs_ends_at_the_deadline_and_the_step_is_named(tmp_path: Path) -> None:
    recorder = Recorder.build(tmp_path / "lib")
    recorder.answer(cuInit="wait")
    code, found = await checks(recorder.environment, "--timeout", "12")
    assert code == 1
    assert found["driver"]["finding"].startswith("cuInit did not end within 12 s")


async def test_a_driver_that_crashes_is_named(tmp_path: Path) -> None:
    recorder = Recorder.build(tmp_path / "lib")
    recorder.answer(cuInit="crash")
    code, found = await checks(recorder.environment)
    assert code == 1
    assert found["driver"]["finding"].startswith("cuInit crashed (SIGABRT)")


async def test_wrong_use_is_exit_code_2() -> None:
    code, _, err = await doctor(plain() | {"KYB_DRIVER": "fake"})
    assert (code, err) == (2, "kyb: KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket\n")
    code, _, err = await doctor(plain() | {"KYB_DRIVER": "amd"})
    assert (code, err) == (2, "kyb: KYB_DRIVER='amd': is not known; write 'cuda' or 'fake'\n")
    code, _, err = await doctor(plain() | {"KYB_DRIVER": "fake", "KYB_FAKE_DRIVER": "/nowhere"})
    assert code == 2
    assert "no fake GPU driver at /nowhere" in err
    assert (await doctor(plain(), "--timeout", "nonsense"))[0] == 2


def test_facts_written_before_a_hang_count() -> None:
    lines = [
        '{"begin": "NVML"}\n',
        '{"release": "580.95.05", "gpu_count": 0}\n',
        '{"gpus": [], "uses": [{"pid": 7, "gpu": "GPU-a", "bytes": 5, "exact": true}]}\n',
        '{"begin": "loading libcuda"}\n',
        '{"binding": "b", "cuda_version": 13000}\n',
        '{"begin": "cuInit"}\n',
        '{"init_code": 0, "init_seconds": 1.0}\n',
        '{"answers": {"7": 0}}\n',
        '{"begin": "process 8"}\n',
        '{"answers": {"8": 304}}\n',
    ]
    facts = gather(lines, "did not end within 60 s")
    assert facts.hung == "process 8 did not end within 60 s"
    assert facts.answers == {7: 0, 8: 304}
    assert facts.uses[0].bytes == 5
    assert gather(lines, "").hung == ""
