"""The protocols of the buses: ``NatsBus`` and, between manager and checkpointer of a node, ``NodeSocket`` in
production, ``MemoryBus`` in tests. No I/O here.

Rules that all keep (one contract test holds them to it):

* ``publish`` raises BusDownError at once while the connection is away; nothing is buffered and sent later.
* A time-out of ``request`` or of a bucket write means *unknown*, never *not done*.
* A subscription is in force when ``async with bus.subscribe(...)`` has been entered; entered while the connection is
  away (also: not yet there), it is in force when ``connected`` turns true. The same holds for ``serve`` and ``watch``.
* Messages of one sender on one subscription arrive in the order in which they were sent.
* A message that cannot be decoded is logged and skipped; it never ends a subscription.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel

from kybernate.envelope import Message, Pattern
from kybernate.messages.events import RequestEnded

R = TypeVar("R", bound=BaseModel)

EVENTS = "KYB_EVENTS"
"""Stream of everything under ``kyb.v1.evt``, 7 days."""
REQUESTS = "KYB_REQUESTS"
"""Stream of the last record of each request (``kyb.v1.req``), a day."""
AUDIT = "KYB_AUDIT"
"""Stream of everything under ``kyb.v1.audit``, 90 days."""
BUCKETS = ("kyb_seats", "kyb_inventory")
"""Levels by key."""


ALL_EVENTS: Pattern[Message] = Pattern("kyb.v1.evt.*.*.*", Message, lambda last: ("evt", 6, last) in Message.registry)
"""Of the kinds that this release knows: the stream also keeps what others wrote."""


class BusError(Exception):
    """Base of what can go wrong on a bus."""


class BusDownError(BusError):
    """The bus is not connected; nothing was sent."""


class NoAnswerError(BusError):
    """No answer in time, or no handler. The request may have been carried out or not."""


class NotSetUpError(BusError):
    """A bucket or stream does not exist on the server; the text says to run ``kyb bus init``."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a bucket. ``value`` is None when the key was deleted."""

    key: str
    value: bytes | None
    revision: int


class Bucket(Protocol):
    """Levels by key: the last value of each, with a revision."""

    async def put(self, key: str, value: bytes) -> int:
        """Write, whatever was there; returns the new revision."""

    async def delete(self, key: str) -> None:
        """Remove the key; watchers see an entry without a value."""

    async def entries(self, node: str = "") -> list[Entry]:
        """All present entries, or those whose key begins with this token."""

    async def keys(self, node: str = "") -> Set[str]:
        """The keys that begin with this token and were written or deleted; without those that were purged."""

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[Entry | None]]:
        """All present entries, then one None (the snapshot is complete), then every change.

        After a reconnect the whole snapshot comes again, followed by None; entries that vanished meanwhile come as
        entries without a value before that None.
        """


class NodeBus(Protocol):
    """Messages and requests: what manager and checkpointer of a node need."""

    @property
    def connected(self) -> bool:
        """True if a message published now would be sent."""

    @property
    def troubles(self) -> Mapping[str, int]:
        """Number of tolerated failures since the start, by kind."""

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call ``callback(connected)`` at each loss and each return of the connection, on the node bus also when a
        further peer connects. It must not raise or block."""

    async def publish(self, message: Message) -> None:
        """Send to all subscribers. Events (``kyb.v1.evt``) and audit records are also kept by the stream."""

    async def request(self, message: Message, reply: type[R], *, timeout: float) -> R:
        """Send a request to its handler. Raises NoAnswerError (also when there is no handler) or BusDownError."""

    def subscribe(self, *patterns: Pattern[Message]) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Messages of these kinds, in one iterator, from now on. Live only: nothing from before."""

    def serve(
        self, pattern: Pattern[Message], handler: Callable[[Message], Awaitable[BaseModel]]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests on this pattern, one at a time, until the context ends.

        A request whose handler raises gets no answer; the error is logged, and other requests are served on.
        """


class LocalBus(NodeBus, Protocol):
    """A bus whose peer is on this machine: sending needs no wait."""

    def publish_nowait(self, message: Message) -> None:
        """``publish`` in this turn of the event loop."""


class Bus(NodeBus, Protocol):
    """The bus of a cluster: also history and buckets."""

    async def until_connected(self) -> None:
        """Wait until ``connected``. Returns at once when it is."""

    async def closed(self) -> None:
        """Wait for ever, or raise BusError when the connection cannot come back (refused credentials).

        Every service runs it as a job, so that such an end ends the process.
        """

    async def flush(self, timeout: float = 2.0) -> None:
        """Wait until the server has processed everything published before. Raises NoAnswerError or BusDownError."""

    def replay(
        self, *, after_id: str | None = None, since: float = 0.0, pattern: Pattern[Message] = ALL_EVENTS
    ) -> AsyncIterator[Message]:
        """Stored events of this pattern, oldest first; ends at the present. A pattern of ``RequestEnded`` reads the
        records of requests instead. nats-server stores an event a moment after it has passed it on: it may still be
        missing when ``flush`` has returned.

        ``after_id``: only those after the one with this message id; an id that the stream no longer holds replays
        everything it has. ``since``: only those stored since then, unix seconds. Only one of both.
        """

    async def ended(self, request: str) -> RequestEnded | None:
        """The stored record of a request; None: there is none."""

    async def bucket(self, name: str) -> Bucket:
        """An existing bucket. Raises BusError saying to run ``kyb bus init`` when it is missing."""
