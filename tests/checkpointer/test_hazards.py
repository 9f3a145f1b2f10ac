"""H1 to H16 of docs/dev/checkpointer.md: what real drivers do, and how the checkpointer avoids or contains it.

Each against the fake driver or the stub ``libcuda.so.1`` in front of it, with real processes. What only hardware can
show has the same number in ``tests/gpu/test_hazards.py``.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kybernate import deadlines
from kybernate.messages import KillJob, SeatProgress
from services.checkpointer.core.failures import SPENT
from services.checkpointer.helper_pool import HelperCall
from tests.checkpointer.world import GIB, NODE, SPEED, Checkpointer, Engine, Kind, Node, checkpointer, node

NOTHING: frozenset[str] = frozenset()


@asynccontextmanager
async def stand(
    kind: Kind = "ctypes",
    *,
    allowed: frozenset[str] | None = None,
    machine: tuple[str, ...] = (),
    gpus: int = 2,
    **timeouts: float,
) -> AsyncIterator[tuple[Node, Checkpointer]]:
    """A node and its checkpointer. ``allowed``: hazards that are allowed; else what the fake machine allows."""
    async with node(kind, gpus=gpus, options=machine) as here, checkpointer(here, allowed=allowed, **timeouts) as it:
        yield here, it


async def park(it: Checkpointer, engine: Engine, group: str = "G0") -> SeatProgress:
    return (await it.do(park=(engine.target,), group=group)).park[0]


async def activate(it: Checkpointer, engine: Engine, gpus: tuple[str, ...] = ()) -> SeatProgress:
    target = engine.target.model_copy(update={"gpus": gpus or engine.target.gpus})
    return (await it.do(activate=target)).activate


def steps(it: Checkpointer) -> list[str]:
    """Journaled steps of the last job."""
    *_, last = it.journal.jobs.values()
    return [record.step for record in last.records if record.step]


async def kill(it: Checkpointer, engine: Engine) -> SeatProgress:
    it.epoch += 1
    assert (await it.ask(KillJob(cause="test", node=NODE, epoch=it.epoch, target=engine.target))).accepted
    return (await it.done(f"kill-{engine.target.seat}-{it.epoch}")).park[0]


async def runs_on(here: Node, it: Checkpointer, engine: Engine) -> None:
    """The seat runs as before."""
    assert await here.state(engine) == "RUNNING"
    assert await it.outcome(engine) == "active"


async def test_h1_a_restore_that_runs_out_of_memory_is_never_repeated_and_its_memory_is_proven_free() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00")
        assert (await park(it, engine)).outcome == "parked"
        await here.inject("oom")
        end = await activate(it, engine)
        assert (end.outcome in ("lost", "gone"), "OUT_OF_MEMORY" in end.reason) == (True, True), end
        assert steps(it)[:3] == ["thaw", "restore", SPENT], "no replay may believe its state, which is CHECKPOINTED"
        assert steps(it).count("restore") == 1
        assert await engine.process.wait() == -signal.SIGKILL
        assert set((await here.used()).values()) == {0}


async def test_h1_a_restore_without_room_is_not_attempted() -> None:
    async with stand(settle_floor_wall_seconds=0.3) as (here, it):
        engine = await here.engine("s00")
        await park(it, engine)
        await here.engine("stranger", gib=60)
        end = await activate(it, engine)
        assert (end.outcome, "bytes free" in end.reason) == ("parked", True), end
        assert "killed" not in end.reason, "no call is made about a frozen process"
        assert "restore" not in steps(it)
        assert here.frozen(engine)
        assert await it.outcome(engine) == "parked"


async def test_h1_a_restore_beside_other_processes_needs_a_margin_and_a_restore_on_a_free_gpu_none() -> None:
    async with node() as here, checkpointer(here, margin_bytes=GIB, settle_floor_wall_seconds=0.3) as it:
        whole = await here.engine("s00", gib=80)
        assert (await park(it, whole)).outcome == "parked"
        assert (await activate(it, whole)).outcome == "active"
        await whole.end()
        engine = await here.engine("s01", gib=40)
        await park(it, engine)
        await here.engine("stranger", gib=40)
        end = await activate(it, engine)
        assert (end.outcome, str(41 * GIB) in end.reason) == ("parked", True), end


async def test_h2_a_restored_process_is_locked_and_checkpointed_before_it_is_killed() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00")
        await park(it, engine)
        await activate(it, engine)
        await here.inject("wedge-on-kill")
        assert (await kill(it, engine)).outcome == "gone"
        assert steps(it) == ["lock", "checkpoint", "kill"]
        assert set((await here.used()).values()) == {0}
        assert (await here.violations())["count"] == 0


async def test_h3_a_process_that_a_lock_kills_leads_to_a_cold_start() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00", processes=2)
        await here.inject("segfault-on-lock")
        end = await park(it, engine)
        assert end.outcome in ("lost", "gone"), end
        assert await it.outcome(engine) == "gone"
        assert set((await here.used()).values()) == {0}


async def test_h4_a_parked_process_is_frozen_because_a_synchronize_would_crash_it() -> None:
    """Between thaw and restore it runs unprotected; the router must send it no request then."""
    async with stand(floor_wall_seconds=3.0, settle_floor_wall_seconds=3.0) as (here, it):
        engine = await here.engine("s00")
        await park(it, engine)
        assert here.frozen(engine)
        assert (await activate(it, engine)).outcome == "active"
        engine.process.stdin.write(b"synchronize\n")
        assert await asyncio.wait_for(engine.process.stdout.readline(), 30) == b"synchronized\n"
        await park(it, engine)
        os.kill(engine.pid, signal.SIGCONT)  # a foreign process thaws it
        engine.process.stdin.write(b"synchronize\n")
        assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGSEGV
        assert await it.outcome(engine) == "gone"


async def test_h5_no_driver_call_is_made_about_a_stopped_process() -> None:
    """A foreign process stops a seat: reading its state does no harm, and a park thaws it first."""
    async with stand(floor_wall_seconds=3.0) as (here, it):
        engine = await here.engine("s00")
        os.kill(engine.pid, signal.SIGSTOP)
        assert await it.outcome(engine) == "quarantined"
        os.kill(engine.pid, signal.SIGCONT)
        assert (await park(it, engine)).outcome == "parked"
        assert await it.outcome(engine) == "parked"
        assert (await activate(it, engine)).outcome == "active"
        assert "hung" not in steps(it)


async def test_h6_a_park_without_host_memory_for_the_copy_is_not_begun() -> None:
    async with stand(machine=("--host-memory", "43GiB")) as (here, it):
        engine = await here.engine("s00", gib=40)
        end = await park(it, engine)
        assert (end.outcome, steps(it)) == ("active", []), end
        assert "needs 44.0 GiB of host memory" in end.reason
        assert "43.0 GiB" in end.reason
        await runs_on(here, it, engine)
        assert (await here.violations())["count"] == 0


async def test_h6_two_simultaneous_parks_do_not_use_the_same_free_memory() -> None:
    """Room for one of two copies: one seat is parked, the other stays."""
    async with stand(machine=("--host-memory", "70GiB")) as (here, it):
        one, two = await here.engine("s00", gib=40), await here.engine("t00", gpus=(1,), gib=40)
        await here.inject("slow", factor=20)
        ops = [await it.begin(park=(one.target,)), await it.begin(park=(two.target,), group="G1")]
        ends = [(await it.done(op)).park[0] for op in ops]
        assert sorted(end.outcome for end in ends) == ["active", "parked"], ends
        assert (await here.violations())["count"] == 0


SEVERAL = frozenset({"several-processes"})
PAIR = {"gib": 20, "processes": 2}


@pytest.mark.parametrize(
    ("allowed", "engine", "reason"),
    [
        (None, {"processes": 2, "thread": "pt_nccl_watchdg"}, "NCCL"),
        (NOTHING, PAIR, "CUDA IPC"),
        (NOTHING, PAIR | {"environment": {"KYB_PARK_ALLOW": "several-processes"}}, "CUDA IPC"),
        (SEVERAL, PAIR | {"environment": {"KYB_PARK_ALLOW": "nccl"}}, "CUDA IPC"),
        (NOTHING, PAIR | {"attached": 1}, "2 processes with VRAM"),
        (None, {"environment": {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}}, "managed memory"),
        (None, {"environment": {"MANAGED": "1"}}, "mappings of /dev/nvidia-uvm"),
    ],
    ids=["h8-ranks", "h9-ipc", "pod-allows-more", "pod-allows-less", "b1-holders", "h10-configured", "b7-allocated"],
)
async def test_a_hazard_that_shows_before_the_park_leaves_the_seat_untouched(
    allowed: frozenset[str] | None, engine: dict[str, Any], reason: str
) -> None:
    """A pod cannot allow itself more than its node does, but less: its engine can write the environment that /proc
    shows of it."""
    async with stand(allowed=allowed) as (here, it):
        one = await here.engine("s00", **engine)
        end = await park(it, one)
        assert (end.outcome, reason in end.reason, steps(it)) == ("active", True, []), end
        assert (end.refused, end.failed) == (True, False), "what the seat is, is no failure of its way to park"
        await runs_on(here, it, one)


async def test_h8_h9_processes_are_parked_where_several_are_allowed_and_a_loaded_nccl_alone_means_nothing() -> None:
    async with stand(allowed=SEVERAL) as (here, it):
        library = here.folder / "libnccl.so.2"
        library.write_bytes(b"PyTorch always loads it")
        pair = await here.engine("s00", gib=20, processes=2, library=str(library))
        assert (await park(it, pair)).outcome == "parked"


async def test_h8_a_lock_that_hangs_on_another_rank_ends_at_its_deadline_and_is_undone() -> None:
    async with stand(lock_seconds=1.0, floor_wall_seconds=1.0) as (here, it):
        engine = await here.engine("s00", processes=2, marks={"communicator": "world"})
        end = await park(it, engine)
        assert (end.outcome, end.refused, end.failed) == ("active", False, True), end
        await runs_on(here, it, engine)


@pytest.mark.parametrize("mark", ["ipc", "managed"])
async def test_h9_and_h10_a_hazard_that_only_the_driver_detects_is_a_cold_start_with_its_result(mark: str) -> None:
    """States and unlock would look well, and the engine's contexts are dead."""
    async with stand() as (here, it):
        engine = await here.engine("s00", marks={mark: True})
        end = await park(it, engine)
        assert (end.outcome, "NOT_SUPPORTED" in end.reason) == ("lost", True), end
        assert "managed memory" in end.reason or "CUDA IPC" in end.reason
        assert await engine.process.wait() == -signal.SIGKILL
        assert await it.outcome(engine) == "gone"
        assert set((await here.used()).values()) == {0}


async def test_h11_a_mig_instance_is_not_parked() -> None:
    async with stand(machine=("--preset", "A100-mig-mixed")) as (here, it):
        instance = (await here.client.call("devices"))["instances"][0]["uuid"]
        here.gpus = (instance,)
        engine = await here.engine("s00", gib=4)
        end = await park(it, engine)
        assert (end.outcome, "MIG is not supported" in end.reason, steps(it)) == ("active", True, []), end
        await runs_on(here, it, engine)


async def test_h12_a_seat_of_two_processes_and_gpus_moves_where_its_container_has_the_others_and_back() -> None:
    async with stand(gpus=4) as (here, it):
        engine = await here.engine("2x.s00", gpus=(0, 1), processes=2, visible=(0, 1, 2, 3))
        home, other = here.gpus[:2], here.gpus[2:]
        assert (await park(it, engine)).gpus == home
        end = await activate(it, engine, other)
        assert (end.outcome, end.gpus) == ("active", other), end
        assert await here.used() == dict(zip(here.gpus, (0, 0, 20 * GIB, 20 * GIB), strict=True))
        engine.target = engine.target.model_copy(update={"gpus": other})
        assert (await park(it, engine)).gpus == other
        end = await activate(it, engine, home)
        assert (end.outcome, end.gpus) == ("active", home), end
        assert (await here.violations())["count"] == 0


@pytest.mark.parametrize("gpus", [(0,), (0, 1)])
async def test_h13_a_seat_whose_container_lacks_a_device_node_stays_parked_and_comes_back_at_home(
    gpus: tuple[int, ...],
) -> None:
    async with stand(gpus=2 * len(gpus)) as (here, it):
        engine = await here.engine("s00", gpus=gpus)
        await park(it, engine)
        end = await activate(it, engine, here.gpus[len(gpus) :])
        assert (end.outcome, "device node" in end.reason, end.move_refused) == ("parked", True, "seat"), end
        assert end.gpus == engine.target.gpus
        assert here.frozen(engine)
        assert (await activate(it, engine)).outcome == "active", "at home it comes back"


async def test_h14_a_seat_moves_with_a_map_of_all_gpus_and_is_reported_on_its_new_gpu() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00", visible=(0, 1))
        await park(it, engine)
        assert [seat.gpus for seat in await it.look(engine)] == [here.gpus[:1]]
        resident = await here.engine("s01", gib=70)
        end = await activate(it, engine, here.gpus[1:])
        assert (end.outcome, end.gpus) == ("active", here.gpus[1:]), end
        assert await here.used() == {here.gpus[0]: 70 * GIB, here.gpus[1]: 40 * GIB}
        (seat,) = await it.look(engine)
        assert (seat.outcome, seat.gpus) == ("active", here.gpus[1:])
        engine.target = engine.target.model_copy(update={"gpus": here.gpus[1:]})
        end = await park(it, engine)
        assert (end.outcome, end.gpus) == ("parked", here.gpus[1:]), end
        assert (await park(it, resident)).outcome == "parked"
        assert (await activate(it, engine, here.gpus[:1])).outcome == "active"
        assert await here.used() == {here.gpus[0]: 40 * GIB, here.gpus[1]: 0}
        assert (await here.violations())["count"] == 0


async def test_h14_an_old_driver_moves_nothing() -> None:
    async with node("ctypes") as here:
        here.cuda_version = "12080"
        async with checkpointer(here, floor_wall_seconds=1.0) as it:
            engine = await here.engine("s00", visible=(0, 1))
            await park(it, engine)
            end = await activate(it, engine, here.gpus[1:])
            assert (end.outcome, "needs driver 580" in end.reason) == ("parked", True), end
            assert "thaw" not in steps(it)
            assert (await activate(it, engine)).outcome == "active", "at home without a map"


async def test_h15_a_driver_that_reports_no_states_leads_to_quarantine_with_a_hint() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00")
        await here.inject("fail", verb="get_state", code=304, times=99)
        end = await park(it, engine)
        assert (end.outcome, "hostPID" in end.reason) == ("quarantined", True), end
        assert steps(it) == []


async def test_h16_a_restore_that_hangs_ends_at_its_deadline_and_delays_no_other_group() -> None:
    async with stand(base_seconds=10.0, seconds_per_gib=0.0, floor_wall_seconds=1.0) as (here, it):
        engine, other = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        await park(it, engine)
        await here.inject("hang", verb="restore", seat="s00", times=9)
        op = await it.begin(activate=engine.target)
        assert (await park(it, other, "G1")).outcome == "parked"
        end = (await it.done(op)).activate
        assert end.outcome == "quarantined", end
        assert "second hang of this seat" in end.reason
        assert "delete its pod" in end.reason


@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
async def test_h16_what_was_learned_ends_a_hang_that_nothing_else_would_end_for_an_hour(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "LEARNED_FLOOR_SECONDS", 4.0)
    async with stand(base_seconds=3600.0 * SPEED, floor_wall_seconds=1.0) as (here, it):
        engine = await here.engine("s00")
        if verb == "restore":
            await park(it, engine)
        await here.inject("hang", verb=verb, seat="s00", times=9)
        target = engine.target.model_copy(update={"usual_seconds": 0.01})
        op = await it.begin(**({"park": (target,)} if verb == "checkpoint" else {"activate": target}))
        status = await it.done(op)
        end = status.park[0] if verb == "checkpoint" else status.activate
        assert (end.outcome, "second hang of this seat" in end.reason) == ("quarantined", True), end


@pytest.mark.parametrize("memory", ["43GiB", "44GiB"])
async def test_h6_a_kill_copies_nothing_that_does_not_fit_into_host_memory(memory: str) -> None:
    """Without memory for the copy the kernel kills a process, possibly of another pod."""
    async with stand(machine=("--host-memory", memory)) as (here, it):
        engine = await here.engine("s00", gib=40)
        make, called = it.pool.calls, []

        async def recorded(key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
            called.extend(call.verb for call in calls)
            return await make(key, calls)

        it.pool.calls = recorded  # type: ignore[method-assign]
        assert (await kill(it, engine)).outcome == "gone"
        assert steps(it)[-1] == "kill"
        assert ("checkpoint" in called) == (memory == "44GiB"), called
        assert (await here.violations())["count"] == 0
