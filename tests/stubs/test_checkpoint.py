"""The checkpoint API through the stub library: states, result codes, waiting, who may die when."""

import asyncio
import ctypes
import os
import sys

from tests.stubs.stand import (
    CHECKPOINTED,
    GIB,
    INVALID,
    LOCKED,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OS,
    RUNNING,
    SECONDS,
    SUCCESS,
    Stand,
)
from tests.until import until_equal

VERBS = ("lock", "checkpoint", "restore", "unlock")


async def test_a_park_frees_the_gpu_and_an_activation_brings_everything_back(machine: Stand):
    caller, engine = await machine.caller(), await machine.user(gib=0)
    address = await engine.value("alloc", 20 * GIB)
    await engine.value("write", address, "the weights")
    for verb, state, used in [
        ("lock", LOCKED, 20),
        ("checkpoint", CHECKPOINTED, 0),
        ("restore", LOCKED, 20),
        ("unlock", RUNNING, 20),
    ]:
        assert await caller.code(verb, engine.pid) == SUCCESS
        assert await caller.value("state", engine.pid) == state
        assert await machine.used_gib() == [used, 0]
        assert (engine.pid in await machine.shown()) == bool(used)
    assert await engine.value("read", address, 11) == "the weights"
    assert await machine.violations() == {}


async def test_a_process_without_cuda_is_distinguished_from_a_missing_process(machine: Stand):
    caller = await machine.caller()
    finished = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await finished.wait()
    for call in ("state", "tid", *VERBS):
        assert await caller.code(call, finished.pid) == OS, call
        assert await caller.code(call, os.getpid()) == NOT_INITIALIZED, call


async def test_a_zombie_is_no_cuda_process_any_more(machine: Stand):
    caller = await machine.caller()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        await until_equal(lambda: caller.code("state", pid), NOT_INITIALIZED, what="the driver's answer")
    finally:
        os.waitpid(pid, 0)
    assert await caller.code("state", pid) == OS


async def test_a_lock_waits_for_submitted_work_no_longer_than_its_time_out(machine: Stand):
    caller, engine = await machine.caller(), await machine.user(gib=1)
    await machine.inject("busy", seconds=100_000, pid=engine.pid)
    assert await caller.code("lock", engine.pid, 20) == NOT_READY
    assert await caller.value("state", engine.pid) == RUNNING
    await engine.value("info")


async def test_a_process_can_park_itself_from_a_thread_that_makes_no_other_calls(machine: Stand):
    engine = await machine.user(gib=5)
    await engine.park(engine.pid)
    assert await machine.used_gib() == [0, 0]
    await engine.activate(engine.pid)
    assert await machine.used_gib() == [5, 0]


# ---- maps ----


async def test_a_map_of_all_gpus_moves_the_process_which_does_not_notice(machine: Stand):
    caller, engine = await machine.caller(), await machine.user(gib=30)
    a, b = machine.gpus
    before = await engine.value("device", 0)
    await caller.park(engine.pid)
    assert await caller.code("restore", engine.pid, [[a, b], [b, a]]) == SUCCESS
    assert await caller.code("unlock", engine.pid) == SUCCESS
    assert await engine.value("device", 0) == before, "UUID and PCI address are those of the GPU it came from"


async def test_a_process_comes_to_a_gpu_that_is_hidden_from_it_in_a_container_that_has_it(machine: Stand):
    a, b = machine.gpus
    caller, engine = await machine.caller(), await machine.user(gib=1, CUDA_VISIBLE_DEVICES=a)
    await caller.park(engine.pid)
    assert await caller.code("restore", engine.pid, [[a, b], [b, a]]) == SUCCESS


# ---- versions and arguments ----


async def test_driver_570_restores_without_a_map_only(machine: Stand):
    a, b = machine.gpus
    caller, engine = await machine.caller(KYB_STUB_CUDA_VERSION="12080"), await machine.user(gib=1)
    assert await caller.value("version") == 12080
    await caller.park(engine.pid)
    assert await caller.code("restore", engine.pid, [[a, b], [b, a]]) == INVALID
    assert await caller.value("state", engine.pid) == CHECKPOINTED
    await caller.activate(engine.pid)


async def test_an_older_driver_has_no_checkpoint_api(machine: Stand):
    caller, engine = await machine.caller(KYB_STUB_CUDA_VERSION="12040"), await machine.user(gib=1)
    for call in ("state", "tid", *VERBS):
        assert "FunctionNotFoundError" in (await caller.do(call, engine.pid))[1]


async def test_a_restore_needs_cuinit_and_the_other_calls_do_not(machine: Stand):
    caller, engine = await machine.child(), await machine.user(gib=1)
    await caller.park(engine.pid)
    assert await caller.value("state", engine.pid) == CHECKPOINTED
    assert await caller.code("restore", engine.pid) == NOT_INITIALIZED
    assert await caller.code("init") == SUCCESS
    await caller.activate(engine.pid)


def test_what_is_reserved_must_be_zero(stubs):
    """In this process: arguments are looked at before any daemon is asked."""
    library = ctypes.CDLL(str(stubs / "libcuda.so.1"))
    for call in ("Lock", "Checkpoint", "Unlock"):
        dirty = (ctypes.c_ubyte * 64)()
        dirty[63] = 1
        assert library[f"cuCheckpointProcess{call}"](os.getpid(), dirty) == INVALID, call
    assert library.cuCheckpointProcessGetState(os.getpid(), None) == INVALID
    assert library.cuCheckpointProcessGetRestoreThreadId(os.getpid(), None) == INVALID


def test_an_older_driver_has_the_symbols_for_the_loader_and_they_answer(stubs, monkeypatch):
    monkeypatch.setenv("KYB_STUB_CUDA_VERSION", "12040")
    library = ctypes.CDLL(str(stubs / "libcuda.so.1"))
    for call in ("Lock", "Checkpoint", "Restore", "Unlock", "GetState", "GetRestoreThreadId"):
        assert library[f"cuCheckpointProcess{call}"](os.getpid(), (ctypes.c_ubyte * 64)()) == NOT_SUPPORTED, call


# ---- forks ----

FORKING = """
import ctypes, os, sys, time
lib = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
assert lib.cuInit(0) == 0 and lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert lib.cuCtxSetCurrent(context) == 0 and lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30)) == 0
down, up = os.pipe()
if os.fork() == 0:
    alloc = lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1))
    print(lib.cuInit(0), lib.cuCtxSynchronize(), alloc, flush=True)
    os.close(up)
    sys.stdin.read()
"""


async def test_a_forked_child_has_no_cuda_and_does_not_keep_its_parents_memory(machine: Stand, stubs):
    """Its parent's connections are not its own; the driver says NOT_INITIALIZED in a child, as NVIDIA's does."""
    pipe = asyncio.subprocess.PIPE
    env = os.environ | {"LD_LIBRARY_PATH": str(stubs), "KYB_FAKE_DRIVER": str(machine.socket)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKING, stdin=pipe, stdout=pipe, env=env)
    try:
        assert await asyncio.wait_for(parent.stdout.readline(), SECONDS) == b"3 3 3\n"
        await until_equal(machine.used_gib, [0, 0], what="GiB used on each GPU")
    finally:
        parent.stdin.close()
        await parent.stdout.read()
        await asyncio.wait_for(parent.wait(), SECONDS)
