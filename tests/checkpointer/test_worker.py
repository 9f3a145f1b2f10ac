"""The worker with the real fake driver, real processes and a bus in memory."""

from tests.checkpointer.world import GIB, checkpointer, node


async def test_a_switch_parks_one_seat_and_activates_the_other() -> None:
    async with node() as here, checkpointer(here) as it:
        first = await here.engine("s00")
        parked = await it.do(park=(first.target,))
        assert parked.park[0].outcome == "parked", parked
        assert parked.park[0].vram_bytes == 40 * GIB
        assert here.frozen(first)
        assert (await here.used())[here.gpus[0]] == 0
        second = await here.engine("s01", gib=60)
        status = await it.do(park=(second.target,), activate=first.target)
        assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active"), status
        assert await here.state(first) == "RUNNING"
        assert [await it.outcome(engine) for engine in (first, second)] == ["active", "parked"]
        assert (await here.violations())["count"] == 0
