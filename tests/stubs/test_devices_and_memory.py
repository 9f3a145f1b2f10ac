"""What an engine sees through the stub library: devices, memory, its own calls."""

import asyncio

from tests.fakes import daemons
from tests.stubs.stand import (
    GIB,
    INVALID,
    NO_DEVICE,
    NO_ROOM,
    NOT_INITIALIZED,
    RUNNING,
    SECONDS,
    SUCCESS,
    UNKNOWN,
    USUAL,
    Stand,
    own_stand,
)
from tests.until import until_equal


async def test_the_devices_are_those_of_the_machine(machine: Stand):
    child = await machine.caller()
    assert await child.value("count") == 2
    assert await child.value("version") == 13000
    gpus = (await machine.client.call("devices"))["gpus"]
    for ordinal, gpu in enumerate(gpus):
        name, identity, bus_id, size = await child.value("device", ordinal)
        assert (name, f"GPU-{identity}", bus_id) == (gpu["name"], gpu["uuid"], gpu["pci_bus_id"])
        assert size == gpu["memory_bytes"]


VISIBLE = [  # NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES, GPUs that are seen; $n is the UUID of GPU n
    (None, None, [0, 1]),
    ("all", None, [0, 1]),
    ("$1", None, [1]),
    ("$1,$0", None, [0, 1]),
    ("void", None, []),
    ("", None, []),
    (None, "1,0", [1, 0]),
    (None, "$1", [1]),
    (None, "0,7,1", [0]),
    (None, "1,1", []),
    (None, "", []),
    (None, "-1", []),
    ("$1", "0", [1]),
    ("$1", "1", []),
]


async def test_a_process_sees_what_container_runtime_and_user_leave_it(machine: Stand):
    def environment(container: str | None, user: str | None) -> dict[str, str]:
        given = {"NVIDIA_VISIBLE_DEVICES": container, "CUDA_VISIBLE_DEVICES": user}
        named = {name: value for name, value in given.items() if value is not None}
        return {
            name: value.replace("$0", machine.gpus[0]).replace("$1", machine.gpus[1]) for name, value in named.items()
        }

    for container, user, seen in VISIBLE:
        child = await machine.child(**environment(container, user))
        assert await child.code("init") == (SUCCESS if seen else NO_DEVICE), (container, user)
        count = await child.value("count") if seen else 0
        uuids = ["GPU-" + (await child.value("device", ordinal))[1] for ordinal in range(count)]
        assert uuids == [machine.gpus[index] for index in seen], (container, user)
        await child.quit()


async def test_a_process_with_cuinit_only_is_shown_with_0_bytes_on_all_its_gpus_and_cannot_be_locked(machine: Stand):
    """NVML lists whatever opened the device (llm-d #148): the checkpointer's own helpers too."""
    helper = await machine.caller()
    engine = await machine.child(KYB_GPU_SEAT="1x-a.s00")
    assert await engine.code("retain", 0) == NOT_INITIALIZED, "nothing works before cuInit"
    assert await engine.code("init") == SUCCESS
    listed = (await machine.client.call("processes"))["processes"]
    assert {(entry["pid"], entry["gpu"], entry["bytes"]) for entry in listed} == {
        (pid, gpu, 0) for pid in (helper.pid, engine.pid) for gpu in machine.gpus
    }
    assert await helper.do("tid", engine.pid) == (SUCCESS, engine.pid)
    assert await helper.value("state", engine.pid) == RUNNING
    assert await helper.code("lock", engine.pid) == NOT_INITIALIZED, "there is nothing to lock"
    assert await engine.code("retain", 0) == SUCCESS
    listed = (await machine.client.call("processes"))["processes"]
    (entry,) = (entry for entry in listed if entry["pid"] == engine.pid)
    assert entry == {"pid": engine.pid, "seat": "1x-a.s00", "gpu": machine.gpus[0], "bytes": 0}
    assert await helper.do("tid", engine.pid) == (SUCCESS, engine.pid)


async def test_a_context_made_by_hand_counts_as_well(machine: Stand):
    engine = await machine.caller()
    assert await engine.code("create", 1) == SUCCESS
    assert (await machine.client.call("processes"))["processes"] == [
        {"pid": engine.pid, "seat": f"process/{engine.pid}", "gpu": machine.gpus[1], "bytes": 0}
    ]


async def test_memory_is_counted_until_it_is_freed_or_the_process_ends(machine: Stand):
    engine = await machine.user(gib=0)
    address = await engine.value("alloc", 30 * GIB)
    assert await engine.value("info") == [50 * GIB, 80 * GIB]
    assert await engine.code("alloc", 51 * GIB) == NO_ROOM
    assert await engine.code("alloc", 0) == INVALID
    await engine.value("write", address + 5 * GIB, "weights")
    assert await engine.value("read", address + 5 * GIB, 7) == "weights"
    assert await engine.code("read", address + 30 * GIB - 3, 4) == INVALID, "beyond the end"
    assert await engine.code("free", address + 1) == INVALID, "not the beginning of an allocation"
    assert await machine.used_gib() == [30, 0]
    assert await engine.code("free", address) == SUCCESS
    assert await machine.used_gib() == [0, 0]
    await engine.value("alloc", 20 * GIB)
    engine.process.kill()
    await until_equal(machine.used_gib, [0, 0], what="GiB used on each GPU")


async def test_results_have_names(machine: Stand):
    child = await machine.child()
    assert await child.value("error", 401) == "CUDA_ERROR_ILLEGAL_STATE"
    assert await child.value("error", 600) == "CUDA_ERROR_NOT_READY"


async def test_without_a_daemon_there_is_no_device_and_one_that_went_away_is_an_unknown_error(stubs, tmp_path):
    async with own_stand(stubs, tmp_path) as machine:
        lonely = await machine.child(KYB_FAKE_DRIVER=str(tmp_path / "missing.sock"))
        assert await lonely.code("init") == NO_DEVICE
        caller, target = await machine.caller(), await machine.user(gib=1)
        await machine.inject("hang", verb="lock")
        hanging = caller.start("lock", target.pid)
        await machine.hangs(hanging, caller)
        machine.driver.terminate()
        assert (await asyncio.wait_for(hanging, SECONDS))["code"] == UNKNOWN, "a call that was under way ends"
        await machine.driver.wait()
        assert await caller.code("state", target.pid) == UNKNOWN
        async with daemons.driver(tmp_path / "driver.sock", *USUAL):
            assert await caller.code("state", target.pid) == NOT_INITIALIZED, "the new daemon knows no process"
            assert await target.code("alloc", GIB) == NOT_INITIALIZED
