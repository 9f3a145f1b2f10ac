"""The bus: ``open_bus`` for the services, the protocol in ``port``. Nothing outside this package imports nats-py."""

from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

from kybernate.bus.credentials import NO_CREDENTIALS, Credentials, CredentialsError
from kybernate.bus.port import Bus, BusDownError, BusError

NATS_SCHEMES = ("nats", "tls", "ws", "wss")


def open_bus(
    url: str, *, source: str, name: str, credentials: Credentials = NO_CREDENTIALS, follows: str = ""
) -> AbstractAsyncContextManager[Bus]:
    """A bus that connects in the background, until the context ends.

    ``nats://host:port`` (also tls, ws, wss; several separated by commas) is NATS. ``source`` is the CloudEvents source
    of sent messages, e.g. ``kyb/router/router-0``; the server's monitoring shows ``name``. A server that does not reach
    the leader of the bucket ``follows`` is left for one that does. Raises ValueError for other schemes.
    """
    scheme = urlsplit(url).scheme
    if scheme not in NATS_SCHEMES:
        raise ValueError(f"bus URL {url!r}: scheme {scheme!r} is none of {', '.join(NATS_SCHEMES)}")
    from kybernate.bus.nats import NatsBus  # here, because ``import kybernate.bus`` must stay light

    return NatsBus(url, source=source, name=name, credentials=credentials, follows=follows).opened()
