import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kybernate.dev.demo.replay import client_session
from kybernate.dev.demo.watch import Watch
from kybernate.seat import SeatState as S
from tests.demo.router_fake import FakeRouter, event
from tests.until import until


@contextlib.asynccontextmanager
async def following(watch: Watch, router: FakeRouter) -> AsyncIterator[None]:
    ready = asyncio.Event()
    async with client_session() as session:
        task = asyncio.create_task(watch.follow(session, router.url, ready))
        await until(lambda: ready.is_set() and router.listeners, what="the watch follows the router's events")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_switches(watch: Watch, count: int) -> None:
    async with asyncio.timeout(5):
        while len(watch.switches) < count:
            await asyncio.sleep(0.01)


def test_a_switch_is_a_group_given_to_a_seat_by_an_activation_or_a_start() -> None:
    watch = Watch()
    watch.take(event("s0", S.ACTIVE, S.DRAINING))
    assert watch.switches == []
    watch.take(event("s1", S.ACTIVE, S.ACTIVATING, group="G0", model="m", seconds={"park": 0.1}))
    assert [(switch.group, switch.model, switch.seconds) for switch in watch.switches] == [("G0", "m", {"park": 0.1})]
    watch.take(event("s1", S.ACTIVE, S.STARTING, group="G0"))
    watch.take(event("s1", S.ACTIVE, S.STARTING, group="G1", way="restart"))
    assert [(switch.group, switch.moved) for switch in watch.switches[1:]] == [("G0", False), ("G1", True)]
    assert watch.cold_starts == 2


def test_the_same_event_twice_and_events_from_before_count_once_and_not_at_all() -> None:
    watch = Watch()
    one = event("s1", S.ACTIVE, S.ACTIVATING)
    watch.take(one)
    watch.take(one)
    watch.take(event("s2", S.ACTIVE, S.ACTIVATING, at=watch.began_at - 1))
    assert len(watch.switches) == 1


def test_a_moment_is_in_a_switch_from_the_drain_to_the_activation() -> None:
    watch = Watch(began_at=0)
    for at, seat, state in (
        (10, "a", S.DRAINING),
        (11, "a", S.PARKING),
        (12, "a", S.PARKED),
        (12.1, "b", S.ACTIVATING),
    ):
        watch.take(event(seat, state, at=at))
    moments = [9.9, 10, 11.5, 12.05, 12.2, 99]
    assert [watch.was_switching(at) for at in moments] == [False, True, True, False, True, False]
    watch.take(event("b", S.ACTIVE, S.ACTIVATING, at=13))
    assert not watch.was_switching(13.5)


def test_it_knows_how_long_each_step_of_a_switch_took() -> None:
    watch = Watch(began_at=0)
    watch.take(event("a", S.DRAINING, S.ACTIVE, at=10))
    for at, seat, state in ((11, "a", S.PARKING), (12, "b", S.DRAINING), (15, "a", S.PARKED)):
        watch.take(event(seat, state, at=at))
    assert watch.steps == [("a", S.DRAINING, S.PARKING, 1.0), ("a", S.PARKING, S.PARKED, 4.0)]


def test_seats_of_two_nodes_may_have_one_name() -> None:
    watch = Watch(began_at=0)
    for at, node, state in ((10, "a", S.DRAINING), (11, "b", S.ACTIVE)):
        watch.take(event("s0", state, at=at, node=node))
    assert watch.was_switching(12)


async def test_entering_a_state_is_awaited_and_being_in_it_is_not_enough() -> None:
    watch = Watch()
    watch.take(event("s0", S.PARKING))
    assert not await watch.entered(S.PARKING, 0.05)
    waiting = asyncio.create_task(watch.entered(S.PARKING, 5))
    await asyncio.sleep(0)
    watch.take(event("s1", S.PARKING))
    assert await waiting
    assert await watch.switch_under_way(0.05)
    watch.take(event("s0", S.PARKED))
    watch.take(event("s1", S.PARKED))
    assert not await watch.switch_under_way(0.05)


async def test_events_are_followed_and_after_a_break_from_the_last_one_on() -> None:
    async with FakeRouter().serving() as router:
        watch = Watch()
        async with following(watch, router):
            router.say(event("s0", S.ACTIVE, S.ACTIVATING))
            await until_switches(watch, 1)
            router.hang_up()
            router.say(event("s1", S.ACTIVE, S.ACTIVATING))
            await until_switches(watch, 2)
        assert router.last_ids[0] is None
        assert len(router.last_ids) >= 2
        assert router.last_ids[1] == router.stored[0].id


@pytest.mark.parametrize("data", ['{"specversion": "1.0", "data": {}}', '{"hello": 1}', "[]"])
async def test_what_is_no_seat_event_is_passed_over(data: str) -> None:
    from kybernate.dev.demo.watch import _seat_event

    assert _seat_event(data) is None
