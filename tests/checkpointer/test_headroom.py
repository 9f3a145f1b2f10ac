"""Host memory for the copy: the host and every limit above the container, reserved once."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kybernate.cgroups import Cgroup, Cgroups
from kybernate.node.host_memory import HostMemory
from services.checkpointer.backends.host import Inspection, NoDeviceError
from services.checkpointer.backends.reservations import GpuReservations, Headroom
from services.checkpointer.containers import Containers
from services.checkpointer.core.failures import StepFailedError
from services.checkpointer.processes import ProcessIdentity
from tests.checkpointer.machine import CONTAINER, SLICE, Machine, machine, target

GIB = 2**30
SCOPE = f"{SLICE}/cri-containerd-{CONTAINER}.scope"


@dataclass
class Host:
    """Host memory with this much free."""

    free: int

    async def free_bytes(self) -> int:
        return self.free


def cgroup(m: Machine) -> Cgroup:
    m.process(50, SCOPE)
    return m.find().cgroup


LIMITS: dict[str, tuple[dict[str, dict[str, int | None]], str]] = {
    "pod": ({SCOPE: {"limit": 60, "used": 20}}, "needs 44.0 GiB .* has 40.0 GiB free; raise the pod's memory limit"),
    "pod-with-room": ({SCOPE: {"limit": 64, "used": 20}}, ""),
    "clean-cache-is-free": ({SCOPE: {"limit": 64, "used": 50, "cache": 30}}, ""),
    "dirty-cache-is-not": ({SCOPE: {"limit": 64, "used": 50, "cache": 30, "dirty": 10}}, "has 34.0 GiB free"),
    "above-the-pod": (
        {SCOPE: {"limit": None, "used": 1}, "/kubepods.slice": {"limit": 100, "used": 90}},
        "/kubepods.slice has 10.0 GiB free",
    ),
}


@pytest.mark.parametrize("case", LIMITS)
async def test_h6_every_limit_of_a_container_must_have_room_for_the_copy(m: Machine, case: str) -> None:
    mine = cgroup(m)
    groups, why = LIMITS[case]
    for path, gib in groups.items():
        m.memory(path, **{name: size and size * GIB for name, size in gib.items()})  # type: ignore[arg-type]
    with pytest.raises(StepFailedError, match=why) if why else contextlib.nullcontext():
        await Headroom(Host(500 * GIB), m.containers.cgroups).reserve("s00", mine, 40 * GIB, 1.0)


def test_a_container_takes_its_anonymous_and_shared_memory_and_no_page_cache(m: Machine) -> None:
    """Pinned buffers of engines are shared memory."""
    mine = cgroup(m)
    assert m.containers.cgroups.memory_bytes(mine) is None, "nothing is accounted there"
    m.memory(SCOPE, limit=None, used=80 * GIB, cache=12 * GIB, shared=60 * GIB)
    assert m.containers.cgroups.memory_bytes(mine) == 68 * GIB


async def test_h6_the_hosts_memory_counts_too(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1048576 kB\n")
    assert await HostMemory(tmp_path).free_bytes() == GIB
    with pytest.raises(StepFailedError, match=r"the host has 1.0 GiB free"):
        await Headroom(HostMemory(tmp_path), None).reserve("s00", None, 40 * GIB, 1.0)
    with pytest.raises(StepFailedError, match="nowhere/meminfo has no MemAvailable"):
        await Headroom(HostMemory(tmp_path / "nowhere"), None).reserve("s00", None, 40 * GIB, 1.0)


async def test_h6_memory_reserved_by_another_park_is_not_free() -> None:
    host = Host(100 * GIB)
    headroom = Headroom(host, None)
    await headroom.reserve("a", None, 50 * GIB, 1.0)
    with pytest.raises(StepFailedError, match="other parks"):
        await headroom.reserve("b", None, 50 * GIB, 0.0)
    headroom.release("a")
    await headroom.reserve("b", None, 50 * GIB, 0.0)


async def test_h6_a_park_waits_for_another_that_is_copying() -> None:
    host = Host(100 * GIB)
    headroom = Headroom(host, None)
    await headroom.reserve("a", None, 50 * GIB, 1.0)
    waiting = asyncio.create_task(headroom.reserve("b", None, 45 * GIB, 30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    host.free -= 30 * GIB  # a copies
    headroom.copied("a", 50 * GIB)
    await waiting
    late = asyncio.create_task(headroom.reserve("c", None, 45 * GIB, 30.0))
    host.free -= 45 * GIB
    with pytest.raises(StepFailedError, match=r"has 25.0 GiB free"):
        await late


def test_h13_the_destinations_device_node_must_be_in_the_container(tmp_path: Path) -> None:
    m = machine(tmp_path, 2)
    m.process(50, SCOPE)
    who, look = ProcessIdentity(pid=50, start=100), Inspection(m.proc)
    with pytest.raises(NoDeviceError, match="is the driver loaded"):
        look.check_device(who, "GPU-b")
    card = m.proc / "driver" / "nvidia" / "gpus" / "0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-b\nDevice Minor: \t 3\n")
    dev = m.proc / "50" / "root" / "dev"
    dev.mkdir(parents=True)
    with pytest.raises(NoDeviceError, match="/dev/nvidia3 of GPU-b is not in the container"):
        look.check_device(who, "GPU-b")
    (dev / "nvidia3").write_text("a file is no device")
    with pytest.raises(NoDeviceError):
        look.check_device(who, "GPU-b")
    (dev / "nvidia3").unlink()
    (dev / "nvidia3").symlink_to("/dev/null")
    look.check_device(who, "GPU-b")


def test_facts_about_a_process_from_proc(tmp_path: Path) -> None:
    m = machine(tmp_path, 2)
    m.process(50, SCOPE)
    one, who, look = m.proc / "50", ProcessIdentity(pid=50, start=100), Inspection(m.proc)
    (one / "environ").write_bytes(b"A=1\0KYB_PARK_ALLOW=nccl, several-gpus\0broken\0")
    (one / "maps").write_text(
        "7f00-7f01 r-xp 0 00:00 1 /usr/lib/libnccl.so.2.27\n" + "7f02-7f03 rw-s 0 00:05 9 /dev/nvidia-uvm\n" * 2
    )
    (one / "task" / "50" / "comm").write_text("cuda0123456789a\n")
    seen = look.process(who)
    assert (seen.uvm_mappings, seen.communicates, look.uses_cuda(who)) == (2, False, True)
    assert look.allowed(who, frozenset({"nccl", "managed-memory"})) == {"nccl"}, "never more than the node's"
    (one / "environ").write_bytes(b"A=1\0")
    assert look.allowed(who, frozenset({"nccl", "managed-memory"})) == {"nccl", "managed-memory"}
    (one / "task" / "50" / "comm").write_text("pt_nccl_watchdg\n")
    assert look.process(who).communicates
    assert not look.uses_cuda(who)
    gone = look.process(ProcessIdentity(pid=51, start=1))
    assert (gone.uvm_mappings, gone.threads, gone.environment) == (0, frozenset(), {})


async def test_h6_a_limit_that_is_not_mounted_is_unknown_and_not_absent(m: Machine) -> None:
    m.process(50, SCOPE)
    containers = Containers(Cgroups(m.folder / "nothing", m.proc))
    found = containers.find(target())
    headroom = Headroom(Host(500 * GIB), containers.cgroups)
    with pytest.raises(StepFailedError, match="mount the host's /sys/fs/cgroup"):
        await headroom.reserve("s00", found.cgroup, 40 * GIB, 1.0)


async def test_h6_memory_high_is_a_limit_for_the_copy(tmp_path: Path) -> None:
    m = machine(tmp_path, 2)
    mine = cgroup(m)
    m.memory(SCOPE, limit=100 * GIB, used=20 * GIB)
    (m.folders(SCOPE)[0] / "memory.high").write_text(f"{60 * GIB}\n")
    headroom = Headroom(Host(500 * GIB), m.containers.cgroups)
    with pytest.raises(StepFailedError, match=r"has 40.0 GiB free"):
        await headroom.reserve("s00", mine, 40 * GIB, 1.0)
    (m.folders(SCOPE)[0] / "memory.high").write_text("max\n")
    await headroom.reserve("s00", mine, 40 * GIB, 1.0)


async def test_gpus_are_reserved_as_a_whole_for_one_owner_until_it_releases_them() -> None:
    gpus = GpuReservations()
    await gpus.take("s00", ("GPU-a",), 1.0)
    await gpus.take("s01", ("GPU-b", "GPU-c"), 1.0)
    assert not gpus.holds("s00", ("GPU-a", "GPU-b"))
    with pytest.raises(StepFailedError, match="s01 restores there"):
        await gpus.take("s00", ("GPU-a", "GPU-b"), 0.0)

    gpus.release("s00")

    assert gpus.holds("s01", ("GPU-b", "GPU-c"))
    assert not gpus.holds("s00", ("GPU-a",))


async def test_a_release_that_frees_one_of_two_that_wait_ends_no_other_wait() -> None:
    gpus = GpuReservations()
    await gpus.take("x", ("GPU-a",), 1.0)
    await gpus.take("y", ("GPU-b",), 1.0)
    both = asyncio.create_task(gpus.take("s00", ("GPU-a", "GPU-b"), 60.0))
    one = asyncio.create_task(gpus.take("s01", ("GPU-a",), 60.0))
    await asyncio.sleep(0)
    gpus.release("x")
    await one
    gpus.release("y")
    gpus.release("s01")
    await both


async def test_gpus_that_are_free_again_before_the_checkpointer_looks_at_the_clock_are_reserved() -> None:
    """It stood still: the release and the end of the time are seen at once."""
    gpus, loop = GpuReservations(), asyncio.get_running_loop()
    await gpus.take("s00", ("GPU-a",), 1.0)
    loop.call_later(0.01, gpus.release, "s00")
    loop.call_soon(time.sleep, 0.3)
    await gpus.take("s01", ("GPU-a",), 0.1)
    assert gpus.holds("s01", ("GPU-a",))
