"""What waits for a reader, and which subjects a subscription needs."""

import asyncio
from dataclasses import replace

from kybernate.bus.inbox import Inbox, merged, read
from kybernate.envelope import Message
from kybernate.messages import JobProgress, SeatActivated, SeatClosed, SeatEvent, TrafficSignal


async def test_a_slow_reader_loses_the_newest_and_put_returns_false() -> None:
    inbox: Inbox[int] = Inbox(limit=3)
    assert [inbox.put(n) for n in range(5)] == [True, True, True, False, False]
    inbox.close()
    assert [n async for n in inbox] == [0, 1, 2]
    assert [n async for n in inbox] == []


async def test_a_closed_inbox_takes_nothing_and_drops_nothing() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.close()
    assert inbox.put(1)
    assert [n async for n in inbox] == []


async def test_a_source_that_can_wait_waits_for_the_reader_and_no_longer_than_the_inbox_is_open() -> None:
    inbox: Inbox[int] = Inbox(limit=2)

    async def fill() -> None:
        for number in range(6):
            await inbox.put_when_free(number)

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0)
    assert [await anext(inbox) for _ in range(3)] == [0, 1, 2]
    await asyncio.sleep(0)
    assert not filling.done()
    inbox.close()
    await asyncio.wait_for(filling, 5)
    assert [n async for n in inbox] == [3, 4]


def test_patterns_of_one_family_become_one_subject() -> None:
    def subjects(*kinds: type[Message]) -> list[str]:
        return merged([kind.pattern() for kind in kinds])

    assert subjects(SeatActivated) == ["kyb.v1.evt.*.*.activated"]
    assert subjects(SeatActivated, SeatClosed) == ["kyb.v1.evt.*.*.*"]
    assert subjects(SeatEvent, TrafficSignal, JobProgress) == [
        "kyb.v1.evt.*.*.*",
        "kyb.v1.sig.*.*",
        "kyb.v1.rpt.*.progress",
    ]
    assert merged([SeatActivated.pattern(node="n1"), SeatClosed.pattern(node="n1")]) == ["kyb.v1.evt.n1.*.*"]


def test_a_message_whose_last_token_is_not_wanted_is_dropped_before_it_is_decoded() -> None:
    pattern = replace(TrafficSignal.pattern(), last=lambda token: token == "llama")
    signal = TrafficSignal(cause="c", source="r0", model="llama")
    assert read(signal.subject, signal.body(), [pattern]) == signal
    assert read("kyb.v1.sig.r0.qwen", b"not even JSON", [pattern]) is None
