"""What real drivers did to people (docs/dev/checkpointer.md, hazards H1 to H16), on the stub and the fake machine.

The rows are those of ``bench.gpu.driver``; what follows them is what only the stub library can show.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from bench.gpu.driver import ROWS, Row, play
from tests.control_groups import control_group
from tests.stubs.players import StubLibrary
from tests.stubs.stand import (
    GIB,
    LOCKED,
    NO_DEVICE,
    NO_ROOM,
    RUNNING,
    SECONDS,
    SUCCESS,
    Stand,
    own_stand,
)
from tests.until import until_blocking


def differences(row: Row, played: list[tuple[str, str]]) -> list[str]:
    both = zip(row.steps, played, strict=True)
    return [f"{step}: {seen}, not {answer}" for (step, answer, _), (_, seen) in both if seen != answer]


@pytest.mark.parametrize("row", [row for row in ROWS if not row.lasting], ids=str)
async def test_the_stub_library_does_what_drivers_do(machine: Stand, row: Row):
    assert differences(row, await play(StubLibrary(machine, await machine.caller()), row)) == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.lasting], ids=str)
async def test_what_spoils_a_gpu_through_the_stub_library(stubs, tmp_path: Path, row: Row):
    async with own_stand(stubs, tmp_path) as machine:
        assert differences(row, await play(StubLibrary(machine, await machine.caller()), row)) == []


# ---- H5: stopped and frozen ----


@contextlib.contextmanager
def frozen(version: Literal[1, 2], pid: int) -> Iterator[None]:
    freezer, freeze, thaw = ("cgroup.freeze", "1", "0") if version == 2 else ("freezer.state", "FROZEN", "THAWED")
    with control_group(version) as made:
        (made / "cgroup.procs").write_text(str(pid))
        (made / freezer).write_text(freeze)
        _until_frozen(*((made / "cgroup.events", "frozen 1") if version == 2 else (made / freezer, freeze)))
        try:
            yield
        finally:
            (made / freezer).write_text(thaw)


def _until_frozen(log: Path, what: str) -> None:
    """The kernel freezes when the process next leaves or enters it: on a busy machine after the write has returned."""
    until_blocking(lambda: what in log.read_text().splitlines(), what=what, saw=log.read_text, interval=0.001)


@pytest.mark.parametrize("version", [2, 1])
async def test_lock_state_and_restore_of_a_frozen_process_hang_until_it_goes_on(machine: Stand, version):
    """H5. No time-out helps: it bounds the wait for submitted work only."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    with frozen(version, engine.pid):
        lock, query = caller.start("lock", engine.pid, 1), caller.start("state", engine.pid)
        await machine.hangs(lock, caller)
        assert not query.done()
        assert await caller.do("tid", engine.pid) == (SUCCESS, engine.pid)
    codes = [(await asyncio.wait_for(one, SECONDS))["code"] for one in (lock, query)]
    assert codes == [SUCCESS, SUCCESS]
    assert await caller.code("checkpoint", engine.pid) == SUCCESS
    with frozen(version, engine.pid):
        restore = caller.start("restore", engine.pid)
        await machine.hangs(restore, caller)
        assert await machine.used_gib() == [0, 0]
    assert (await asyncio.wait_for(restore, SECONDS))["code"] == SUCCESS
    assert await caller.code("unlock", engine.pid) == SUCCESS


# ---- H9 to H11, H15, H16 ----


async def test_managed_memory_shows_in_the_mappings_of_the_uvm_device(machine: Stand):
    """gpunap: a CUDA process has one mapping of it, one with managed memory has 2 and more."""
    engine = await machine.user(gib=1)

    def mappings() -> int:
        lines = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
        return sum(line.endswith("/dev/nvidia-uvm") for line in lines)

    assert mappings() == 1
    assert await engine.code("managed", GIB) == SUCCESS
    assert mappings() == 2


async def test_nvml_stalls_and_checkpoint_calls_do_not(machine: Stand):
    """Under RM-lock contention (teardown of large processes, an XID) readings take seconds."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    await machine.inject("stall", seconds=1_000_000)
    reading = asyncio.create_task(machine.client.call("processes"))
    assert await caller.value("state", engine.pid) == RUNNING
    await caller.park(engine.pid)
    assert not reading.done()
    await machine.inject("clear")
    await asyncio.wait_for(reading, SECONDS)


async def test_a_checkpoint_on_a_mig_instance_says_out_of_memory(stubs, tmp_path: Path):
    """H11. Also what a process sees of such a machine: one instance."""
    async with own_stand(stubs, tmp_path, "--preset", "A100-mig-mixed", "--speed", "100") as machine:
        instances = (await machine.client.call("devices"))["instances"]
        caller, engine = await machine.caller(), await machine.user(gib=1)
        assert await engine.value("count") == 1
        assert "MIG-" + (await engine.value("device", 0))[1] == instances[0]["uuid"]
        second = await machine.user(gib=1, CUDA_VISIBLE_DEVICES=instances[1]["uuid"])
        shown = (await machine.client.call("processes"))["processes"]
        assert {entry["pid"]: entry["gpu"] for entry in shown if entry["bytes"]} == {
            engine.pid: instances[0]["uuid"],
            second.pid: instances[1]["uuid"],
        }
        assert await caller.code("lock", engine.pid) == SUCCESS
        assert await caller.code("checkpoint", engine.pid) == NO_ROOM
        assert await caller.value("state", engine.pid) == LOCKED


@pytest.mark.parametrize(
    ("container", "user", "seen"),
    [("$0,$1", "0", 0), ("$0,$1", "1", None), ("$0,$1", "$1", 1), ("$0", "$1", None), ("$1", "0", 1)],
)
async def test_of_several_mig_instances_cuda_counts_the_first_and_finds_another_by_its_uuid(
    stubs, tmp_path: Path, container: str, user: str, seen: int | None
):
    async with own_stand(stubs, tmp_path, "--preset", "A100-mig-mixed", "--speed", "100") as machine:
        uuids = [one["uuid"] for one in (await machine.client.call("devices"))["instances"]]
        container, user = (text.replace("$0", uuids[0]).replace("$1", uuids[1]) for text in (container, user))
        engine = await machine.child(NVIDIA_VISIBLE_DEVICES=container, CUDA_VISIBLE_DEVICES=user)
        assert await engine.code("init") == (NO_DEVICE if seen is None else SUCCESS)
        if seen is not None:
            assert "MIG-" + (await engine.value("device", 0))[1] == uuids[seen]
