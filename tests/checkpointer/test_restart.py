"""Backend restart: a park ends the container and proves its memory free; nothing refuses it and nothing is kept."""

import asyncio
import os
import signal
from typing import Any

import pytest

from kybernate.messages import KillJob
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record
from tests.checkpointer.test_hazards import NOTHING, park, stand, steps
from tests.checkpointer.world import GIB, NODE, Kind, checkpointer, node


@pytest.mark.parametrize("kind", ["ctypes", "fake"])
async def test_a_park_ends_the_container_and_frees_all_its_memory(kind: Kind) -> None:
    async with stand(kind, allowed=NOTHING) as (here, it):
        engine = await here.engine("s00", gib=40, processes=2, backend="restart")
        assert await it.outcome(engine) == "active"
        end = await park(it, engine)
        assert (end.outcome, end.vram_bytes, end.host_bytes, end.reason) == ("parked", 40 * GIB, 0, "")
        assert steps(it) == ["kill"], "neither locked nor copied"
        assert await engine.process.wait() == -signal.SIGKILL
        assert set((await here.used()).values()) == {0}
        assert it.journal.parked == {}, "no process is left to be remembered"
        assert await it.outcome(engine) == "gone"
        assert (await here.violations())["count"] == 0


@pytest.mark.parametrize(
    "engine",
    [
        {"marks": {"managed": True}},
        {"environment": {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}},
        {"processes": 3, "thread": "pt_nccl_watchdg"},
    ],
    ids=["managed-memory", "unified-memory", "ranks"],
)
async def test_what_the_driver_cannot_checkpoint_is_parked_by_a_restart(engine: dict[str, object]) -> None:
    async with stand(allowed=NOTHING) as (here, it):
        running = await here.engine("s00", backend="restart", **engine)  # type: ignore[arg-type]
        assert (await park(it, running)).outcome == "parked"
        assert set((await here.used()).values()) == {0}


async def test_a_mig_instance_is_parked_by_a_restart() -> None:
    async with stand(machine=("--preset", "A100-mig-mixed")) as (here, it):
        here.gpus = ((await here.client.call("devices"))["instances"][0]["uuid"],)
        engine = await here.engine("s00", gib=4, backend="restart")
        assert (await park(it, engine)).outcome == "parked"


async def test_an_engine_that_ended_by_itself_is_gone_and_not_parked() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00", backend="restart")
        os.kill(engine.pid, signal.SIGKILL)
        await engine.process.wait()
        assert (await park(it, engine)).outcome == "gone"


async def test_a_seat_of_another_backend_is_activated_where_a_restart_made_room() -> None:
    async with stand() as (here, it):
        parked = await here.engine("s01", gib=60)
        assert (await park(it, parked)).outcome == "parked"
        engine = await here.engine("s00", gib=60, backend="restart")
        status = await it.do(park=(engine.target,), activate=parked.target)
        assert (status.park[0].outcome, status.activate and status.activate.outcome) == ("parked", "active")
        assert (await here.violations())["count"] == 0


async def test_a_kill_ends_a_seat_of_backend_restart_too() -> None:
    async with stand() as (here, it):
        engine = await here.engine("s00", backend="restart")
        it.epoch += 1
        assert (await it.ask(KillJob(cause="test", node=NODE, epoch=it.epoch, target=engine.target))).accepted
        assert (await it.done(f"kill-s00-{it.epoch}")).park[0].outcome == "gone"
        assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGKILL


@pytest.mark.parametrize("killed", [False, True])
async def test_a_crash_at_the_kill_ends_in_the_same_park(monkeypatch: pytest.MonkeyPatch, killed: bool) -> None:
    async with node("ctypes") as here:
        async with checkpointer(here, base_seconds=1500.0) as it:
            engine = await here.engine("s00", backend="restart")
            stopped, write = asyncio.Event(), Journal._record

            async def stop(self: Journal, job: JobFile, record: Record, **rest: Any) -> None:
                if record.kind == "end" if killed else record.step == "kill":
                    stopped.set()
                    await asyncio.Event().wait()
                await write(self, job, record, **rest)

            monkeypatch.setattr(Journal, "_record", stop)
            op = await it.begin(park=(engine.target,))
            await asyncio.wait_for(stopped.wait(), 30)
            monkeypatch.undo()
        assert (engine.process.returncode is not None) == killed
        async with checkpointer(here, base_seconds=1500.0) as it:
            assert (await it.done(op)).park[0].outcome == "parked"
            assert await engine.process.wait() == -signal.SIGKILL
            assert set((await here.used()).values()) == {0}
