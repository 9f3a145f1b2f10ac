"""A bucket is believed empty, or complete, only when everything came that its stream has. Faults are injected."""

import asyncio
import dataclasses
from typing import Any
from unittest.mock import AsyncMock

import pytest
import structlog
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.client import JetStreamContext

from kybernate.bus import nats_bucket
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_bucket import NatsBucket, Run, RunOverError
from kybernate.bus.port import Bucket, NoAnswerError
from kybernate.messages import SeatActivated
from kybernate.seat import SeatState
from tests.bus.worlds import snapshot, within

KEYS = ["n1.s0", "n1.s1", "n1.s2"]


@pytest.fixture(autouse=True)
def _heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bucket, "HEARTBEAT_SECONDS", 0.2)


async def filled(bus: NatsBus) -> Bucket:
    bucket = await bus.bucket("kyb_seats")
    for key in (*KEYS, "n1.gone"):
        await bucket.put(key, b"1")
    await bucket.delete("n1.gone")
    return bucket


async def watched(bucket: Bucket) -> list[str]:
    async with bucket.watch() as entries:
        return sorted(entry.key for entry in await snapshot(entries))


def deaf(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first consumers see nothing of what is there: 0 pending, 0 delivered, and heartbeats."""
    made = NatsBucket._consumer
    left = iter(range(times))

    def consumer(self: NatsBucket, node: str, deliver: str) -> ConsumerConfig:
        config = made(self, node, deliver)
        return config if next(left, None) is None else config.evolve(deliver_policy=DeliverPolicy.NEW)

    monkeypatch.setattr(NatsBucket, "_consumer", consumer)


@pytest.mark.parametrize("node", ["", "n1"])
async def test_a_consumer_that_delivers_nothing_is_not_an_empty_bucket(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    bucket = await filled(bus)
    deaf(monkeypatch, 2)
    with structlog.testing.capture_logs() as logs:
        entries = await within(bucket.entries(node), 30)
    assert sorted(entry.key for entry in entries) == KEYS
    assert bus.troubles["incomplete"] == 2
    reasons = [line["reason"] for line in logs if line["event"] == "bucket.incomplete"]
    assert reasons[0] == "4 keys of the stream are missing, among them n1.gone, n1.s0, n1.s1"


async def test_a_bucket_that_cannot_be_read_whole_is_not_read(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = await filled(bus)
    deaf(monkeypatch, 100)
    with pytest.raises(NoAnswerError, match=r"keys of the stream are missing.*read it again"):
        await within(bucket.entries(), 30)
    assert bus.troubles["incomplete"] == nats_bucket.READS


async def test_a_watch_says_that_its_snapshot_is_whole_only_when_it_is(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = await filled(bus)
    deaf(monkeypatch, 1)
    assert await watched(bucket) == KEYS
    assert bus.troubles["incomplete"] == 1


@pytest.mark.parametrize("pending", [0, 1, 99])
async def test_a_wrong_count_of_what_is_pending_does_no_harm(
    bus: NatsBus, monkeypatch: pytest.MonkeyPatch, pending: int
) -> None:
    made = JetStreamContext.add_consumer

    async def add_consumer(self: JetStreamContext, *args: Any, **more: Any) -> ConsumerInfo:
        return dataclasses.replace(await made(self, *args, **more), num_pending=pending)

    monkeypatch.setattr(JetStreamContext, "add_consumer", add_consumer)
    bucket = await filled(bus)
    assert sorted(entry.key for entry in await within(bucket.entries(), 30)) == KEYS
    assert await watched(bucket) == KEYS
    assert bus.troubles["incomplete"] == 0


async def test_what_arrives_faster_than_it_is_read_waits_within_a_limit_and_the_run_still_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_bucket, "AT_ONCE", 2)
    run = Run("$KV.kyb_seats.", AsyncMock())
    for _ in range(2):
        await within(run.receive(Msg(None)))  # type: ignore[arg-type]
    waiting = asyncio.create_task(run.receive(Msg(None)))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert not waiting.done()
    run.stop()
    with pytest.raises(RunOverError, match="connection lost"):
        await within(run.next())
    waiting.cancel()


async def test_a_replay_after_an_id_leaves_no_subscription_behind(bus: NatsBus) -> None:
    sent = [
        SeatActivated(cause="c", node="n", seat="s", state=SeatState.ACTIVE, epoch=number, model="m")
        for number in range(3)
    ]
    for event in sent:
        await bus.publish(event)
    await bus.flush()
    assert [message async for message in bus.replay()] == sent  # the client keeps one subscription for answers
    before = len(bus.link.client._subs)

    assert [message async for message in bus.replay(after_id=sent[0].id)] == sent[1:]

    assert len(bus.link.client._subs) == before
