"""Backend restart: a park ends the container and proves its memory free; nothing refuses it and nothing is kept."""

import signal

import pytest

from tests.checkpointer.test_hazards import NOTHING, park, stand, steps
from tests.checkpointer.world import GIB, Kind


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


async def test_a_seat_of_another_backend_is_activated_where_a_restart_made_room() -> None:
    async with stand() as (here, it):
        parked = await here.engine("s01", gib=60)
        assert (await park(it, parked)).outcome == "parked"
        engine = await here.engine("s00", gib=60, backend="restart")
        status = await it.do(park=(engine.target,), activate=parked.target)
        assert (status.park[0].outcome, status.activate and status.activate.outcome) == ("parked", "active")
        assert (await here.violations())["count"] == 0
