"""Buckets over JetStream's key-value streams.

Watches are made here and not by nats-py: after ``kill -9`` and restart of the server its watchers were seen silent for
12 s, and its ``keys`` reads a full bucket as empty when the server's count overtakes the entries. A watch is a chain of
*runs* (``nats_run``); each has an ephemeral consumer of its own, delivers the whole bucket and then the changes, and
ends at the first sign of trouble (connection lost, gap in the consumer's sequence, no heartbeat).

What "whole" means is asked of the stream before the consumer is made, and not taken from the consumer's count of what
is pending: a replica that lags, or a count of 0 at the wrong moment, would make a full bucket look empty.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from kybernate.bus.inbox import Inbox
from kybernate.bus.nats_run import IncompleteError, Run, RunOverError
from kybernate.bus.port import BusError, Entry, NoAnswerError, WrongRevisionError
from kybernate.logs import OnceLogger, get_logger

if TYPE_CHECKING:
    from kybernate.bus.nats import NatsBus

HEARTBEAT_SECONDS = 2.0
SETTLE_SECONDS = 2.0
"""How long a change may be under way to a watch before its absence is a bug."""
IDLE_SECONDS = 30.0
"""The server removes a consumer that nobody has listened to for so long."""
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0
READS = 3
"""How often a bucket is read when keys that it has do not come."""


class NatsBucket:
    """A ``Bucket`` of a NatsBus."""

    def __init__(self, bus: "NatsBus", name: str) -> None:
        self._bus, self._name = bus, name
        self._stream = f"KV_{name}"
        self._root = f"$KV.{name}."

    async def put(self, key: str, value: bytes) -> int:
        """Write, whatever was there."""
        async with self._store(f"put {key}") as store:
            return await store.put(key, value)

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        """Compare and set; 0: the key must not exist."""
        async with self._store(f"update {key}") as store:
            try:
                if revision == 0:
                    return await store.create(key, value)
                return await store.update(key, value, last=revision)
            except nats.js.errors.KeyWrongLastSequenceError as error:
                raise WrongRevisionError(f"{self._name}: {key} is not at revision {revision}") from error

    async def get(self, key: str) -> Entry | None:
        """The present entry, or None."""
        async with self._store(f"get {key}") as store:
            try:
                found = await store.get(key)
            except nats.js.errors.KeyNotFoundError:
                return None
            return Entry(key, found.value or b"", found.revision or 0)

    async def delete(self, key: str) -> None:
        """Remove the key."""
        async with self._store(f"delete {key}") as store:
            await store.delete(key)

    async def entries(self, prefix: str = "") -> list[Entry]:
        """All present entries whose key begins with ``prefix``."""
        for tries_left in reversed(range(READS)):
            try:
                return await self._read(prefix)
            except IncompleteError as error:
                if not tries_left:
                    raise self._unread(error) from error
            except RunOverError as error:
                raise self._unread(error) from error
        raise AssertionError("the last try returns or raises")

    async def _read(self, prefix: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        async with self._run(prefix) as run:
            while not run.complete:
                entry = await run.next()
                if entry is None:
                    break
                found[entry.key] = entry
        return [entry for entry in found.values() if entry.value is not None]

    def _unread(self, error: RunOverError) -> NoAnswerError:
        return NoAnswerError(f"bucket {self._name}: read: {error}; read it again")

    @asynccontextmanager
    async def watch(self, prefix: str = "") -> AsyncIterator[AsyncIterator[Entry | None]]:
        """All present entries, one None, then every change; again after each loss of the connection."""
        inbox: Inbox[Entry | None] = Inbox()
        watch = _Watch(self, prefix, inbox)
        tasks = [asyncio.create_task(watch.follow()), asyncio.create_task(watch.compare(self._bus.compare_seconds))]
        try:
            yield inbox
        finally:
            inbox.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def _store(self, what: str) -> AsyncIterator[KeyValue]:
        async with self._bus.jetstream(f"bucket {self._name}: {what}") as js:
            yield KeyValue(self._name, self._stream, self._root, js, direct=True)

    @asynccontextmanager
    async def _run(self, prefix: str) -> AsyncIterator[Run]:
        """A consumer that delivers the last value of every key, then what changes."""
        link = self._bus.link
        run = Run(self._root, prefix)
        subscription: Subscription | None = None
        deliver = link.client.new_inbox()
        consumer = ""
        link.when_lost.add(run.stop)
        try:
            async with self._bus.jetstream(f"bucket {self._name}: read") as js:
                there = await js.stream_info(self._stream, subjects_filter=self._filter(prefix))
                subscription = await link.client.subscribe(deliver, cb=run.receive)
                info = await js.add_consumer(self._stream, self._consumer(prefix, deliver))
                consumer = info.name
                pending = (info.num_pending or 0) + (info.delivered.consumer_seq if info.delivered else 0)
                run.expect(there.state.subjects or (), pending)
            if link.lost.is_set():
                run.stop()
            yield run
        except IncompleteError as error:
            self._bus.trouble.came_short(self._name, str(error))
            raise
        finally:
            link.when_lost.discard(run.stop)
            if subscription is not None and link.alive:
                with contextlib.suppress(nats.errors.Error, TimeoutError):
                    await subscription.unsubscribe()
                    if consumer:
                        await _forget(js, self._stream, consumer)

    def _filter(self, prefix: str) -> str:
        return self._root + (prefix + ">" if prefix.endswith(".") else ">")

    def _consumer(self, prefix: str, deliver: str) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_subject=deliver,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            filter_subject=self._filter(prefix),
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            idle_heartbeat=HEARTBEAT_SECONDS,
            inactive_threshold=IDLE_SECONDS,
            mem_storage=True,
            num_replicas=1,
        )


async def _forget(js: JetStreamContext, stream: str, consumer: str) -> None:
    """Remove the consumer now; otherwise the server does so after IDLE_SECONDS."""
    async with asyncio.timeout(1.0):
        await js.delete_consumer(stream, consumer)


class _Watch:
    """Runs, one after the other, and what the reader knows from them."""

    def __init__(self, bucket: NatsBucket, prefix: str, inbox: Inbox[Entry | None]) -> None:
        self._bucket, self._prefix, self._inbox = bucket, prefix, inbox
        self._known: dict[str, int] = {}
        """Revision of each key that the reader believes to exist."""
        self._run: Run | None = None

    async def follow(self) -> None:
        """Keep a run going until cancelled. A server that is there and refuses is asked less and less often."""
        wait = FIRST_RETRY_SECONDS
        restarted = OnceLogger("watch.restarted", level="info")
        while True:
            await self._bucket._bus.until_connected()
            try:
                async with self._bucket._run(self._prefix) as run:
                    await self._read(run)
            except (BusError, RunOverError) as error:
                if self._run:
                    wait = FIRST_RETRY_SECONDS
                    restarted.clear()
                else:
                    wait = min(wait * 2, LAST_RETRY_SECONDS)
                restarted.log(bucket=self._bucket._name, reason=str(error))
            finally:
                self._run = None
            await asyncio.sleep(wait)

    async def _read(self, run: Run) -> None:
        present: set[str] = set()
        while not run.complete:
            entry = await run.next()
            if entry is None:
                break
            if entry.value is not None:
                present.add(entry.key)
            self._tell(entry, only_known=True)
        for key in self._known.keys() - present:
            self._tell(Entry(key, None, 0))
        self._inbox.put(None)
        self._run = run
        while True:
            entry = await run.next()
            if entry is not None:
                self._tell(entry)

    def _tell(self, entry: Entry, *, only_known: bool = False) -> None:
        if entry.value is None:
            if self._known.pop(entry.key, None) is None and only_known:
                return
        else:
            self._known[entry.key] = entry.revision
        self._inbox.put(entry)

    async def compare(self, every: float) -> None:
        """Insurance: read the bucket beside the watch. A lasting difference is a bug; it is logged and healed."""
        while True:
            await asyncio.sleep(every)
            run = self._run
            if run is None:
                continue
            with contextlib.suppress(BusError, RunOverError):
                before = self._differences(await self._bucket.entries(self._prefix))
                if not before:
                    continue
                await asyncio.sleep(SETTLE_SECONDS)
                lasting = before & self._differences(await self._bucket.entries(self._prefix))
                if lasting and run is self._run:
                    get_logger().error("watch.differs", bucket=self._bucket._name, keys=sorted(k for k, _ in lasting))
                    run.stop()

    def _differences(self, entries: list[Entry]) -> set[tuple[str, int]]:
        """Keys that the watch should know at this revision and does not, or knows and should not (revision 0)."""
        actual = {entry.key: entry.revision for entry in entries}
        missed = {(key, revision) for key, revision in actual.items() if self._known.get(key, 0) < revision}
        return missed | {(key, 0) for key in self._known.keys() - actual.keys()}
