"""One connection to NATS: dialling it, and noticing that it is gone."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kybernate.bus.credentials import Credentials
from kybernate.bus.port import BusDownError, BusError, NoAnswerError

PING_SECONDS = 5
MISSED_PINGS = 2
"""A half-open connection is given up after PING_SECONDS * (MISSED_PINGS + 1)."""
CONNECT_SECONDS = 2
RESETS = 4
"""How often a connection that is reset while it is made is made anew."""


class Link:
    """One connection to the server, from its first moment to its loss."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._echo = ""
        self._echoes: dict[bytes, asyncio.Future[None]] = {}
        self._asked = 0
        self.lost = asyncio.Event()
        self.when_lost: set[Callable[[], None]] = set()
        """Called once, at the loss: who waits for an answer need not wait on."""

    @property
    def alive(self) -> bool:
        """Whether something sent now would go out."""
        return not self.lost.is_set() and self.client.is_connected

    async def round_trip(self) -> None:
        """Until the server has seen everything that this process sent before. May be cancelled.

        Not nats-py's flush: its PING overtakes what still waits in its buffer, and the PONG of a flush that was
        cancelled or timed out ends its reading task (InvalidStateError), which leaves the connection deaf.
        """
        self._asked += 1
        token = str(self._asked).encode()
        back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._echoes[token] = back
        try:
            await self.client.publish(self._echo, token)
            await back
        finally:
            del self._echoes[token]

    async def listen_to_itself(self) -> None:
        """Once, after connecting: what ``round_trip`` needs."""
        self._echo = self.client.new_inbox()
        await self.client.subscribe(self._echo, cb=self._heard)

    async def _heard(self, msg: Msg) -> None:
        back = self._echoes.get(msg.data)
        if back is not None and not back.done():
            back.set_result(None)

    def lose(self) -> None:
        """The connection is gone for good; the next one is another Link."""
        if self.lost.is_set():
            return
        self.lost.set()
        for callback in tuple(self.when_lost):
            callback()

    async def until_lost(self) -> None:
        """Wait for the loss. Returns the moment nats-py tells, and within a second if it forgets to."""
        while self.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.lost.wait()
        self.lose()


class PlaintextError(nats.errors.Error):
    """A certificate authority is set, and the server (or who stands before it) offers no TLS."""


class _TlsClient(Client):
    """Goes no further than the server's greeting when that offers no TLS: nats-py would go on without."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise PlaintextError("the server offers no TLS, and a certificate authority or certificate is set")
        await super()._process_info(info, initial_connection)


async def dial(url: str, name: str, credentials: Credentials, report: Callable[[Exception], None]) -> Link:
    """Connect once, with what the files of the credentials hold now.

    A server that refuses a key says so and hangs up at once; now and then the hanging up overtakes the saying. What
    looks like a reset is therefore asked again, a few times; a refusal that was heard stands, whatever came after it.

    Raises what nats-py raises, and CredentialsError. ``report`` gets errors that belong to no call; it must not raise.
    """
    for _ in range(RESETS):
        heard: list[Exception] = []
        reset = False
        try:
            return await _dial(url, name, credentials, heard.append, report)
        except (OSError, nats.errors.Error) as error:
            said = (error, *heard)
            reset = any(isinstance(one, ConnectionResetError) for one in said) and not any(map(refused, said))
            if not reset:
                raise
        finally:
            if not reset:
                for one in heard:
                    report(one)
    return await _dial(url, name, credentials, report, report)


async def _dial(
    url: str,
    name: str,
    credentials: Credentials,
    connecting: Callable[[Exception], None],
    report: Callable[[Exception], None],
) -> Link:
    """Once; ``connecting`` gets what is reported before the connection stands, ``report`` what comes after."""
    identity = await asyncio.to_thread(credentials.read)
    wants_tls = (identity.tls and not url.startswith("ws")) or url.startswith("tls:")  # wss is TLS from its first byte
    client = _TlsClient() if wants_tls else Client()
    link = Link(client)

    async def on_error(error: Exception) -> None:
        hear(error)

    async def on_closed() -> None:
        link.lose()

    hear = connecting
    try:
        await client.connect(
            servers=url.split(","),
            name=name,
            allow_reconnect=False,  # kybernate.bus.nats says why
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_SECONDS,
            ping_interval=PING_SECONDS,
            max_outstanding_pings=MISSED_PINGS,
            pending_size=0,  # nothing is kept for later while the connection is away
            error_cb=on_error,
            closed_cb=on_closed,
            **identity.options,
        )
        await link.listen_to_itself()
        hear = report
    except BaseException:
        with contextlib.suppress(Exception):
            await client.close()  # what connect leaves open when it fails half-way
        raise
    return link


def refused(error: Exception | None) -> bool:
    """Whether the server does not take these credentials."""
    return error is not None and "authorization" in f"{type(error).__name__} {error}".lower()


def forbidden(error: Exception | None) -> bool:
    """Whether the server refused one subject to these credentials; the connection goes on."""
    return error is not None and "permissions violation" in str(error).lower()


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Turn nats-py's errors into the bus' own. TimeoutError passes: who asked knows what it means."""
    try:
        yield
    except TimeoutError:
        raise
    except nats.errors.NoRespondersError as error:
        raise NoAnswerError(f"{what}: nobody serves it") from error
    except (
        nats.errors.OutboundBufferLimitError,
        nats.errors.ConnectionClosedError,
        nats.errors.ConnectionDrainingError,
    ) as error:
        raise BusDownError(f"{what}: the connection to NATS is away") from error
    except nats.errors.Error as error:
        raise BusError(f"{what}: {error}") from error
