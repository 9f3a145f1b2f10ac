"""History of a seat's container: hangs and refusals over several jobs, reset by a new container."""

import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kybernate.messages import SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.helper_pool import HelperCall
from services.checkpointer.records import QUARANTINE_SECONDS, REMEMBERED_SECONDS, History, JobFile, Record
from tests.checkpointer.test_hazards import activate, park
from tests.checkpointer.world import checkpointer, node
from tests.until import until

TARGET = SeatTarget(seat="s00", pod_uid="u", container_id="process://1", gpus=("GPU-a",))
NEXT = TARGET.model_copy(update={"container_id": "process://2"})


def job(target: SeatTarget = TARGET) -> JobFile:
    switch = SwitchJob(cause="test", node="n", epoch=1, op="op", group="G0", park=(target,))
    return JobFile([Record(kind="switch", switch=switch)])


def hung(at: float) -> Record:
    return Record(kind="step", half="park", seat="s00", step="hung", detail="lock", at=at)


def refused() -> Record:
    return Record(kind="step", half="activate", seat="s00", step="refused", detail="restore")


def ended() -> Record:
    progress = SeatProgress(seat="s00", pod_uid="u", container_id="c", outcome="active")
    return Record(kind="end", half="park", seat="s00", progress=progress)


def test_hangs_are_counted_for_a_day_and_two_of_them_stop_driver_calls_for_ten_minutes() -> None:
    past = History()
    past.add(job(), hung(1000.0))
    assert past.hangs("s00", "process://1", 1001.0) == 1
    assert past.left_alone("s00", "process://1", 1001.0) is None
    past.add(job(), hung(2000.0))
    assert "hung 2 times" in (past.left_alone("s00", "process://1", 2001.0) or "")
    assert past.left_alone("s00", "process://1", 2001.0 + QUARANTINE_SECONDS) is None, "then the driver is asked again"
    assert past.hangs("s00", "process://1", 1001.0 + REMEMBERED_SECONDS) == 1


def test_a_new_container_has_no_hangs_and_no_refused_restores() -> None:
    past = History()
    past.add(job(), hung(1000.0))
    past.add(job(), ended())
    past.add(job(), refused())
    assert past.refusals("s00", "process://1") == 1
    assert (past.hangs("s00", "process://2", 1001.0), past.refusals("s00", "process://2")) == (0, 0)
    past.add(job(NEXT), ended())
    assert past.hangs("s00", "process://1", 1001.0) == 0


async def test_the_second_hang_of_a_seat_is_quarantine_in_a_later_job_and_after_a_restart_too() -> None:
    async with node("ctypes") as here:
        engine, other = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        async with checkpointer(here, floor_wall_seconds=1.0) as it:
            await here.inject("hang", verb="lock", seat="s00")
            assert (await park(it, engine)).outcome == "active"
            assert (await park(it, engine)).outcome == "parked"
            assert (await activate(it, engine)).outcome == "active"
            assert await it.outcome(engine) == "active"
        async with checkpointer(here, floor_wall_seconds=1.0) as it:
            await here.inject("hang", verb="lock", seat="s00")
            op = await it.begin(park=(engine.target,))
            assert (await park(it, other, "G1")).outcome == "parked", "others go on meanwhile"
            end = (await it.done(op)).park[0]
            assert end.outcome == "quarantined", end
            assert "second hang" in end.reason
            assert "delete its pod" in end.reason
            (look,) = await it.look(engine)
            assert (look.outcome, "hung 2 times" in look.reason) == ("quarantined", True), look
        async with checkpointer(here) as it:
            assert await it.outcome(engine) == "quarantined", "a restart forgets nothing"
            await engine.end()
            assert await it.outcome(engine) == "gone"


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore", "unlock"])
async def test_a_driver_that_stalls_once_is_no_hang_of_a_seat_and_the_job_goes_on_when_it_answers(verb: str) -> None:
    async with node("ctypes") as here, checkpointer(here, floor_wall_seconds=0.5, base_seconds=5.0) as it:
        engine = await here.engine("s00", gib=1)
        if parked := verb in ("restore", "unlock"):
            await park(it, engine)
        calls = it.pool.calls

        async def stalled(key: str, asked: Sequence[HelperCall]) -> list[dict[str, Any]]:
            if asked[0].verb == verb and not it.pool.hangs:
                await until(lambda: it.pool._spares, what="a helper is there for the call after this one")
                here.driver.send_signal(signal.SIGSTOP)
            return await calls(key, asked)

        it.pool.calls = stalled  # type: ignore[method-assign]
        op = await it.begin(**({"activate": engine.target} if parked else {"park": (engine.target,)}))
        try:
            await until(lambda: it.pool.hangs >= 2, what="a call after the first one has hung, too")
        finally:
            here.driver.send_signal(signal.SIGCONT)
        status = await it.done(op)
        end = status.activate or status.park[0]
        assert end.outcome == ("active" if parked else "parked"), end
        assert "the driver stalls" in end.reason
        assert it.journal.history.hangs("s00", engine.target.container_id, time.time()) == 0


async def test_an_unlock_that_hangs_ends_at_its_deadline() -> None:
    async with node("ctypes") as here, checkpointer(here, floor_wall_seconds=0.8) as it:
        engine = await here.engine("s00", gib=1)
        await park(it, engine)
        await here.inject("hang", verb="unlock", seat="s00")
        end = await activate(it, engine)
        assert end.outcome in ("active", "quarantined"), end
        assert "helper was killed" in end.reason
