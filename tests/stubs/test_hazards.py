"""What real drivers did to people, through the stub library (docs/dev/checkpointer.md, hazards H1 to H16)."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control_groups import control_group
from tests.stubs.stand import (
    CHECKPOINTED,
    FAILED,
    GIB,
    ILLEGAL,
    INVALID,
    LOCKED,
    NO_DEVICE,
    NO_ROOM,
    NOT_SUPPORTED,
    OS,
    RUNNING,
    SECONDS,
    SUCCESS,
    UNKNOWN,
    Child,
    Stand,
    own_stand,
    until_equal,
)
from tests.until import until_blocking


async def test_a_restore_without_room_loses_the_process_and_part_of_the_memory_until_it_is_killed(machine: Stand):
    """H1."""
    caller, parked = await machine.caller(), await machine.user(gib=60)
    await caller.park(parked.pid)
    winner = await machine.user(gib=50)
    assert await caller.code("restore", parked.pid) == NO_ROOM
    assert await caller.value("state", parked.pid) == CHECKPOINTED, "as if nothing had happened (cuda-checkpoint #44)"
    winner.process.kill()
    await winner.ended()
    await until_equal(machine.used_gib, [15, 0], what="GiB used on each GPU")
    assert await caller.code("restore", parked.pid) == OS, "room does not help any more"
    assert await caller.code("unlock", parked.pid) == ILLEGAL
    assert await machine.violations() == {"restore-without-room": 1}
    parked.process.kill()
    await until_equal(machine.used_gib, [0, 0], what="GiB used on each GPU")


@pytest.mark.parametrize("parked_before", [False, True])
async def test_where_killing_a_restored_process_wedges_the_gpu_it_has_to_be_parked_before(
    stubs, tmp_path: Path, parked_before: bool
):
    """H2. A separate machine: the memory stays held until a reboot."""
    async with own_stand(stubs, tmp_path, "ctypes") as machine:
        caller, engine = await machine.caller(), await machine.user(gib=20)
        await machine.inject("wedge-on-kill", times=10)
        fresh = await machine.user(gib=5, ordinal=1)
        fresh.process.kill()
        await until_equal(machine.used_gib, [20, 0], what="GiB used on each GPU")
        await caller.park(engine.pid)
        await caller.activate(engine.pid)
        if parked_before:
            await caller.park(engine.pid)
        engine.process.kill()
        await until_equal(lambda: caller.code("tid", engine.pid), OS, what="the driver's answer")
        await machine.inject("clear")
        assert await machine.used_gib() == [0 if parked_before else 20, 0]
        assert await machine.violations() == ({} if parked_before else {"killed-after-restore": 1})


async def test_a_lock_that_kills_its_target_finds_it_gone(machine: Stand):
    """H3."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    await machine.inject("segfault-on-lock", pid=engine.pid)
    assert await caller.code("lock", engine.pid) == OS
    assert await engine.ended() == -signal.SIGSEGV
    assert await caller.code("state", engine.pid) == OS


@pytest.mark.parametrize("call", ["synchronize", "synchronize_stream"])
async def test_a_synchronize_as_first_call_while_parked_kills_the_process(machine: Stand, call: str):
    """H4."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    assert await engine.code(call) == SUCCESS
    assert await caller.code("lock", engine.pid) == SUCCESS
    assert await engine.code(call) == SUCCESS, "while it is only locked it returns at once"
    assert await caller.code("checkpoint", engine.pid) == SUCCESS
    engine.start(call)
    assert await engine.ended() == -signal.SIGSEGV


async def test_a_synchronize_behind_another_waiting_call_waits_as_well(machine: Stand):
    """H4: only the first call does it."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    await caller.park(engine.pid)
    first = engine.start("info")
    await machine.hangs(first, engine)
    second = engine.start("synchronize")
    await machine.hangs(second, engine)
    await caller.activate(engine.pid)
    assert [(await asyncio.wait_for(one, SECONDS))["code"] for one in (first, second)] == [SUCCESS, SUCCESS]


# ---- H5: stopped and frozen ----


@contextlib.contextmanager
def sigstop(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)  # takes effect when the process is next scheduled
    stat = Path(f"/proc/{pid}/stat")
    until_blocking(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", what="the process is stopped", saw=stat.read_text
    )
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def cgroup_v2(pid: int) -> Iterator[None]:
    with control_group(2) as made:
        (made / "cgroup.procs").write_text(str(pid))
        (made / "cgroup.freeze").write_text("1")
        _until_frozen(made / "cgroup.events", "frozen 1")
        try:
            yield
        finally:
            (made / "cgroup.freeze").write_text("0")


@contextlib.contextmanager
def cgroup_v1(pid: int) -> Iterator[None]:
    with control_group(1) as made:
        (made / "cgroup.procs").write_text(str(pid))
        (made / "freezer.state").write_text("FROZEN")
        _until_frozen(made / "freezer.state", "FROZEN")
        try:
            yield
        finally:
            (made / "freezer.state").write_text("THAWED")


def _until_frozen(log: Path, what: str) -> None:
    """The kernel freezes when the process next leaves or enters it: on a busy machine after the write has returned."""
    until_blocking(lambda: what in log.read_text().splitlines(), what=what, saw=log.read_text, interval=0.001)


@pytest.mark.parametrize("freeze", [sigstop, cgroup_v2, cgroup_v1])
async def test_lock_state_and_restore_of_a_frozen_process_hang_until_it_goes_on(machine: Stand, freeze):
    """H5. No time-out helps: it bounds the wait for submitted work only."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    with freeze(engine.pid):
        lock, query = caller.start("lock", engine.pid, 1), caller.start("state", engine.pid)
        await machine.hangs(lock, caller)
        assert not query.done()
        assert await caller.do("tid", engine.pid) == (SUCCESS, engine.pid)
    codes = [(await asyncio.wait_for(one, SECONDS))["code"] for one in (lock, query)]
    assert codes == [SUCCESS, SUCCESS]
    assert await caller.code("checkpoint", engine.pid) == SUCCESS
    with freeze(engine.pid):
        restore = caller.start("restore", engine.pid)
        await machine.hangs(restore, caller)
        assert await machine.used_gib() == [0, 0]
    assert (await asyncio.wait_for(restore, SECONDS))["code"] == SUCCESS
    assert await caller.code("unlock", engine.pid) == SUCCESS


async def test_a_lock_that_hung_takes_effect_even_if_its_caller_was_killed(machine: Stand):
    """H5: what the helper that is killed at its deadline leaves behind."""
    caller, engine, other = await machine.caller(), await machine.user(gib=1), await machine.caller()
    with sigstop(engine.pid):
        hanging = caller.start("lock", engine.pid)
        await machine.hangs(hanging, caller)
        caller.process.kill()
        await caller.ended()
    await until_equal(lambda: other.value("state", engine.pid), LOCKED, what="the driver's answer")
    assert await other.code("unlock", engine.pid) == SUCCESS


# ---- H7 and H8: NCCL ----


async def ranks(machine: Stand) -> tuple[Child, Child]:
    communicator = str(uuid.uuid4())
    seat = {"KYB_GPU_SEAT": "2x-a.s00", "KYB_STUB_COMMUNICATOR": communicator}
    return await machine.user(gib=1, ordinal=0, **seat), await machine.user(gib=1, ordinal=1, **seat)


async def test_the_lock_of_one_rank_hangs_while_another_is_locked(machine: Stand):
    """H8."""
    caller, (first, second) = await machine.caller(), await ranks(machine)
    assert await caller.code("lock", first.pid) == SUCCESS
    lock = caller.start("lock", second.pid, 1)
    await machine.hangs(lock, caller)
    assert await caller.value("state", second.pid) == RUNNING
    assert await caller.code("unlock", first.pid) == SUCCESS
    assert (await asyncio.wait_for(lock, SECONDS))["code"] == SUCCESS
    assert await caller.value("state", second.pid) == LOCKED


async def test_the_lock_of_a_rank_goes_on_when_the_other_dies(machine: Stand):
    """H8."""
    caller, (first, second) = await machine.caller(), await ranks(machine)
    assert await caller.code("lock", first.pid) == SUCCESS
    lock = caller.start("lock", second.pid)
    await machine.hangs(lock, caller)
    first.process.kill()
    assert (await asyncio.wait_for(lock, SECONDS))["code"] == SUCCESS


async def test_the_restore_of_a_rank_fails_for_good_while_the_others_live(machine: Stand):
    """H8."""
    caller, (first, _) = await machine.caller(), await ranks(machine)
    await caller.park(first.pid)
    assert await caller.code("restore", first.pid) == UNKNOWN
    assert await caller.value("state", first.pid) == FAILED
    assert await machine.violations() == {}


async def test_a_communicator_of_one_rank_is_harmless_unless_the_driver_aborts(machine: Stand):
    """H7: fine on 580; on 595 the process aborted."""
    caller, engine = await machine.caller(), await machine.user(gib=1, KYB_STUB_COMMUNICATOR=str(uuid.uuid4()))
    await caller.park(engine.pid)
    await caller.activate(engine.pid)
    await machine.inject("die-mid-restore", pid=engine.pid)
    await caller.park(engine.pid)
    assert await caller.code("restore", engine.pid) == OS
    assert await engine.ended() == -signal.SIGKILL


# ---- H9 to H11, H15, H16 ----


@pytest.mark.parametrize("how", ["share", "managed"])
async def test_shared_and_managed_memory_cannot_be_checkpointed(machine: Stand, how: str):
    """H9 and H10. The process stays locked and can be unlocked; states look well, and its contexts are dead."""
    caller, engine = await machine.caller(), await machine.user(gib=0)
    address = await engine.value("alloc", GIB)
    assert await engine.code(how, address if how == "share" else GIB) == SUCCESS
    assert await caller.code("lock", engine.pid) == SUCCESS
    assert await caller.code("checkpoint", engine.pid) == NOT_SUPPORTED
    assert await caller.value("state", engine.pid) == LOCKED
    assert await caller.code("unlock", engine.pid) == SUCCESS
    assert await caller.value("state", engine.pid) == RUNNING
    assert [await engine.code(call) for call in ("info", "synchronize")] == [UNKNOWN, UNKNOWN]


async def test_managed_memory_shows_in_the_mappings_of_the_uvm_device(machine: Stand):
    """gpunap: a CUDA process has one mapping of it, one with managed memory has 2 and more."""
    engine = await machine.user(gib=1)

    def mappings() -> int:
        lines = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
        return sum(line.endswith("/dev/nvidia-uvm") for line in lines)

    assert mappings() == 1
    assert await engine.code("managed", GIB) == SUCCESS
    assert mappings() == 2


async def test_a_forked_child_with_its_parents_context_is_never_restored(machine: Stand):
    """vLLM #42873: INVALID_VALUE each time; the child holds no memory, and the seat never comes back."""
    caller, engine = await machine.caller(), await machine.user(gib=0)
    await machine.mark(engine.pid, stale=True)
    await caller.park(engine.pid)
    assert [await caller.code("restore", engine.pid) for _ in range(2)] == [INVALID, INVALID]
    assert await caller.value("state", engine.pid) == CHECKPOINTED


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


async def test_a_checkpoint_on_a_mig_instance_says_out_of_memory(stubs, binding: str, tmp_path: Path):
    """H11. Also what a process sees of such a machine: one instance."""
    async with own_stand(stubs, tmp_path, binding, "--preset", "A100-mig-mixed", "--speed", "100") as machine:
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
    stubs, binding: str, tmp_path: Path, container: str, user: str, seen: int | None
):
    async with own_stand(stubs, tmp_path, binding, "--preset", "A100-mig-mixed", "--speed", "100") as machine:
        uuids = [one["uuid"] for one in (await machine.client.call("devices"))["instances"]]
        container, user = (text.replace("$0", uuids[0]).replace("$1", uuids[1]) for text in (container, user))
        engine = await machine.child(NVIDIA_VISIBLE_DEVICES=container, CUDA_VISIBLE_DEVICES=user)
        assert await engine.code("init") == (NO_DEVICE if seen is None else SUCCESS)
        if seen is not None:
            assert "MIG-" + (await engine.value("device", 0))[1] == uuids[seen]


async def test_any_verb_can_be_made_to_fail_without_effect(machine: Stand):
    """H15: get-state answered "OS call failed" on one machine."""
    caller, engine = await machine.caller(), await machine.user(gib=1)
    await caller.park(engine.pid)
    for verb in ("state", "tid", "restore"):
        call = {"state": "get_state", "tid": "get_restore_tid"}.get(verb, verb)
        await machine.inject("fail", verb=call, code=OS, pid=engine.pid)
        assert await caller.code(verb, engine.pid) == OS
    assert await caller.value("state", engine.pid) == CHECKPOINTED
    await caller.activate(engine.pid)
