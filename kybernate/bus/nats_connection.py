"""A connection to NATS that is kept in the background, with its subscriptions.

Each connection is a new nats-py client that does not reconnect: nats-py's own reconnection sends what was published
during an outage afterwards, and forgets subscriptions made before its first success. The subscriptions are kept here
and made on every new client before ``connected`` turns true.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Self
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.client import JetStreamContext

from kybernate.backoff import Backoff
from kybernate.bus.credentials import Credentials, CredentialsError
from kybernate.bus.nats_link import (
    CONNECT_SECONDS,
    LEADER_SECONDS,
    MAJORITY_SECONDS,
    LinkErrors,
    NatsLink,
    dial,
    failures,
)
from kybernate.bus.port import BusDownError, BusError, NoAnswerError, NotSetUpError
from kybernate.clock import wait_for
from kybernate.logs import OnceLogger, get_logger

RETRY_SECONDS = 0.25, 2.0
"""Pauses until a server is dialled again, or one that reaches the leader: an election takes 4 to 9 s, and may fail."""
CUT_OFF_SECONDS = 5.0
"""How long the leader has not answered before another server is dialled."""
OTHER_SECONDS = 1.0
"""How long the leader may take to answer through another server."""
SERVICE_TRIES = 3
"""How often a single address is dialled then: a Service chooses one of its servers each time."""
DETACH_SECONDS = 0.5
JETSTREAM_SECONDS = 5.0
"""How long a bucket operation may take before its outcome is unknown."""


class _Route:
    """A subscription to keep, and the link on which it is made."""

    def __init__(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        self.subject = subject
        self.receive = receive
        self.link: NatsLink | None = None
        self.subscription: Subscription | None = None

    async def attach(self, link: NatsLink) -> None:
        self.link = link  # first, so that a route that attaches itself is not attached a second time
        self.subscription = await link.client.subscribe(self.subject, cb=self.receive)

    async def detach(self) -> None:
        """Unsubscribe, and wait for the server: later requests are refused at once."""
        if self.subscription is None or self.link is None or not self.link.alive:
            return
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(DETACH_SECONDS):
                await self.subscription.unsubscribe()
                await self.link.round_trip()


class NatsConnection:
    """The part of ``NatsBus`` that connects, reconnects and subscribes."""

    def __init__(self, url: str, *, name: str, credentials: Credentials, leader_of: str = "") -> None:
        """``leader_of``: the stream whose leader the server must reach; empty: any server will do."""
        self.url, self._leader_of = url, leader_of
        self.place = urlsplit(url).hostname or url
        """The server without credentials, for texts."""
        self.errors = LinkErrors(self.place, credentials)
        self._name, self._credentials = name, credentials
        self._link: NatsLink | None = None
        self._routes: list[_Route] = []
        self._callbacks: list[Callable[[bool], None]] = []
        self._up = asyncio.Event()
        self._leaving = False
        self._next: NatsLink | None = None
        """A connection to another server, that takes the place of the present one."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Connect in the background, and again after each loss, until the context ends."""
        keeper = asyncio.create_task(self._keep_connected(), name="bus")
        try:
            yield self
        finally:
            with contextlib.suppress(BusError):
                await self.flush(0.5)
            self._leaving = True
            keeper.cancel()
            await asyncio.wait([keeper])
            if self._next is not None:
                await self._next.client.close()

    @property
    def connected(self) -> bool:
        """True if a message published now would be sent."""
        return self._link is not None and self._link.alive

    @property
    def link(self) -> NatsLink:
        """The current connection. Raises BusDownError without one."""
        if self._link is None or not self.connected:
            raise BusDownError(f"not connected to NATS at {self.place}: {self.errors.last or 'no answer yet'}")
        return self._link

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(connected)`` at each loss and each return."""
        self._callbacks.append(callback)

    async def until_connected(self) -> None:
        """Wait until ``connected``."""
        await self._up.wait()

    async def closed(self) -> None:
        """Wait forever, or raise BusError when reconnecting is useless."""
        await self.errors.final.wait()
        raise self.errors.end or BusError("the bus was closed")

    async def flush(self, timeout: float = 2.0) -> None:
        """Wait until the server has processed everything published before."""
        async with self.call("flush", timeout):
            await self.link.round_trip()

    @asynccontextmanager
    async def call(self, what: str, timeout: float) -> AsyncIterator[Client]:
        """The client, for one request: errors become bus errors, and a lost connection ends it early."""
        link = self.link
        try:
            with failures(what):
                async with asyncio.timeout(timeout) as deadline:
                    loop = asyncio.get_running_loop()

                    def end_now() -> None:
                        if not deadline.expired():
                            deadline.reschedule(loop.time())

                    link.when_lost.add(end_now)
                    try:
                        yield link.client
                    finally:
                        link.when_lost.discard(end_now)
        except TimeoutError as error:
            why = "the connection was lost" if link.lost.is_set() else f"no answer within {timeout:g} s"
            raise NoAnswerError(f"{what}: {why}; it may have been done or not") from error

    @asynccontextmanager
    async def jetstream(self, what: str, timeout: float = JETSTREAM_SECONDS) -> AsyncIterator[JetStreamContext]:
        """JetStream, for one request; a missing stream is NotSetUpError."""
        async with self.call(what, timeout) as client:
            try:
                yield client.jetstream(timeout=timeout + 1)
            except (
                nats.js.errors.NotFoundError,
                nats.js.errors.NoStreamResponseError,
                nats.errors.NoRespondersError,
            ) as error:
                raise NotSetUpError(f"{what}: not on the NATS server at {self.place}; run: kyb bus init") from error

    @asynccontextmanager
    async def route(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> AsyncIterator[None]:
        """Keep a subscription, over reconnects, until the context ends."""
        route = _Route(subject, receive)
        self._routes.append(route)
        try:
            if self.connected:
                with contextlib.suppress(BusDownError, NoAnswerError):  # lost just now: the next link subscribes
                    async with self.call(subject, CONNECT_SECONDS):
                        link = self.link
                        await route.attach(link)
                        await link.round_trip()
            yield
        finally:
            self._routes.remove(route)
            await route.detach()

    async def _keep_connected(self) -> None:
        backoff = Backoff(*RETRY_SECONDS)
        # wait_for of Python 3.11 loses a cancellation that arrives together with the result it waits for: so the flag
        # is checked as well.
        while not self.errors.final.is_set() and not self._leaving:
            link: NatsLink | None = None
            try:
                link, self._next = self._next, None
                link = link or await dial(self.url, self._name, self._credentials, self.errors.report)
                if self._leaving:
                    return
                await self._adopt(link)
                backoff.reset()
                await self._until_useless(link)
                self.errors.judge(None if self._next is not None else link.client.last_error)
            except (OSError, nats.errors.Error, CredentialsError) as error:  # time-outs are OSErrors
                self.errors.judge(error)
            finally:
                if not self._leaving:
                    self._report_loss()
                if link is not None:
                    link.lose()
                    with contextlib.suppress(Exception):
                        await link.client.close()
            if self._next is not None:
                continue
            await asyncio.sleep(0.0 if self._leaving else backoff.pause())

    async def _until_useless(self, link: NatsLink) -> None:
        """Wait until the connection is lost (nats-py calls back, but look from time to time), or ``_next`` is one to a
        server that reaches the stream's leader, and this one's does not: it has lost its routes to the others, and what
        is published here stays there."""
        cut_off, due, searches = OnceLogger("bus.cut_off"), time.monotonic() + CUT_OFF_SECONDS, Backoff(*RETRY_SECONDS)
        while link.alive and not self._leaving:
            asked = time.monotonic()
            seconds = await link.leader_seconds(self._leader_of) if self._leader_of else 0.0
            due = max(due, asked - seconds + CUT_OFF_SECONDS)
            if seconds <= MAJORITY_SECONDS:
                searches.reset()
                cut_off.clear()
            elif link.alive and time.monotonic() >= due:
                self._next = other = await self._elsewhere(link)
                due = time.monotonic() + searches.pause()
                meaning = f"this server does not reach the leader of {self._leader_of}, and is left for one that does"
                if other is None:
                    meaning = f"no server of {self.place} reaches the leader of {self._leader_of}; it is tried again"
                cut_off.log(server=link.server, next=other.server if other else "", meaning=meaning)
                if other is not None:
                    return
            await wait_for(link.lost, min(asked + LEADER_SECONDS, due) - time.monotonic())

    async def _elsewhere(self, link: NatsLink) -> NatsLink | None:
        """A connection to a server that reaches the leader, unless the present one does by now. One address may be a
        Service in front of several."""
        here, urls = link.client.connected_url, self.url.split(",")
        others = [url for url in urls if here is None or urlsplit(url).netloc != here.netloc]
        for url in random.sample(others, len(others)) or urls * SERVICE_TRIES:
            with contextlib.suppress(OSError, nats.errors.Error, CredentialsError):  # time-outs are OSErrors
                other = await dial(url, self._name, self._credentials, self.errors.report)
                seconds = await other.leader_seconds(self._leader_of, OTHER_SECONDS)
                if seconds <= MAJORITY_SECONDS < await link.leader_seconds(self._leader_of, OTHER_SECONDS):
                    return other
                await other.client.close()
        return None

    async def _adopt(self, link: NatsLink) -> None:
        """Make all subscriptions on a new link, then report that it is connected."""
        while missing := [route for route in self._routes if route.link is not link]:
            for route in missing:
                await route.attach(link)
            async with asyncio.timeout(CONNECT_SECONDS):
                await link.round_trip()
        self._link = link
        self.errors.last = ""
        self._up.set()
        get_logger().info("bus.connected", server=self.place)
        for callback in self._callbacks:
            callback(True)

    def _report_loss(self) -> None:
        if self._link is None:
            return
        self._link = None
        self._up.clear()
        get_logger().warning("bus.lost", server=self.place, error=self.errors.last)
        for callback in self._callbacks:
            callback(False)
