"""One connection to NATS: how it is made, how its loss is detected, and what its errors mean."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ClusterInfo

from kybernate.bus.credentials import Credentials
from kybernate.bus.inbox import Troubles
from kybernate.bus.port import BusDownError, BusError, NoAnswerError
from kybernate.logs import get_logger

PING_SECONDS = 5
MISSED_PINGS = 2
"""A half-open connection counts as lost after PING_SECONDS * (MISSED_PINGS + 1)."""
CONNECT_SECONDS = 2
LEADER_SECONDS = 2.0
"""How long the leader of a stream may take to answer, and how often it is asked."""
MAJORITY_SECONDS = 3.0
"""A leader that has no answer from a majority for longer is cut off: its servers answer it once a second."""
RESETS = 4
"""How often a connection is attempted again when it is reset while it is made."""
MOST_FORBIDDEN = 100
"""Number of refused subjects that are logged, each once."""


class NatsLink:
    """One connection to the server, until its loss."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._echo = ""
        self._echoes: dict[bytes, asyncio.Future[None]] = {}
        self._trips = 0
        self.lost = asyncio.Event()
        self.when_lost: set[Callable[[], None]] = set()
        """Called once, at the loss: requests need not wait any longer."""

    @property
    def alive(self) -> bool:
        """True if a message published now would be sent."""
        return not self.lost.is_set() and self.client.is_connected

    async def round_trip(self) -> None:
        """Wait until the server has processed everything that this process sent before. May be cancelled.

        Not nats-py's flush: its PING overtakes the messages in its buffer, and the PONG after a flush that was
        cancelled or timed out ends its reading task (InvalidStateError): the connection receives nothing more.
        """
        self._trips += 1
        token = str(self._trips).encode()
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[token] = back
        try:
            await self.client.publish(self._echo, token)
            await back
        finally:
            del self._echoes[token]

    async def listen_to_itself(self) -> None:
        """Subscribe to the inbox that ``round_trip`` publishes to; once, after connecting."""
        self._echo = self.client.new_inbox()
        await self.client.subscribe(self._echo, cb=self._received)

    async def _received(self, msg: Msg) -> None:
        back = self._echoes.get(msg.data)
        if back is not None and not back.done():
            back.set_result(None)

    def lose(self) -> None:
        """Mark the connection as lost, for good; the next one is another NatsLink."""
        if self.lost.is_set():
            return
        self.lost.set()
        for callback in tuple(self.when_lost):
            callback()

    @property
    def server(self) -> str:
        """The name by which the server introduced itself."""
        return str(self.client._server_info.get("server_name", ""))

    async def leader_seconds(self, stream: str, timeout: float = LEADER_SECONDS) -> float:
        """``leader_seconds`` of a stream, through this server; infinity without an answer within ``timeout`` seconds, 0
        without such a stream."""
        try:
            info = await self.client.jetstream(timeout=timeout).stream_info(stream)
        except nats.js.errors.NotFoundError:
            return 0.0
        except (nats.errors.Error, TimeoutError):
            return inf
        return leader_seconds(info.cluster)


def leader_seconds(cluster: ClusterInfo | None) -> float:
    """For how long the leader of a stream has no answer from a majority of its servers.

    A server that is cut off may answer by its own copy, without a leader: infinity. And a leader that is cut off leads
    on for 10 to 20 s (nats-server's ``lostQuorumInterval``), while the others have another one.
    """
    if cluster is None:
        return 0.0
    ages = sorted([0, *((peer.active or 0) for peer in cluster.replicas or ())])  # nanoseconds; 0: the leader itself
    return ages[len(ages) // 2] / 1e9 if cluster.leader else inf


class PlaintextError(nats.errors.Error):
    """A certificate authority is set, and the server (or a proxy in front of it) offers no TLS."""


class _TlsClient(Client):
    """Refuses a server whose greeting offers no TLS; nats-py would continue without."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise PlaintextError("the server offers no TLS, and a certificate authority or certificate is set")
        await super()._process_info(info, initial_connection)


async def dial(url: str, name: str, credentials: Credentials, report: Callable[[Exception], None]) -> NatsLink:
    """Connect once, with the present content of the credentials' files.

    A server that refuses a key sends the reason and closes the connection, and the reset may arrive before the reason.
    A connection that was reset is therefore attempted again, up to ``RESETS`` times, unless a reason was received.

    Raises nats-py's errors, and CredentialsError. ``report`` gets errors that belong to no call; it must not raise.
    """
    for _ in range(RESETS):
        received: list[Exception] = []
        reset = False
        try:
            return await _dial(url, name, credentials, received.append, report)
        except (OSError, nats.errors.Error) as error:
            errors = (error, *received)
            reset = any(isinstance(one, ConnectionResetError) for one in errors) and not any(map(refused, errors))
            if not reset:
                raise
        finally:
            if not reset:
                for one in list(filter(refused, received)) or received:  # the reason, without the reset that follows it
                    report(one)
    return await _dial(url, name, credentials, report, report)


async def _dial(
    url: str,
    name: str,
    credentials: Credentials,
    connecting: Callable[[Exception], None],
    report: Callable[[Exception], None],
) -> NatsLink:
    """Connect once. ``connecting`` gets the errors until the connection is made, ``report`` the later ones."""
    identity = await asyncio.to_thread(credentials.read, time.time())
    wants_tls = (identity.tls and not url.startswith("ws")) or url.startswith("tls:")  # wss is TLS from its first byte
    client = _TlsClient() if wants_tls else Client()
    link = NatsLink(client)

    async def on_error(error: Exception) -> None:
        sink(error)

    async def on_closed() -> None:
        link.lose()

    sink = connecting
    try:
        await client.connect(
            servers=url.split(","),
            name=name,
            allow_reconnect=False,  # see kybernate.bus.nats_connection
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_SECONDS,
            ping_interval=PING_SECONDS,
            max_outstanding_pings=MISSED_PINGS,
            pending_size=0,  # nothing is buffered while the connection is away
            error_cb=on_error,
            closed_cb=on_closed,
            **identity.options,
        )
        await link.listen_to_itself()
        sink = report
    except BaseException:
        with contextlib.suppress(Exception):
            await client.close()  # a connect that fails half-way leaves the socket open
        raise
    return link


def refused(error: Exception | None) -> bool:
    """True if the server refused the credentials, or no longer takes those of a connection."""
    text = f"{type(error).__name__} {error}".lower()
    return error is not None and any(
        reason in text for reason in ("authorization", "authentication expired", "authentication revoked")
    )


def forbidden(error: Exception | None) -> bool:
    """True if the server refused one subject; the connection continues."""
    return error is not None and "permissions violation" in str(error).lower()


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Translate nats-py's errors into the bus' own. TimeoutError passes: its meaning depends on the caller. A
    cancellation that nats-py loses (``wait_for`` of Python 3.11 does, where the answer comes at once) is raised."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    except TimeoutError:
        raise
    except nats.errors.NoRespondersError as error:
        raise NoAnswerError(f"{what}: no service handles it") from error
    except (
        nats.errors.OutboundBufferLimitError,
        nats.errors.ConnectionClosedError,
        nats.errors.ConnectionDrainingError,
    ) as error:
        raise BusDownError(f"{what}: the connection to NATS is away") from error
    except nats.errors.Error as error:
        raise BusError(f"{what}: {error}") from error
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


class LinkErrors(Troubles):
    """The errors of one bus: logs each once with its remedy, counts, and decides whether they are final.

    ``place`` is the server without credentials, for texts.
    """

    def __init__(self, place: str, credentials: Credentials) -> None:
        # Messages lost because a reader of this process was too slow; requests without an inbox for the answer; reads
        # of a bucket that missed keys (each was repeated).
        super().__init__("dropped", "ignored", "incomplete")
        self._place, self._credentials = place, credentials
        self.last = ""
        """The last error; empty after a successful connection."""
        self._logged: set[str] = set()
        self.end: BusError | None = None
        """Why reconnecting is useless; None while it is not."""
        self.final = asyncio.Event()
        """Set with ``end``."""

    def judge(self, error: Exception | None) -> None:
        """Record why the connection was lost, and end the bus when reconnecting would be useless.

        Refused credentials from files are tried again: a rotated key replaces them.
        """
        if refused(error):
            self._refuse(str(error))
        elif error is not None and not isinstance(error, nats.errors.NoServersError):  # its reason was reported
            self.report(error)

    def report(self, error: Exception) -> None:
        """Log an error that belongs to no call; a repeated one (a server that is away) only once."""
        if isinstance(error, nats.errors.SlowConsumerError):
            self.drop(error.subject)
            return
        text = str(error) or type(error).__name__
        if forbidden(error):
            if text in self._logged or len(self._logged) >= MOST_FORBIDDEN:
                return
            self._logged.add(text)
            remedy = f"the key's rights are older than this program, or it is another role's: {self._credentials.grant}"
            get_logger().error("bus.forbidden", role=self._credentials.role, error=text, remedy=remedy)
        elif refused(error):
            self._refuse(text)
        else:
            self._note(text)

    def _note(self, text: str) -> None:
        if text != self.last:
            self.last = text
            get_logger().warning("bus.error", server=self._place, error=text)

    def _refuse(self, reason: str) -> None:
        mine = self._credentials
        file = mine.file
        if file is None:
            self.end = BusError(f"NATS at {self._place} refused this process: {reason}; check its credentials")
            self.final.set()
            return
        remedy = f"the server's auth.conf does not list it, or it was rotated: renew {file} (kyb bus keys), reload NATS"
        if mine.has_jwt:
            remedy = f"its JWT expired or was revoked, or the account is not known: renew {file} (nsc generate creds)"
        self._note(f"refused the key of role {mine.role or '?'} in {file}: {reason}; {remedy}")
