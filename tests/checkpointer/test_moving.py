"""Restoring a seat on other GPUs than it was parked on: what is reported, refused and fenced."""

from kybernate.messages import AskJobs
from tests.checkpointer.world import GIB, NODE, checkpointer, node, until


async def test_a_seat_parked_on_one_gpu_comes_back_on_another_and_everybody_is_told_where() -> None:
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


async def test_a_move_that_the_driver_refuses_is_reported_as_that_and_the_seat_comes_back_where_it_was() -> None:
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
        await until(lambda: it.reports, what="under way")
        assert (await it.ask(it.switch(activate=there, group="G1"))).code == "busy"
        assert (await it.done(op)).park[0].outcome == "parked"


async def test_a_question_fences_the_gpus_that_it_names_too() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],)})
        await it.ask(AskJobs(cause="test", node=NODE, epoch=70, gpus=(here.gpus[1],)))
        assert (await it.ask(it.switch(activate=there, epoch=69))).code == "stale-epoch"
        assert (await it.do(park=(engine.target,), epoch=69)).done
