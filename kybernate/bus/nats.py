"""The bus over NATS. Only ``kybernate/bus/`` imports nats-py.

The connection is kept in the background: entering ``NatsBus.connect`` returns at once, so that a service can serve
its health while the server is away. Each connection is a new nats-py client without reconnection of its own, because
that one keeps what was published during an outage and sends it afterwards, and forgets subscriptions made before its
first success. What should be in force is kept here and put in force on every new client, before ``connected`` says so.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.client import JetStreamContext
from pydantic import BaseModel, ValidationError

from kybernate.bus.credentials import ANY_INBOX, NOBODY, Credentials, CredentialsError
from kybernate.bus.history import stored_events
from kybernate.bus.inbox import Inbox, answer, merged, read
from kybernate.bus.nats_bucket import NatsBucket
from kybernate.bus.nats_link import CONNECT_SECONDS, Link, dial, failures
from kybernate.bus.nats_trouble import Trouble
from kybernate.bus.port import Bucket, BusDownError, BusError, NoAnswerError, NotSetUpError
from kybernate.envelope import Message, Pattern
from kybernate.logs import get_logger

R = TypeVar("R", bound=BaseModel)

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 2.0
DETACH_SECONDS = 0.5
JETSTREAM_SECONDS = 5.0
"""How long a bucket operation may take before its outcome is unknown."""


class _Route:
    """A subscription that should be in force, and on which link it is."""

    def __init__(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        self.subject = subject
        self.receive = receive
        self.link: Link | None = None
        self.subscription: Subscription | None = None

    async def attach(self, link: Link) -> None:
        self.link = link  # first, so that a route that attaches itself is not attached a second time
        self.subscription = await link.client.subscribe(self.subject, cb=self.receive)

    async def detach(self) -> None:
        """Out of force once this returns: who asks afterwards is told at once that nobody serves."""
        if self.subscription is None or self.link is None or not self.link.alive:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(DETACH_SECONDS):
                await self.subscription.unsubscribe()
                await self.link.round_trip()


class NatsBus:
    """A ``Bus`` over one NATS server or cluster."""

    def __init__(
        self, url: str, *, source: str, name: str, credentials: Credentials = NOBODY, compare_seconds: float = 60.0
    ) -> None:
        self.url = url
        self.place = urlsplit(url).hostname or url
        """The server without credentials, for texts."""
        self.trouble = Trouble(self.place, credentials)
        self.compare_seconds = compare_seconds
        """How often each watch is compared with its bucket."""
        self._source, self._name, self._credentials = source, name, credentials
        self._link: Link | None = None
        self._routes: list[_Route] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._up = asyncio.Event()
        self._leaving = False

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, source: str, name: str, credentials: Credentials = NOBODY, compare_seconds: float = 60.0
    ) -> AsyncIterator["NatsBus"]:
        """A bus that is connected in the background, and again after each loss, until the context ends.

        ``source`` is the CloudEvents source of what is sent; ``name`` is shown by the server's monitoring. The files
        of ``credentials`` are read at each connection.
        """
        bus = cls(url, source=source, name=name, credentials=credentials, compare_seconds=compare_seconds)
        keeper = asyncio.create_task(bus._keep_connected(), name="bus")
        try:
            yield bus
        finally:
            with contextlib.suppress(BusError):
                await bus.flush(0.5)
            bus._leaving = True
            keeper.cancel()
            await asyncio.wait([keeper])

    @property
    def dropped(self) -> int:
        """Messages lost because a reader of this process was too slow."""
        return self.trouble.dropped

    @property
    def troubles(self) -> dict[str, int]:
        """What was put up with so far."""
        of = self.trouble
        return {"dropped": of.dropped, "ignored": of.ignored, "incomplete": of.incomplete}

    @property
    def connected(self) -> bool:
        """Whether something published now would be sent."""
        return self._link is not None and self._link.alive

    @property
    def link(self) -> Link:
        """The present connection. Raises BusDownError when there is none."""
        if self._link is None or not self.connected:
            raise BusDownError(f"not connected to NATS at {self.place}: {self.trouble.last or 'no answer yet'}")
        return self._link

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(connected)`` at each loss and each return."""
        self._callbacks.append(callback)

    async def until_connected(self) -> None:
        """Wait until ``connected``."""
        await self._up.wait()

    async def closed(self) -> None:
        """Wait for ever, or raise BusError when trying again would be useless."""
        await self.trouble.final.wait()
        raise self.trouble.end or BusError("the bus was closed")

    async def publish(self, message: Message) -> None:
        """Send to whoever listens."""
        client = self.link.client
        with failures(message.subject):
            await client.publish(message.subject, message.body(), headers=message.headers(self._source) or None)

    async def flush(self, timeout: float = 2.0) -> None:
        """Until the server has seen everything published before."""
        async with self.asking("flush", timeout):
            await self.link.round_trip()

    async def request(self, message: Message, reply: type[R], *, timeout: float) -> R:
        """Ask the one who serves this subject."""
        async with self.asking(message.subject, timeout) as client:
            told = await client.request(
                message.subject,
                message.body(),
                timeout=timeout + 1,  # the deadline is ours, this one only cleans up
                headers=message.headers(self._source) or None,
            )
        try:
            return reply.model_validate_json(told.data)
        except ValidationError as error:
            raise NoAnswerError(f"{message.subject}: the answer is no {reply.__name__}: {error}") from error

    @asynccontextmanager
    async def subscribe(self, *patterns: Pattern[Message]) -> AsyncIterator[AsyncIterator[Message]]:
        """Messages of these kinds, in one iterator, from now on."""
        inbox: Inbox[Message] = Inbox()

        async def receive(msg: Msg) -> None:
            message = read(msg.subject, msg.data, patterns)
            if message is not None and not inbox.put(message):
                self.trouble.drop(msg.subject)

        async with contextlib.AsyncExitStack() as stack:
            for subject in merged(patterns):
                await stack.enter_async_context(self._route(subject, receive))
            try:
                yield inbox
            finally:
                inbox.close()

    @asynccontextmanager
    async def serve(
        self, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
    ) -> AsyncIterator[None]:
        """Answer requests on this pattern, one at a time, until the context ends.

        Only what wants its answer in an inbox is a request: JetStream sends its own answers to whatever subject its
        client names, so that who may ask JetStream could have it write here; and an answer written to any other
        subject would be written with this process' rights.
        """
        inbox: Inbox[Msg] = Inbox()

        async def receive(msg: Msg) -> None:
            if not inbox.put(msg):
                self.trouble.drop(msg.subject)

        async def work() -> None:
            async for msg in inbox:
                if not msg.reply.startswith(ANY_INBOX):
                    self.trouble.forged(msg)
                    continue
                said = await answer(msg.subject, msg.data, pattern, handler)
                if said is None:
                    continue
                try:
                    with failures(msg.reply):
                        await self.link.client.publish(msg.reply, said)
                except BusError as error:
                    get_logger().warning("answer.unsent", subject=msg.subject, error=str(error))

        worker = asyncio.create_task(work(), name=f"serve {pattern.subject}")
        try:
            async with self._route(pattern.subject, receive):
                yield
        finally:
            worker.cancel()
            await asyncio.wait([worker])

    def replay(self, *, after_id: str | None = None) -> AsyncIterator[Message]:
        """Stored events, oldest first, after the one with this id; ends at the present."""
        return stored_events(self, after_id)

    async def bucket(self, name: str) -> Bucket:
        """An existing bucket. Raises NotSetUpError saying to run ``kyb bus init`` when it is missing."""
        async with self.jetstream(f"bucket {name}") as js:
            await js.key_value(name)
        return NatsBucket(self, name)

    @asynccontextmanager
    async def asking(self, what: str, timeout: float) -> AsyncIterator[Client]:
        """The client, for one question; its failures as bus errors. Ends early when the connection is lost."""
        link = self.link
        try:
            with failures(what):
                async with asyncio.timeout(timeout) as deadline:
                    loop = asyncio.get_running_loop()

                    def give_up() -> None:
                        if not deadline.expired():
                            deadline.reschedule(loop.time())

                    link.when_lost.add(give_up)
                    try:
                        yield link.client
                    finally:
                        link.when_lost.discard(give_up)
        except TimeoutError as error:
            why = "the connection was lost" if link.lost.is_set() else f"no answer within {timeout:g} s"
            raise NoAnswerError(f"{what}: {why}; it may have been done or not") from error

    @asynccontextmanager
    async def jetstream(self, what: str, timeout: float = JETSTREAM_SECONDS) -> AsyncIterator[JetStreamContext]:
        """JetStream, for one question; a missing stream is NotSetUpError."""
        async with self.asking(what, timeout) as client:
            try:
                yield client.jetstream(timeout=timeout + 1)
            except (
                nats.js.errors.NotFoundError,
                nats.js.errors.NoStreamResponseError,
                nats.errors.NoRespondersError,
            ) as error:
                raise NotSetUpError(f"{what}: not on the NATS server at {self.place}; run: kyb bus init") from error

    @asynccontextmanager
    async def _route(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        route = _Route(subject, receive)
        self._routes.append(route)
        try:
            if self.connected:
                with contextlib.suppress(BusDownError, NoAnswerError):  # lost just now: the next link takes it
                    async with self.asking(subject, CONNECT_SECONDS):
                        link = self.link
                        await route.attach(link)
                        await link.round_trip()
            yield
        finally:
            self._routes.remove(route)
            await route.detach()

    async def _keep_connected(self) -> None:
        wait = FIRST_RETRY_SECONDS
        # A client that waits for an answer which comes, or fails, at the instant of a stop loses the stop (wait_for of
        # Python 3.11): so leaving is looked at as well.
        while not self.trouble.final.is_set() and not self._leaving:
            link: Link | None = None
            try:
                link = await dial(self.url, self._name, self._credentials, self.trouble.report)
                if self._leaving:
                    return
                await self._put_in_force(link)
                wait = FIRST_RETRY_SECONDS
                await link.until_lost()
                self.trouble.judge(link.client.last_error)
            except (OSError, nats.errors.Error, CredentialsError) as error:  # time-outs are OSErrors
                self.trouble.judge(error)
            finally:
                if not self._leaving:
                    self._tell_down()
                if link is not None:
                    link.lose()
                    with contextlib.suppress(Exception):
                        await link.client.close()
            await asyncio.sleep(0.0 if self._leaving else wait * random.uniform(0.5, 1.0))
            wait = min(wait * 2, LAST_RETRY_SECONDS)

    async def _put_in_force(self, link: Link) -> None:
        """Subscribe everything on a new link, and only then call it connected."""
        while missing := [route for route in self._routes if route.link is not link]:
            for route in missing:
                await route.attach(link)
            async with asyncio.timeout(CONNECT_SECONDS):
                await link.round_trip()
        self._link = link
        self.trouble.last = ""
        self._up.set()
        get_logger().info("bus.connected", server=self.place)
        for callback in self._callbacks:
            callback(True)

    def _tell_down(self) -> None:
        if self._link is None:
            return
        self._link = None
        self._up.clear()
        get_logger().warning("bus.lost", server=self.place, error=self.trouble.last)
        for callback in self._callbacks:
            callback(False)
