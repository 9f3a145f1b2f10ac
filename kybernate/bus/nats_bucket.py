"""Buckets over JetStream's key-value streams.

Watches are not nats-py's: after ``kill -9`` and a restart of the server its watchers were silent for 12 s, and its
``keys`` reads a full bucket as empty when the server's count overtakes the entries. A watch here is a chain of *runs*;
each has its own ephemeral consumer, delivers the whole bucket and then the changes, and ends at the first error
(connection lost, gap in the consumer's sequence, no heartbeat).

The keys that the snapshot must have (nats-server names up to 100,000) are read from the stream before the consumer is
made, and not derived from the consumer's count of pending messages: a lagging replica, or a count of 0 at the wrong
moment, would make a full bucket look empty.

The server sends a bucket only as fast as its reader takes it (JetStream's flow control). Without it everything is sent
at once, and the server closes a connection on which 64 MiB wait (``max_pending``), after which all is sent again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.kv import KeyValue

from kybernate.backoff import Backoff
from kybernate.bus.inbox import Inbox
from kybernate.bus.nats_connection import NatsConnection
from kybernate.bus.nats_link import LEADER_SECONDS
from kybernate.bus.port import BusError, Entry, NoAnswerError
from kybernate.logs import OnceLogger, get_logger

HEARTBEAT_SECONDS = 2.0
COMPARE_SECONDS, SETTLE_SECONDS = 60.0, 2.0
"""How often a watch is compared with its bucket; how long a change may take to reach it before its absence is a bug."""
IDLE_SECONDS = 30.0
"""The server removes a consumer without a subscriber after this time."""
RETRY_SECONDS = 0.5, 5.0
READS = 3
"""How often a bucket is read when the reads miss keys."""
SILENCE_SECONDS = 5.0
"""A run without a message or heartbeat for this long is over."""
AT_ONCE = 128
"""Entries that are taken in one step of the event loop, and that wait for the reader; further ones wait in nats-py and,
beyond some MiB, on the server."""
FLOW_CONTROL = "FlowControl Request"
"""The description by which nats-server marks such a message."""
SHOWN = 3
"""Number of missing keys that an error names."""


class RunOverError(Exception):
    """This run is not reliable any more; the next one reads everything again."""


class IncompleteError(RunOverError):
    """The consumer has delivered everything, and keys that the stream had before are missing."""


class Run:
    """The messages of one consumer: the snapshot, then changes; checked for gaps, silence and missing keys.

    ``go_on(subject)`` answers the server's flow control: what was sent before has been read.
    """

    def __init__(self, root: str, go_on: Callable[[str], Awaitable[None]]) -> None:
        self._root, self._go_on = root, go_on
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue(AT_ONCE)
        self._stopped = False
        self._sequence = 0
        self._missing: set[str] = set()
        """Subjects that the stream had before the run, and that were not delivered yet."""
        self._pending = 0
        self.complete = False
        """Everything that was there at the start has been delivered."""

    async def receive(self, msg: Msg) -> None:
        """Take a message of the consumer. While AT_ONCE of them wait for the reader, further ones stay in nats-py;
        what it drops beyond its own limits leaves a gap in the sequence, which ends the run."""
        await self._arrived.put(msg)

    def stop(self) -> None:
        """End the run: its reader gets RunOverError."""
        self._stopped = True
        with contextlib.suppress(asyncio.QueueFull):  # then the reader is not waiting
            self._arrived.put_nowait(None)

    def expect(self, subjects: set[str], pending: int) -> None:
        """Set what the snapshot has: at least these subjects, and ``pending`` entries by the server's count."""
        self._missing = subjects
        self._pending = pending
        self.complete = not self._missing and pending == 0

    async def next(self) -> Entry | None:
        """Return the next entry (a deleted one without a value), or None once when the snapshot is found complete.

        Raises RunOverError, IncompleteError.
        """
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    msg = await self._arrived.get()
            except TimeoutError:
                raise RunOverError(f"no message for {SILENCE_SECONDS:g} s") from None
            if msg is None or self._stopped:
                raise RunOverError("connection lost, or a difference was found")
            headers = msg.headers or {}
            if "Status" in headers and not msg.reply.startswith("$JS.ACK"):
                if headers.get("Description") == FLOW_CONTROL:
                    await self._go_on(msg.reply)
                elif stalled := headers.get("Nats-Consumer-Stalled"):  # it waits for an answer
                    await self._go_on(stalled)
                elif self._idle(headers):
                    return None
                continue
            return self._read(msg)

    def _idle(self, headers: dict[str, str]) -> bool:
        """Check a heartbeat, sent when the consumer is idle; True if it completes the snapshot."""
        if headers["Status"] != "100":
            raise RunOverError(f"consumer: {headers['Status']} {headers.get('Description', '')}")
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) > self._sequence:
            raise RunOverError(f"message {self._sequence + 1} of the consumer is missing")
        if self.complete:
            return False
        if self._missing:
            some = ", ".join(sorted(subject.removeprefix(self._root) for subject in self._missing)[:SHOWN])
            raise IncompleteError(f"{len(self._missing)} keys of the stream are missing, among them {some}")
        self.complete = True
        return True

    def _read(self, msg: Msg) -> Entry:
        meta = msg.metadata
        if meta.sequence.consumer != self._sequence + 1:
            raise RunOverError(f"message {self._sequence + 1} of the consumer is missing")
        self._sequence = meta.sequence.consumer
        self._missing.discard(msg.subject)
        if not self._missing and (meta.num_pending == 0 or self._sequence >= self._pending):
            self.complete = True
        headers = msg.headers or {}
        gone = headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers
        return Entry(msg.subject[len(self._root) :], None if gone else msg.data, meta.sequence.stream)


class NatsBucket:
    """A ``Bucket`` of a NatsBus."""

    def __init__(self, bus: NatsConnection, name: str) -> None:
        self._bus, self._name = bus, name
        self._stream = f"KV_{name}"
        self._root = f"$KV.{name}."

    async def put(self, key: str, value: bytes) -> int:
        """Write unconditionally."""
        async with self._store(f"put {key}") as store:
            return await store.put(key, value)

    async def delete(self, key: str) -> None:
        """Remove the key."""
        async with self._store(f"delete {key}") as store:
            await store.delete(key)

    async def entries(self, node: str = "") -> list[Entry]:
        """All present entries, or those whose key begins with this token."""
        for tries_left in reversed(range(READS)):
            try:
                return await self._read(node)
            except RunOverError as error:
                if not (tries_left and isinstance(error, IncompleteError)):
                    raise NoAnswerError(f"bucket {self._name}: read: {error}; read it again") from error
        raise AssertionError("the last try returns or raises")

    async def keys(self, node: str = "") -> Set[str]:
        """By the subjects of the stream."""
        async with self._bus.jetstream(f"bucket {self._name}: keys") as js:
            info = await js.stream_info(self._stream, subjects_filter=self._filter(node))
        return {subject[len(self._root) :] for subject in info.state.subjects or ()}

    async def last_revision(self) -> int:
        """The revision of the last change."""
        async with self._bus.jetstream(f"bucket {self._name}: last revision") as js:
            return int((await js.stream_info(self._stream)).state.last_seq)

    async def _read(self, node: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        async with self._run(node) as run:
            while not run.complete:
                entry = await run.next()
                if entry is None:
                    break
                found[entry.key] = entry
        return [entry for entry in found.values() if entry.value is not None]

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[Entry | None]]:
        """All present entries, one None, then every change; again after each loss of the connection."""
        inbox: Inbox[Entry | None] = Inbox(AT_ONCE)
        watch = _Watch(self, inbox)
        tasks = [asyncio.create_task(watch.follow()), asyncio.create_task(watch.compare())]
        try:
            yield inbox
        finally:
            inbox.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def _store(self, what: str) -> AsyncIterator[KeyValue]:
        async with self._bus.jetstream(f"bucket {self._name}: {what}", LEADER_SECONDS) as js:
            yield KeyValue(self._name, self._stream, self._root, js, direct=True)

    @asynccontextmanager
    async def _run(self, node: str = "") -> AsyncIterator[Run]:
        """A consumer that delivers the last value of every key, then the changes."""
        link = self._bus.link

        async def go_on(subject: str) -> None:
            with contextlib.suppress(nats.errors.Error):  # a lost connection ends the run
                await link.client.publish(subject)

        run = Run(self._root, go_on)
        subscription: Subscription | None = None
        deliver = link.client.new_inbox()
        consumer = ""
        link.when_lost.add(run.stop)
        try:
            async with self._bus.jetstream(f"bucket {self._name}: read") as js:
                stream = await js.stream_info(self._stream, subjects_filter=self._filter(node))
                subscription = await link.client.subscribe(deliver, cb=run.receive)
                info = await js.add_consumer(self._stream, self._consumer(node, deliver))
                consumer = info.name
                pending = (info.num_pending or 0) + (info.delivered.consumer_seq if info.delivered else 0)
                run.expect(set(stream.state.subjects or ()), pending)
            if link.lost.is_set():
                run.stop()
            yield run
        except IncompleteError as error:
            self._bus.errors.count("incomplete", "bucket.incomplete", bucket=self._name, reason=str(error))
            raise
        finally:
            link.when_lost.discard(run.stop)
            if subscription is not None and link.alive:
                with contextlib.suppress(nats.errors.Error, TimeoutError):
                    await subscription.unsubscribe()
                    if consumer:  # else the server removes it after IDLE_SECONDS
                        async with asyncio.timeout(1.0):
                            await js.delete_consumer(self._stream, consumer)

    def _filter(self, node: str) -> str:
        return f"{self._root}{node}.>" if node else f"{self._root}>"

    def _consumer(self, node: str, deliver: str) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_subject=deliver,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            filter_subject=self._filter(node),
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            idle_heartbeat=HEARTBEAT_SECONDS,
            flow_control=True,
            inactive_threshold=IDLE_SECONDS,
            mem_storage=True,
            num_replicas=1,
        )


class _Watch:
    """A chain of runs, and the entries that its reader knows from them."""

    def __init__(self, bucket: NatsBucket, inbox: Inbox[Entry | None]) -> None:
        self._bucket, self._inbox = bucket, inbox
        self._known: dict[str, int] = {}
        """Revision of each key that the reader believes to exist."""
        self._last = 0
        """Highest revision that was delivered."""
        self._run: Run | None = None

    async def follow(self) -> None:
        """Keep a run going until cancelled, with back-off while the server refuses."""
        backoff = Backoff(*RETRY_SECONDS)
        restarted = OnceLogger("watch.restarted", level="info")
        while True:
            await self._bucket._bus.until_connected()
            try:
                async with self._bucket._run() as run:
                    await self._read(run)
            except (BusError, RunOverError) as error:
                if self._run:
                    backoff.reset()
                    restarted.clear()
                restarted.log(bucket=self._bucket._name, reason=str(error))
            finally:
                self._run = None
            await asyncio.sleep(backoff.pause())

    async def _read(self, run: Run) -> None:
        present: set[str] = set()
        while not run.complete:
            entry = await run.next()
            if entry is None:
                break
            if entry.value is not None:
                present.add(entry.key)
            await self._deliver(entry, only_known=True)
        for key in () if self._known.keys() <= present else self._known.keys() - present:
            await self._deliver(Entry(key, None, 0))
        await self._inbox.put_when_free(None)
        self._run = run
        while True:
            entry = await run.next()
            if entry is not None:
                await self._deliver(entry)

    async def _deliver(self, entry: Entry, *, only_known: bool = False) -> None:
        self._last = max(self._last, entry.revision)
        if entry.value is None:
            if self._known.pop(entry.key, None) is None and only_known:
                return
        else:
            self._known[entry.key] = entry.revision
        await self._inbox.put_when_free(entry)

    async def compare(self) -> None:
        """Compare the watch with the bucket. A lasting difference is a bug: log it, reread."""
        while True:
            await asyncio.sleep(COMPARE_SECONDS)
            run = self._run
            if run is None:
                continue
            with contextlib.suppress(BusError, RunOverError):
                if await self._up_to_date():
                    continue
                before = self._differences(await self._bucket.entries())
                if not before:
                    continue
                await asyncio.sleep(SETTLE_SECONDS)
                lasting = before & self._differences(await self._bucket.entries())
                if lasting and run is self._run:
                    get_logger().error("watch.differs", bucket=self._bucket._name, keys=sorted(k for k, _ in lasting))
                    run.stop()

    async def _up_to_date(self) -> bool:
        """True if the last change that the stream has is delivered soon: then nothing needs to be read. A gap before it
        would have ended the run."""
        before, last = self._last, await self._bucket.last_revision()
        if before < last:
            await asyncio.sleep(min(COMPARE_SECONDS, SETTLE_SECONDS))
        return before <= last <= self._last

    def _differences(self, entries: list[Entry]) -> set[tuple[str, int]]:
        """Return (key, revision) of entries that the watch misses, and (key, 0) of those that it should not have."""
        actual = {entry.key: entry.revision for entry in entries}
        missed = {(key, revision) for key, revision in actual.items() if self._known.get(key, 0) < revision}
        return missed | {(key, 0) for key in self._known.keys() - actual.keys()}
