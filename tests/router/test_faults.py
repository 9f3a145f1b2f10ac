"""Models whose engines answer with errors although they run: what a router reports of them."""

import asyncio

from kybernate.messages import EngineFaults, Presence
from kybernate.seat import SeatState
from services.router.core.step import Forward
from services.router.request_log import FORGET_SECONDS, LAST, CallRecord, Faults
from tests.router.world import world


def test_a_model_is_reported_from_its_third_error_until_its_last_twenty_answers_are_good() -> None:
    faults = Faults()
    faults.answered("other", 200, 0.0)
    for at in (1.0, 2.0):
        faults.answered("m", 500, at)
        assert faults.report(at) == ()
    faults.answered("m", 404, 2.5)
    faults.answered("m", 503, 3.0)
    found = EngineFaults(model="m", failed=3, of=4, first=1.0, last=3.0)
    assert faults.report(3.0) == (found,)
    for _ in range(LAST - 4):
        faults.answered("m", 200, 4.0)
    assert faults.report(4.0) == (found.model_copy(update={"of": LAST}),)
    faults.answered("m", 200, 5.0)
    assert faults.report(5.0) == ()
    for _ in range(LAST):
        faults.answered("m", 200, 5.0)
    faults.answered("m", 500, 6.0)
    faults.answered("m", 500, 7.0)
    faults.answered("m", 500, 8.0)
    assert [(one.first, one.of) for one in faults.report(8.0)] == [(6.0, 3)], "it begins anew"
    assert faults.report(8.0 + FORGET_SECONDS) == (), "no request comes any more"


async def test_the_errors_of_an_engine_are_in_the_routers_presence_and_its_own_refusals_are_not() -> None:
    async with world(hold_seconds=0.1) as w:
        engine = await w.seat("s0", "llama", SeatState.ACTIVE)
        await w.seat("s1", "held")
        w.manager.auto = False
        engine.status = 500
        answers = await asyncio.gather(*(w.ask(model) for model in ("llama", "held") * 3))
        assert sorted(answer.status for answer in answers) == [500, 500, 500, 503, 503, 503]
        [found] = w.router._presence().faults
        assert (found.model, found.failed, found.of) == ("llama", 3, 3)
        own = Presence.pattern(component="router")
        async with w.bus.subscribe(own) as messages, asyncio.timeout(30):
            async for message in messages:
                if isinstance(message, Presence) and message.faults:
                    break
        engine.status = 200
        for _ in range(LAST):
            assert (await w.ask("llama")).status == 200
        assert w.router._presence().faults == ()


async def test_only_answers_of_an_engine_and_those_that_it_owes_count() -> None:
    at_engine = Forward(1, "n.s0", "s0", "http://e", 1, 0.0)
    owed = {"": 502, "upstream_failed": 503, "engine_timeout": 504}
    async with world() as w:
        log = w.router.requests
        for reason, status in (*owed.items(), ("seat_evicted", 503), ("internal_error", 500), ("", 499)):
            log.ended(CallRecord(0.0, "c", "m", at_engine, waits=False, reason=reason), status, known=True)
        log.ended(CallRecord(0.0, "c", "m", at_engine, waits=True, reason="hold_timeout"), 503, known=True)
        log.ended(CallRecord(0.0, "c", "other", at_engine, waits=False), 500, known=False)
        assert [(one.model, one.failed, one.of) for one in w.router._presence().faults] == [("m", 3, 3)]
