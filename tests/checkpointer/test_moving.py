"""Restoring a seat on other GPUs than it was parked on: what is reported, refused and fenced."""

import os
import signal

import pytest

from kybernate.messages import AskJobs
from services.checkpointer.backends.host import Inspection, NoDeviceError
from tests.checkpointer.world import GIB, NODE, checkpointer, node
from tests.until import until


async def test_a_seat_parked_on_one_gpu_is_restored_on_another_and_reported_there() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        first, second = here.gpus
        there = engine.target.model_copy(update={"gpus": (second,)})
        parked = await it.do(park=(engine.target,), epoch=50)
        assert parked.park[0].gpus == (first,)
        assert [seat.gpus for seat in await it.look(engine)] == [(first,)]
        status = await it.do(activate=there, epoch=41, group="G1")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", (second,)), status
        assert await here.used() == {first: 0, second: 40 * GIB}
        (seat,) = await it.look(engine)
        assert (seat.outcome, seat.gpus) == ("active", (second,))
        status = await it.do(park=(there,), epoch=60, group="G1")
        assert (status.park[0].outcome, status.park[0].gpus) == ("parked", (second,))
        assert (await here.violations())["count"] == 0


async def test_a_pair_with_two_processes_moves_to_another_pair_and_back() -> None:
    async with node(gpus=4) as here, checkpointer(here) as it:
        engine = await here.engine("s00", gpus=(0, 1), processes=2)
        home, other = here.gpus[:2], here.gpus[2:]
        there = engine.target.model_copy(update={"gpus": other})
        assert (await it.do(park=(engine.target,))).park[0].gpus == home
        status = await it.do(activate=there, group="G23")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", other), status
        assert await here.used() == dict(zip(here.gpus, (0, 0, 20 * GIB, 20 * GIB), strict=True))
        assert (await it.do(park=(there,), group="G23")).park[0].gpus == other
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", home), status
        assert (await here.violations())["count"] == 0


async def test_a_seat_whose_container_lacks_the_device_node_of_a_gpu_is_not_moved_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        await it.do(park=(engine.target,))
        monkeypatch.setattr(it.worker._backends["fake"].host, "device_nodes", True)  # type: ignore[attr-defined]

        def lacks(*_: object) -> None:
            raise NoDeviceError("/dev/nvidia1 is not in the container")

        monkeypatch.setattr(Inspection, "check_device", lacks)
        status = await it.do(activate=there, group="G1")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.move_refused) == ("parked", "seat"), status
        assert "/dev/nvidia1 is not in the container" in status.activate.reason


async def test_a_move_that_the_driver_refuses_is_reported_and_the_seat_returns_to_its_old_gpu() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        await it.do(park=(engine.target,))
        await here.inject("fail", pid=engine.pid, verb="restore", code=801)
        status = await it.do(activate=there, group="G1")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.move_refused) == ("parked", "seat"), status
        assert status.activate.gpus == (here.gpus[0],)
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", (here.gpus[0],)), status
        assert (await here.violations())["count"] == 0


async def test_a_seat_in_an_unfinished_half_is_in_no_other_job_also_on_other_gpus() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        await here.inject("slow", factor=20.0)
        op = await it.begin(park=(engine.target,))
        await until(lambda: len(it.journal.jobs[op].records) > 1, what="under way: its first step is journaled")
        assert (await it.ask(it.switch(activate=there, group="G1"))).code == "busy"
        assert (await it.done(op)).park[0].outcome == "parked"


async def test_ask_jobs_fences_the_gpus_that_it_names() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        await it.ask(AskJobs(cause="test", node=NODE, epoch=70, gpus=(here.gpus[1],)))
        assert (await it.ask(it.switch(activate=there, epoch=69))).code == "stale-epoch"
        assert (await it.do(park=(engine.target,), epoch=69)).done


async def test_a_seat_parked_under_wrong_gpus_is_restored_only_where_there_is_room() -> None:
    """The observed GPUs of its memory count, not those in the manager's job."""
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        first, second = here.gpus
        engine = await here.engine("s00", gpus=(1,))
        wrong = engine.target.model_copy(update={"gpus": (first,)})
        status = await it.do(park=(wrong,))
        assert (status.park[0].outcome, status.park[0].gpus) == ("parked", (second,))
        await here.engine("full", gib=60)
        status = await it.do(activate=wrong)
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("parked", (second,)), status
        assert f"{first} has" in status.activate.reason
        status = await it.do(activate=engine.target, group="G1")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", (second,)), status
        assert await here.used() == {first: 60 * GIB, second: 40 * GIB}
        assert (await here.violations())["count"] == 0


async def test_a_stopped_seat_with_memory_on_its_new_gpu_does_not_count_as_parked_on_the_old_one() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        async with checkpointer(here) as it:
            await it.do(park=(engine.target,))
            await here.inject("hang", verb="unlock")
            op = await it.begin(activate=there, group="G1")
            await until(lambda: "unlock" in [record.step for record in it.journal.jobs[op].records], what="restored")
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: here.frozen(engine), what="it is stopped")
        async with checkpointer(here) as it:
            status = await it.done(op)
            assert status.activate is not None
            assert (status.activate.outcome, status.activate.gpus) == ("active", there.gpus), status
            assert not here.frozen(engine)


async def test_a_seat_that_was_to_move_to_a_gpu_that_fell_off_the_bus_stays_parked_where_it_is() -> None:
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00")
        first, second = here.gpus
        await it.do(park=(engine.target,))
        await here.inject("lost", gpu=second)
        status = await it.do(activate=engine.target.model_copy(update={"gpus": (second,)}), group="G1")
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("parked", (first,)), status
        assert here.frozen(engine), "nothing was touched"
        assert status.activate.move_refused == "", "it may move once that GPU is back"
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.gpus) == ("active", (first,)), status
