"""Buckets over JetStream's key-value streams.

Watches are made here and not by nats-py: after ``kill -9`` and restart of the server its watchers were seen silent for
12 s. A watch is a chain of *runs*; each run has an ephemeral consumer of its own, delivers the whole bucket and then
the changes, and ends at the first sign of trouble (connection lost, gap in the consumer's sequence, no heartbeat).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.kv import KeyValue

from kybernate.bus.inbox import Inbox
from kybernate.bus.port import BusError, Entry, NoAnswerError, WrongRevisionError
from kybernate.logs import get_logger

if TYPE_CHECKING:
    from kybernate.bus.nats import NatsBus

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""A run without a message or heartbeat for so long is over."""
SETTLE_SECONDS = 2.0
"""How long a change may be under way to a watch before its absence is a bug."""
IDLE_SECONDS = 30.0
"""The server removes a consumer that nobody has listened to for so long."""
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 5.0


class _RunOverError(Exception):
    """This run cannot be trusted any more; the next one reads everything again."""


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
        found: dict[str, Entry] = {}
        try:
            async with self._run(prefix) as run:
                while not run.complete:
                    entry = await run.next()
                    if entry is None:
                        break
                    found[entry.key] = entry
        except _RunOverError as error:
            raise NoAnswerError(f"bucket {self._name}: read: {error}; read it again") from error
        return [entry for entry in found.values() if entry.value is not None]

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
    async def _run(self, prefix: str) -> AsyncIterator["_Run"]:
        """A consumer that delivers the last value of every key, then what changes."""
        link = self._bus.link
        run = _Run(self._root, prefix)
        subscription: Subscription | None = None
        deliver = link.client.new_inbox()
        consumer = ""
        link.when_lost.add(run.stop)
        try:
            async with self._bus.jetstream(f"bucket {self._name}: read") as js:
                subscription = await link.client.subscribe(deliver, cb=run.receive)
                info = await js.add_consumer(self._stream, self._consumer(prefix, deliver))
                consumer = info.name
                run.expect((info.num_pending or 0) + (info.delivered.consumer_seq if info.delivered else 0))
            if link.lost.is_set():
                run.stop()
            yield run
        finally:
            link.when_lost.discard(run.stop)
            if subscription is not None and link.alive:
                with contextlib.suppress(nats.errors.Error, TimeoutError):
                    await subscription.unsubscribe()
                    if consumer:
                        await _forget(js, self._stream, consumer)

    def _consumer(self, prefix: str, deliver: str) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_subject=deliver,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            filter_subject=self._root + (prefix + ">" if prefix.endswith(".") else ">"),
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


class _Run:
    """What one consumer delivers, checked for gaps and silence."""

    def __init__(self, root: str, prefix: str) -> None:
        self._root, self._prefix = root, prefix
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._sequence = 0
        self._expected = 0
        self.complete = False
        """Everything that was there at the start has been delivered."""

    async def receive(self, msg: Msg) -> None:
        self._arrived.put_nowait(msg)

    def stop(self) -> None:
        """End the run: whoever reads it gets an error."""
        self._arrived.put_nowait(None)

    def expect(self, count: int) -> None:
        """How many entries the snapshot has."""
        self._expected = count
        self.complete = count == 0

    async def next(self) -> Entry | None:
        """The next entry (deleted ones without a value), or None once when the snapshot turns out to be complete.

        Raises _RunOverError.
        """
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    msg = await self._arrived.get()
            except TimeoutError:
                raise _RunOverError(f"nothing heard for {SILENCE_SECONDS:g} s") from None
            if msg is None:
                raise _RunOverError("connection lost, or a difference was found")
            headers = msg.headers or {}
            if "Status" in headers and not msg.reply.startswith("$JS.ACK"):
                self._check_status(headers)
                continue
            entry = self._read(msg)
            if entry is not None:
                return entry
            if self.complete:
                return None

    def _check_status(self, headers: dict[str, str]) -> None:
        if headers["Status"] != "100":
            raise _RunOverError(f"consumer: {headers['Status']} {headers.get('Description', '')}")
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) > self._sequence:
            raise _RunOverError(f"message {self._sequence + 1} of the consumer never came")

    def _read(self, msg: Msg) -> Entry | None:
        """The entry in this message; None when its key is not asked for."""
        meta = msg.metadata
        if meta.sequence.consumer != self._sequence + 1:
            raise _RunOverError(f"message {self._sequence + 1} of the consumer never came")
        self._sequence = meta.sequence.consumer
        if meta.num_pending == 0 or self._sequence >= self._expected:
            self.complete = True
        key = msg.subject[len(self._root) :]
        if not key.startswith(self._prefix):
            return None
        headers = msg.headers or {}
        gone = headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        return Entry(key, None if gone else msg.data, meta.sequence.stream)


class _Watch:
    """Runs, one after the other, and what the reader knows from them."""

    def __init__(self, bucket: NatsBucket, prefix: str, inbox: Inbox[Entry | None]) -> None:
        self._bucket, self._prefix, self._inbox = bucket, prefix, inbox
        self._known: dict[str, int] = {}
        """Revision of each key that the reader believes to exist."""
        self._run: _Run | None = None

    async def follow(self) -> None:
        """Keep a run going until cancelled. A server that is there and refuses is asked less and less often."""
        wait, said = FIRST_RETRY_SECONDS, ""
        while True:
            await self._bucket._bus.until_connected()
            try:
                async with self._bucket._run(self._prefix) as run:
                    await self._read(run)
            except (BusError, _RunOverError) as error:
                wait, said = (FIRST_RETRY_SECONDS, "") if self._run else (min(wait * 2, LAST_RETRY_SECONDS), said)
                if str(error) != said:
                    said = str(error)
                    get_logger().info("watch.restarted", bucket=self._bucket._name, reason=said)
            finally:
                self._run = None
            await asyncio.sleep(wait)

    async def _read(self, run: _Run) -> None:
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
            with contextlib.suppress(BusError, _RunOverError):
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
