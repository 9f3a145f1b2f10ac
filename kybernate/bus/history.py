"""Stored events: read from the stream, oldest first."""

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from kybernate.bus.inbox import read
from kybernate.bus.layout import EVENTS
from kybernate.envelope import Message, Pattern

if TYPE_CHECKING:
    from kybernate.bus.nats import NatsBus

BATCH = 500
FETCH_SECONDS = 5.0

_EVERYTHING = (Pattern("kyb.v1.evt.*.*.*", Message),)


async def stored_events(bus: "NatsBus", after_id: str | None) -> AsyncIterator[Message]:
    """What ``Bus.replay`` gives. JetStream cannot look up an id, so the headers are read through once to find it."""
    start = 1
    if after_id is not None:
        async for msg in _stored(bus, start, headers_only=True):
            if (msg.headers or {}).get("Nats-Msg-Id") == after_id:
                start = msg.metadata.sequence.stream + 1
                break
    async for msg in _stored(bus, start, headers_only=False):
        message = read(msg.subject, msg.data, _EVERYTHING)
        if message is not None:
            yield message


async def _stored(bus: "NatsBus", start: int, *, headers_only: bool) -> AsyncIterator[Msg]:
    async with bus.jetstream("stored events") as js:
        info = await js.stream_info(EVENTS)
    last = info.state.last_seq
    if info.state.messages == 0 or start > last:
        return
    async with bus.jetstream("stored events") as js:
        subscription = await js.pull_subscribe(
            "",
            stream=EVENTS,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=start,
                ack_policy=AckPolicy.NONE,
                headers_only=headers_only,
                inactive_threshold=30.0,
                mem_storage=True,
                num_replicas=1,
            ),
        )
    try:
        at = start
        while at <= last:
            async with bus.jetstream("stored events", FETCH_SECONDS + 1):
                try:
                    batch = await subscription.fetch(BATCH, timeout=FETCH_SECONDS)
                except nats.errors.TimeoutError:
                    return  # the rest was removed meanwhile
            for msg in batch:
                meta = msg.metadata
                at = meta.sequence.stream + 1
                yield msg
                if meta.num_pending == 0:
                    return
    finally:
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()
