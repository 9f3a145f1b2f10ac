"""Restoring a seat on other GPUs than it was parked on: what is reported, refused and fenced."""

import os
import signal

import pytest

from services.checkpointer.backends.host import Inspection, NoDeviceError
from tests.checkpointer.test_hazards import activate, park, steps
from tests.checkpointer.world import GIB, checkpointer, node
from tests.until import until


async def test_a_seat_whose_container_lacks_the_device_node_of_a_gpu_is_not_moved_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await park(it, engine)
        monkeypatch.setattr(it.worker._backends["fake"].host, "device_nodes", True)  # type: ignore[attr-defined]

        def lacks(*_: object) -> None:
            raise NoDeviceError("/dev/nvidia1 is not in the container")

        monkeypatch.setattr(Inspection, "check_device", lacks)
        end = await activate(it, engine, here.gpus[1:])
        assert (end.outcome, end.move_refused) == ("parked", "seat"), end
        assert "/dev/nvidia1 is not in the container" in end.reason


async def test_a_seat_parked_under_wrong_gpus_is_restored_only_where_there_is_room() -> None:
    """The observed GPUs of its memory count, not those in the manager's job."""
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        first, second = here.gpus
        engine = await here.engine("s00", gpus=(1,))
        engine.target = engine.target.model_copy(update={"gpus": (first,)})
        end = await park(it, engine)
        assert (end.outcome, end.gpus) == ("parked", (second,))
        await here.engine("full", gib=60)
        end = await activate(it, engine)
        assert (end.outcome, end.gpus) == ("parked", (second,)), end
        assert f"{first} has" in end.reason
        end = await activate(it, engine, (second,))
        assert (end.outcome, end.gpus) == ("active", (second,)), end
        assert await here.used() == {first: 60 * GIB, second: 40 * GIB}
        assert (await here.violations())["count"] == 0


async def test_a_stopped_seat_with_memory_on_its_new_gpu_does_not_count_as_parked_on_the_old_one() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        async with checkpointer(here) as it:
            await park(it, engine)
            await here.inject("hang", verb="unlock")
            op = await it.begin(activate=there, group="G1")
            await until(lambda: "unlock" in steps(it), what="restored")
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: here.frozen(engine), what="it is stopped")
        async with checkpointer(here) as it:
            status = await it.done(op)
            assert (status.activate.outcome, status.activate.gpus) == ("active", there.gpus), status
            assert not here.frozen(engine)


async def test_a_seat_that_was_to_move_to_a_gpu_that_fell_off_the_bus_stays_parked_where_it_is() -> None:
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00")
        first, second = here.gpus
        await park(it, engine)
        await here.inject("lost", gpu=second)
        end = await activate(it, engine, (second,))
        assert (end.outcome, end.gpus) == ("parked", (first,)), end
        assert here.frozen(engine), "nothing was touched"
        assert end.move_refused == "", "it may move once that GPU is back"
        end = await activate(it, engine)
        assert (end.outcome, end.gpus) == ("active", (first,)), end
