"""Seats that rest are looked at: one that has memory again holds its GPUs, or is ended beside others."""

from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.machine import GpuProcess
from kybernate.messages import KillJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core import resting
from services.gpu_manager.core.inputs import ForeignProcessesSeen, WallTime
from tests.manager.test_foreign import ID, Processes, proc, watching
from tests.manager.world import GIB, World


def held(world: World, seat: str, size: int, *, since: float = 0.5) -> ForeignProcessesSeen:
    """``since``: seconds after it entered its state."""
    managed = world.managed(seat)
    container = managed.durable.container_id
    return ForeignProcessesSeen((), held={container: {"GPU-0": size}}, since=WallTime(managed.entered_wall + since))


def beside(world: World, backend: str = "unload") -> tuple[str, str]:
    """A parked seat and the active one of its group."""
    parked, active = world.fill("a", "b", backend="unload" if backend == "vllm" else backend)
    for seat in (parked, active):
        world.annotate(seat, backend=backend)  # of vLLM without its rehearsal
    if backend == "restart":
        world.end_processes(parked)
    return parked, active


@pytest.mark.parametrize("backend", ["unload", "vllm", "cuda", "restart"])
def test_a_parked_seat_that_has_memory_beside_another_is_ended_and_holds_until_then(world: World, backend: str) -> None:
    """One request past the router loads 30 GiB; or ``kubectl exec`` of a CUDA program where kyb-run is alone."""
    parked, active = beside(world, backend)
    world.receive(held(world, parked, 30 * GIB))
    seat = world.managed(parked)
    assert (world.state(parked), seat.lease, world.state(active)) == (S.LOST, True, S.ACTIVE)
    assert "30.0 GiB of GPU memory are in use in its container while it rests" in seat.reason
    assert "called past the router, or something computes in its container" in seat.reason
    assert [job.target.seat for job in world.effects if isinstance(job, KillJob)] == [parked]
    assert (world.node.woke[parked].times, world.node.violations) == (1, 0), "the other one serves on"
    reason = seat.reason
    world.end_processes(parked)
    assert not world.managed(parked).lease
    assert world.state(parked) is S.WAITING
    woke = world.why()[parked]["woke"]
    assert (woke["times"], woke["reason"]) == (1, reason)
    assert woke["at"] == pytest.approx(world.now.unix, abs=60)
    assert world.why()[active]["woke"] is None
    world.node.woke[parked] = replace(world.node.woke[parked], model="its earlier owner")
    assert world.why()[parked]["woke"] is None


@pytest.mark.parametrize("backend", ["unload", "vllm", "cuda"])
def test_a_parked_seat_that_has_memory_on_free_gpus_is_active_and_leaves_like_any_other(
    world: World, backend: str
) -> None:
    parked, active = beside(world, backend)
    world.exit(active)
    assert not world.managed(active).lease
    world.receive(held(world, parked, 30 * GIB))
    assert (world.state(parked), world.managed(parked).lease) == (S.ACTIVE, True)
    assert world.why()[parked]["woke"]["reason"] == world.managed(parked).reason
    assert not [job for job in world.effects if isinstance(job, KillJob)]


@pytest.mark.parametrize(
    ("size", "since", "state"),
    [
        (resting.TOLERANCE_BYTES, 0.5, S.PARKED),
        (resting.TOLERANCE_BYTES + 1, 0.5, S.LOST),
        (30 * GIB, 0.0, S.PARKED),
        (30 * GIB, -1.0, S.PARKED),
    ],
    ids=["tolerance", "above", "begun with its park", "begun before its park"],
)
def test_only_more_than_it_may_keep_counts_and_only_since_it_rests(
    world: World, size: int, since: float, state: S
) -> None:
    parked, _ = beside(world)
    world.managed(parked).durable.residue_bytes = 0
    world.receive(held(world, parked, size, since=since))
    assert world.state(parked) is state


def test_what_a_sleeping_engine_keeps_is_its_own(world: World) -> None:
    parked, _ = beside(world, "vllm")
    seat = world.managed(parked)
    seat.durable.residue_bytes, seat.durable.measured = 4 * GIB, True
    world.receive(held(world, parked, 4 * GIB + resting.TOLERANCE_BYTES))
    assert world.state(parked) is S.PARKED
    seat.durable.measured = False
    world.receive(held(world, parked, 4 * GIB + resting.TOLERANCE_BYTES))
    assert world.state(parked) is S.PARKED, "as much as a park may leave"
    world.receive(held(world, parked, 20 * GIB))
    assert world.state(parked) is S.LOST


@pytest.mark.parametrize("declared", ["60GiB", ""])
def test_an_engine_whose_park_was_not_measured_keeps_what_a_park_may_leave(world: World, declared: str) -> None:
    """As it declares its size, or of all memory of its GPU."""
    parked, _ = beside(world, "vllm")
    world.annotate(parked, vram=declared)
    seat = world.managed(parked)
    seat.durable.vram_bytes, seat.durable.measured = 0, False
    world.receive(held(world, parked, 6 * GIB))
    assert world.state(parked) is S.PARKED
    world.receive(held(world, parked, 20 * GIB))
    assert world.state(parked) is S.LOST


async def test_what_was_in_use_in_both_of_two_reads_is_held_since_the_first_began(tmp_path: Path) -> None:
    container = f"containerd://{ID}"
    proc(tmp_path, 10, cgroup=f"0::/k8s.io/{ID}")
    gpus = Processes(GpuProcess(10, "GPU-0", 30), GpuProcess(10, "GPU-1", 5))
    watch = watching(gpus, tmp_path)

    async def read(began: float, resting: tuple[str, ...] = (container,)) -> tuple[object, float]:
        seen = await watch.read([container], resting=resting, began=WallTime(began))
        return (None, 0.0) if seen is None else (seen.held, float(seen.since))

    assert await read(1.0) == ({}, 0.0)
    gpus.found = (GpuProcess(10, "GPU-0", 40),)
    assert await read(3.0) == ({container: {"GPU-0": 30}}, 1.0)
    assert await read(5.0, ()) == ({}, 3.0), "it does not rest"
    gpus.found = None
    assert await read(7.0) == (None, 0.0)
    gpus.found = (GpuProcess(10, "GPU-0", 40),)
    assert (await read(9.0))[0] == {}, "two reads in a row"
    gpus.found = ()
    assert (await read(11.0))[0] == {}
