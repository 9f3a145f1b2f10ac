"""The helper process with the real driver code, against the stub libraries."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.settings import fake_helper_command
from tests.checkpointer.world import GIB
from tests.cuda.recorder import Recorder, needs_no_driver
from tests.cuda.stub_node import DEADLINE, Helper, stub_node

SECONDS_BUSY = 1e6


async def test_a_process_is_parked_and_activated() -> None:
    async with stub_node() as node, node.helper() as helper:
        pid = await node.user(node.gpus[0])
        assert await helper.code("restore_tid", pid) == (0, "SUCCESS")
        assert await helper.state(pid) == "RUNNING"
        assert await helper.code("lock", pid, timeout_ms=5000, epoch=7) == (0, "SUCCESS")
        assert await helper.state(pid) == "LOCKED"
        listed = (await helper.call("processes"))["processes"]
        assert [one for one in listed if one["bytes"]] == [
            {"pid": pid, "gpu": node.gpus[0], "bytes": 40 * GIB, "exact": True}
        ]
        assert (await helper.call("memory"))["memory"][node.gpus[0]] == [40 * GIB, 80 * GIB]
        both_at_once = await helper.call("usage", gpus=[node.gpus[0]])
        assert [one for one in both_at_once["processes"] if one["bytes"]] == [one for one in listed if one["bytes"]]
        assert both_at_once["memory"] == {node.gpus[0]: [40 * GIB, 80 * GIB]}
        assert await helper.code("checkpoint", pid, epoch=7) == (0, "SUCCESS")
        assert await helper.state(pid) == "CHECKPOINTED"
        listed = (await helper.call("processes"))["processes"]
        assert (pid in {one["pid"] for one in listed}, sum(one["bytes"] for one in listed)) == (False, 0)
        assert (await helper.call("memory"))["memory"][node.gpus[0]] == [0, 80 * GIB]
        assert await helper.code("restore", pid, epoch=7) == (0, "SUCCESS")
        assert await helper.state(pid) == "LOCKED"
        assert await helper.code("unlock", pid, epoch=7) == (0, "SUCCESS")
        assert await helper.state(pid) == "RUNNING"
        assert (await node.client.call("stats"))["violations"]["count"] == 0


async def test_a_map_moves_a_process_to_the_other_gpu() -> None:
    async with stub_node() as node, node.helper() as helper:
        first, second = node.gpus
        pid = await node.user(first)
        await helper.code("lock", pid)
        await helper.code("checkpoint", pid)
        partial = await helper.call("restore", pid=pid, gpu_map={first: second})
        assert (partial["code"], partial["name"]) == (1, "INVALID_VALUE")
        assert partial["text"].endswith("nothing was done")
        assert await helper.code("restore", pid, gpu_map={first: second, second: first}) == (0, "SUCCESS")
        assert await node.used() == {first: 0, second: 40 * GIB}
        await helper.code("checkpoint", pid)
        assert await helper.code("restore", pid, gpu_map={first: first, second: second}) == (0, "SUCCESS")
        assert await node.used() == {first: 0, second: 40 * GIB}, "the identity goes without a map"


async def test_a_driver_before_580_is_never_asked_to_move_anything() -> None:
    """It would not look at the map and restore where there may be no room."""
    async with stub_node() as node, node.helper(KYB_STUB_CUDA_VERSION="12080") as helper:
        first, second = node.gpus
        pid = await node.user(first)
        await helper.code("lock", pid)
        await helper.code("checkpoint", pid)
        refused = await helper.call("restore", pid=pid, gpu_map={first: second, second: first})
        assert (refused["code"], refused["name"]) == (801, "NOT_SUPPORTED")
        assert "needs 580 or newer" in refused["text"]
        assert await helper.state(pid) == "CHECKPOINTED"
        assert await helper.code("restore", pid, gpu_map={first: first, second: second}) == (0, "SUCCESS")


async def test_a_driver_before_570_is_named_on_every_verb() -> None:
    async with stub_node(gpus=1) as node, node.helper(KYB_STUB_CUDA_VERSION="12040") as helper:
        text = "driver 550 has no checkpoint API; needs 570 or newer (580 recommended)"
        about_a_process = ("state", "restore_tid", "lock", "checkpoint", "restore", "unlock")
        for verb in (*about_a_process, "usage", "processes", "init", "describe"):
            reply = await helper.call(verb, pid=os.getpid())
            assert (reply["code"], reply["name"], reply["text"]) == (-1, "UNREACHABLE", text)


async def test_results_have_the_names_of_the_driver() -> None:
    async with stub_node(gpus=1) as node, node.helper() as helper:
        pid = await node.user(node.gpus[0])
        assert await helper.code("checkpoint", pid) == (401, "ILLEGAL_STATE")
        assert await helper.code("lock", os.getpid()) == (3, "NOT_INITIALIZED")
        assert await helper.code("state", 4_000_000) == (304, "OPERATING_SYSTEM")
        await node.inject("busy", pid=pid, seconds=SECONDS_BUSY)
        assert await helper.code("lock", pid, timeout_ms=10) == (600, "NOT_READY")
        assert await helper.state(pid) == "RUNNING"
        assert (await helper.call("no-such-verb"))["name"] == "INVALID_VALUE"


async def test_another_group_goes_on_while_a_call_hangs() -> None:
    async with stub_node() as node, node.helper() as helper:
        first, second = await node.user(node.gpus[0]), await node.user(node.gpus[1])
        await node.inject("hang", pid=first, verb="lock")
        task = asyncio.create_task(helper.pool.call("G0", "lock", deadline=3600, pid=first))
        reply = await helper.pool.call("G1", "state", deadline=DEADLINE, pid=second)
        assert reply["state"] == "RUNNING"
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_describe_tells_what_the_machine_is() -> None:
    async with stub_node() as node, node.helper() as helper:
        described = await helper.call("describe")
        assert (described["code"], described["driver"], described["cuda"]) == (0, "580.95.05", 13000)
        assert described["binding"].startswith("ctypes")
        assert described["mig"] == dict.fromkeys(node.gpus, False)
        capabilities = {"checkpoint": True, "gpu_map": True, "launch_job": False, "custom_storage": False}
        assert described["capabilities"] == capabilities


async def test_a_gpu_in_mig_mode_is_described_as_such() -> None:
    async with stub_node(gpus=2, options=("--preset", "2xA100-half-mig")) as node, node.helper() as helper:
        assert sorted((await helper.call("describe"))["mig"].values()) == [False, True]


async def test_a_lost_gpu_is_left_out_unless_it_is_the_one_that_is_wanted() -> None:
    async with stub_node() as node, node.helper() as helper:
        pid = await node.user(node.gpus[1])
        await node.inject("lost", gpu=node.gpus[0])
        assert list((await helper.call("memory"))["memory"]) == [node.gpus[1]]
        assert [use["pid"] for use in (await helper.call("processes"))["processes"] if use["bytes"]] == [pid]
        assert (await helper.call("memory", gpus=[node.gpus[1]]))["code"] == 0
        reply = await helper.call("memory", gpus=[node.gpus[0]])
        assert (reply["code"], reply["name"]) == (-1, "UNREACHABLE")
        assert "NVML failed" in reply["text"]
        for verb in ("processes", "usage"):
            assert (await helper.call(verb, gpus=[node.gpus[0]]))["code"] == -1


async def test_the_fake_driver_leaves_out_a_lost_gpu_as_nvml_does() -> None:
    async with (
        stub_node() as node,
        HelperPool(fake_helper_command(node.folder / "driver.sock"), node.folder / "h") as pool,
    ):
        helper = Helper(pool)
        pid = await node.user(*node.gpus)
        assert (await helper.call("describe"))["driver"] == "fake"
        listed = (await helper.call("processes", gpus=[node.gpus[1]]))["processes"]
        assert [(use["pid"], use["gpu"]) for use in listed] == [(pid, node.gpus[1])]
        usage = await helper.call("usage", gpus=[node.gpus[1]])
        assert (usage["processes"], list(usage["memory"])) == (listed, [node.gpus[1]])
        await node.inject("lost", gpu=node.gpus[0])
        assert list((await helper.call("memory"))["memory"]) == [node.gpus[1]]
        for verb in ("memory", "usage"):
            assert (await helper.call(verb, gpus=[node.gpus[0]]))["code"] == -1


def recorded(recorder: Recorder, folder: Path) -> HelperPool:
    """Helpers on the recording library, without NVML."""
    settings = (f"LD_LIBRARY_PATH={recorder.folder}", f"RECORDER_FOLDER={recorder.folder}")
    helper = (sys.executable, "-m", "services.checkpointer.helper")
    return HelperPool(("/usr/bin/env", *settings, *helper), folder)


@needs_no_driver
async def test_a_system_that_is_not_ready_is_asked_again_at_the_next_call(tmp_path: Path) -> None:
    recorder = Recorder.build(tmp_path / "lib")
    recorder.answer(cuInit=802)
    async with recorded(recorder, tmp_path / "helpers") as pool:
        helper = Helper(pool)
        reply = await helper.call("state", pid=1)
        assert (reply["code"], reply["name"]) == (-1, "UNREACHABLE")
        assert "SYSTEM_NOT_READY (802)" in reply["text"]
        assert "fabric manager" in reply["text"]
        recorder.answer(cuInit=0)
        assert await helper.state(1) == "RUNNING"
        for verb in ("memory", "describe"):
            reply = await helper.call(verb)
            assert (reply["code"], reply["name"]) == (-1, "UNREACHABLE")
            assert "no NVML on this machine" in reply["text"]
            assert "KYB_DRIVER=fake" in reply["text"]


async def test_a_library_that_does_not_fit_the_driver_is_asked_once(tmp_path: Path) -> None:
    recorder = Recorder.build(tmp_path / "lib")
    recorder.answer(cuInit=803)
    async with recorded(recorder, tmp_path / "helpers") as pool:
        helper = Helper(pool)
        for _ in range(3):
            assert "SYSTEM_DRIVER_MISMATCH (803)" in (await helper.call("lock", pid=1))["text"]
        mine = pool._lines["G0"].helper
        assert recorder.pids("cuInit").count(mine.who.pid) == 1
        assert recorder.calls("cuCheckpointProcessLock") == []


@pytest.mark.parametrize(("code", "verb"), [(304, "restore"), (2, "restore"), (3, "state"), (3, "restore_tid")])
async def test_what_cuinit_answers_is_never_taken_for_an_answer_about_a_process(
    tmp_path: Path, code: int, verb: str
) -> None:
    """304 or 2 of a restore means that its process is lost, 3 of a state that it is gone: both would be killed."""
    recorder = Recorder.build(tmp_path / "lib")
    recorder.answer(cuInit=code)
    async with recorded(recorder, tmp_path / "helpers") as pool:
        reply = await Helper(pool).call(verb, pid=1)
        assert (reply["code"], f"({code})" in reply["text"]) == (-1, True)


async def test_a_function_that_is_missing_in_spite_of_the_version_is_an_answer(tmp_path: Path) -> None:
    recorder = Recorder.build(tmp_path / "lib", "-DOLD")
    recorder.answer(cuCheckpointProcessLock="absent")
    async with recorded(recorder, tmp_path / "helpers") as pool:
        reply = await Helper(pool).call("lock", pid=1)
        assert (reply["code"], reply["name"]) == (-1, "UNREACHABLE")
        assert "cuCheckpointProcessLock" in reply["text"]
        assert "570 or newer" in reply["text"]
