"""The bus over NATS. Only ``kybernate/bus/`` imports nats-py.

Entering ``NatsBus(...).opened()`` returns at once, so that a service can serve its health while the server is away.
"""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from pydantic import BaseModel

from kybernate.bus.credentials import ANY_INBOX, NO_CREDENTIALS, Credentials
from kybernate.bus.inbox import Inbox, answer, beside, merged, read, read_answer
from kybernate.bus.nats_bucket import NatsBucket
from kybernate.bus.nats_connection import NatsConnection
from kybernate.bus.nats_link import MAJORITY_SECONDS, failures, leader_seconds
from kybernate.bus.port import ALL_EVENTS, EVENTS, REQUESTS, Bucket, BusError, NoAnswerError
from kybernate.envelope import Message, Pattern
from kybernate.logs import get_logger
from kybernate.messages.events import RequestEnded

R = TypeVar("R", bound=BaseModel)

BATCH = 500
SLICE = 20
"""Stored events that are read before other work of the process has its turn."""
FETCH_SECONDS = 5.0


class NatsBus(NatsConnection):
    """A ``Bus`` over one NATS server or cluster."""

    def __init__(
        self,
        url: str,
        *,
        source: str,
        name: str,
        credentials: Credentials = NO_CREDENTIALS,
        follows: str = "",
    ) -> None:
        """``url``: several are separated by commas. ``source`` is the CloudEvents source of its messages, e.g.
        ``kyb/router/router-0``; the server's monitoring shows ``name``. A server that does not reach the leader of the
        bucket ``follows`` is left for one that does.

        The files of ``credentials`` are read at each connection.
        """
        super().__init__(url, name=name, credentials=credentials, leader_of=follows and f"KV_{follows}")
        self._source = source

    @property
    def troubles(self) -> dict[str, int]:
        """Number of tolerated failures since the start, by kind."""
        return dict(self.errors.counts)

    async def publish(self, message: Message) -> None:
        """Send to all subscribers."""
        client = self.link.client
        with failures(message.subject):
            await client.publish(message.subject, message.body(), headers=message.headers(self._source) or None)

    async def request(self, message: Message, reply: type[R], *, timeout: float) -> R:
        """Send a request to the handler of this subject."""
        async with self.call(message.subject, timeout) as client:
            answered = await client.request(
                message.subject,
                message.body(),
                timeout=timeout + 1,  # only for nats-py to clean up: call() has the deadline
                headers=message.headers(self._source) or None,
            )
        return read_answer(message.subject, answered.data, reply)

    @asynccontextmanager
    async def subscribe(self, *patterns: Pattern[Message]) -> AsyncIterator[AsyncIterator[Message]]:
        """Messages of these kinds, in one iterator, from now on."""
        inbox: Inbox[Message] = Inbox()

        async def receive(msg: Msg) -> None:
            message = read(msg.subject, msg.data, patterns)
            if message is not None and not inbox.put(message):
                self.errors.drop(msg.subject)

        async with contextlib.AsyncExitStack() as stack:
            for subject in merged(patterns):
                await stack.enter_async_context(self.route(subject, receive))
            try:
                yield inbox
            finally:
                inbox.close()

    @asynccontextmanager
    async def serve(
        self, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
    ) -> AsyncIterator[None]:
        """Answer requests on this pattern, one at a time, until the context ends.

        The context raises RuntimeError when answering ends before it.

        Messages whose reply subject is not an inbox are ignored: the answer would be published with this process'
        rights, and JetStream publishes its own answers to any subject that its client names, also to this one.
        """
        inbox: Inbox[Msg] = Inbox()

        async def receive(msg: Msg) -> None:
            if not inbox.put(msg):
                self.errors.drop(msg.subject)

        async def work() -> None:
            async for msg in inbox:
                if not msg.reply.startswith(ANY_INBOX):
                    more = {"subject": msg.subject, "reply": msg.reply, "reason": "it has no inbox"}
                    self.errors.count("ignored", "request.ignored", **more)
                    continue
                body = await answer(msg.subject, msg.data, pattern, handler)
                if body is None:
                    continue
                try:
                    with failures(msg.reply):
                        await self.link.client.publish(msg.reply, body)
                except BusError as error:
                    get_logger().warning("answer.unsent", subject=msg.subject, error=str(error))

        async with beside(work(), name=f"serve {pattern.subject}"), self.route(pattern.subject, receive):
            yield

    async def replay(
        self, *, after_id: str | None = None, since: float = 0.0, pattern: Pattern[Message] = ALL_EVENTS
    ) -> AsyncIterator[Message]:
        """Stored events of this pattern, oldest first, after this id or since this time; ends at the present.

        JetStream has no lookup by id: the headers of all events are read to find it.
        """
        begin = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
        if since > 0:
            at = datetime.datetime.fromtimestamp(since, datetime.UTC)
            begin = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=at)
        if after_id is not None:
            async with contextlib.aclosing(self._stored(begin.evolve(headers_only=True))) as stored:
                async for msg in stored:
                    if (msg.headers or {}).get("Nats-Msg-Id") == after_id:
                        after = msg.metadata.sequence.stream + 1
                        policy = DeliverPolicy.BY_START_SEQUENCE
                        begin = ConsumerConfig(deliver_policy=policy, opt_start_seq=after)
                        break
        stream = REQUESTS if pattern.subject == RequestEnded.pattern().subject else EVENTS
        async with contextlib.aclosing(self._stored(begin.evolve(filter_subject=pattern.subject), stream)) as stored:
            async for msg in stored:
                message = read(msg.subject, msg.data, (pattern,))
                if message is not None:
                    yield message

    async def ended(self, request: str) -> RequestEnded | None:
        """The stored record of a request; None: there is none."""
        pattern = RequestEnded.pattern(request=request)
        async with self.jetstream("records of requests") as js:
            try:
                found = await js.get_last_msg(REQUESTS, pattern.subject, direct=True)
            except nats.js.errors.NotFoundError:
                return None
        message = read(pattern.subject, found.data or b"", (pattern,))
        return message if isinstance(message, RequestEnded) else None

    async def bucket(self, name: str) -> Bucket:
        """Open an existing bucket. Raises NotSetUpError with ``kyb bus init`` as remedy if it is missing."""
        async with self.jetstream(f"bucket {name}") as js:
            info = await js.stream_info(f"KV_{name}")
        if leader_seconds(info.cluster) > MAJORITY_SECONDS:  # this server has a copy, and lost its routes
            raise NoAnswerError(f"bucket {name}: no leader; the servers elect one, or this one is cut off from them")
        return NatsBucket(self, name)

    async def _stored(self, begin: ConsumerConfig, stream: str = EVENTS) -> AsyncGenerator[Msg, None]:
        """The messages from where a consumer begins to the last one of now."""
        async with self.jetstream("stored events") as js:
            info = await js.stream_info(stream)
            last = info.state.last_seq
            if info.state.messages == 0 or (begin.opt_start_seq or 0) > last:
                return
            config = begin.evolve(ack_policy=AckPolicy.NONE, inactive_threshold=30.0, mem_storage=True, num_replicas=1)
            consumer = await js.add_consumer(stream, config)
            if not consumer.num_pending:
                return
            subscription = await js.pull_subscribe_bind(consumer.name, stream=stream)
        try:
            at = 0
            while at <= last:
                async with self.jetstream("stored events", FETCH_SECONDS + 1):
                    try:
                        batch = await subscription.fetch(BATCH, timeout=FETCH_SECONDS)
                    except nats.errors.TimeoutError:
                        return  # the rest expired meanwhile
                for index, msg in enumerate(batch):
                    meta = msg.metadata
                    at = meta.sequence.stream + 1
                    yield msg
                    if index % SLICE == SLICE - 1:
                        await asyncio.sleep(0)
                    if meta.num_pending == 0:
                        return
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()
