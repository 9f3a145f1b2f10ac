"""TLS: the certificate of a server, reloaded when it changes, connections that take little memory, and the authorities
that a client trusts."""

import asyncio
import contextlib
import errno
import os
import ssl
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from kybernate.files import changes, read
from kybernate.logs import get_logger

if TYPE_CHECKING:
    from kybernate.http_api import ApiError

MOST_HANDSHAKES = 1024
"""TLS connections whose handshake is not complete, 40 KiB each: then the oldest of them ends. A handshake takes
milliseconds."""


class ServerCertificate:
    """TLS of a port; later connections use a renewed certificate.

    Named in texts as ``KYB_TLS_CERT_FILE``. Raises ConfigError when it cannot be used.
    """

    def __init__(self, cert: Path) -> None:
        self._cert, self._key = cert, key_of(cert)
        self._loading = asyncio.Lock()
        self._wrong = ""
        """What is wrong with the files; empty: the present certificate is theirs."""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            _load(self.context, *self._checked())
        except (OSError, ssl.SSLError) as error:
            from kybernate.config_errors import ConfigError  # needs PyYAML, which the GPU bench does without

            raise ConfigError(_unusable(cert, self._key, error)) from None

    @property
    def refused(self) -> str | None:
        """Why the files' last change counts for nothing; None: the present certificate is theirs."""
        gone = [f"KYB_TLS_CERT_FILE: {path}: no such file" for path in (self._cert, self._key) if not path.exists()]
        why = gone[0] if gone else self._wrong
        return f"{why}; the previous certificate stays in force until a restart, which fails" if why else None

    async def watch(self) -> None:
        """Load each change of the certificate or its key, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for path in {self._cert, self._key}:
                group.create_task(self._follow(path))

    async def _follow(self, path: Path) -> None:
        async for _ in changes(path, asyncio.Event()):
            try:
                async with self._loading:
                    _load(self.context, *await asyncio.to_thread(self._checked))
                self._wrong = ""
            except (OSError, ssl.SSLError) as error:
                self._wrong = _unusable(self._cert, self._key, error)
                get_logger().error("certificate.refused", reason=self._wrong, meaning="the previous one stays in force")

    def _checked(self) -> tuple[bytes, bytes]:
        # In another context first: one that got a certificate with a wrong key can serve no connection any more. Both
        # contexts get the same bytes: the files may be replaced meanwhile.
        found = read(self._cert), read(self._key)
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *found)
        return found


def key_of(cert: Path) -> Path:
    """The private key of a certificate: the file beside it that ends in ``.key``, else the certificate's own file."""
    beside = cert.with_suffix(".key")
    return beside if beside.exists() else cert


def no_password() -> str:
    """For keys with a pass phrase: OpenSSL would ask for it at the terminal, and wait."""
    raise OSError(errno.EACCES, "its private key has a pass phrase; store it without one")


def trusting(ca_file: Path | str | None) -> ssl.SSLContext:
    """Return a client's context that trusts the authorities in ``ca_file`` (PEM); None: those of the machine.

    Python 3.13 refuses authorities without a key usage extension (RFC 5280, ``VERIFY_X509_STRICT``); many clusters'
    own authority has none, and Go, so kubectl and kubelet, takes them. Signatures, names and times are checked. Raises
    OSError or ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def trust(context: ssl.SSLContext, ca_file: Path, name: str) -> None:
    """Let a client's context also trust the authorities in a file, the value of the setting ``name``. Raises
    ConfigError."""
    from kybernate.config_errors import ConfigError

    try:
        context.load_verify_locations(ca_file)
    except OSError as error:  # ssl.SSLError is one
        why = "no PEM file" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"{name}={ca_file}: {why}; it must hold PEM certificates") from None


async def follow_authorities(context: ssl.SSLContext, ca_file: Path | None = None) -> None:
    """Let a client's context also trust what comes into ``ca_file`` (None: the file of the machine's authorities),
    until cancelled."""
    paths = ssl.get_default_verify_paths()  # its ``cafile`` is None while there is no such file
    file = ca_file or os.environ.get(paths.openssl_cafile_env, paths.openssl_cafile)
    async for _ in changes(Path(file), asyncio.Event()):
        with contextlib.suppress(OSError):  # ssl.SSLError, too: half-written
            context.load_verify_locations(file)


def address_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of the other side; empty if it has left."""
    return str((transport.get_extra_info("peername") or ("",))[0])


class Caller(asyncio.Protocol):
    """What has a connection once TLS is begun."""

    busy = False
    """A request has arrived completely and is not answered."""


class Accepted(Protocol):
    """A connection that was counted."""

    @property
    def busy(self) -> bool:
        """Whether a request has arrived completely and is not answered."""

    def abort(self) -> None:
        """Close it at once."""


class AcceptLimits:
    """Counts the connections of a port."""

    refused = 0
    """Connections that get their refusal now."""

    def __init__(self, rejected: Callable[[str], None] = lambda _: None) -> None:
        """``rejected`` counts a connection that is closed."""
        self.rejected = rejected
        self.shaking: dict[TlsCaller, None] = {}
        """Those in their handshake, the oldest first."""
        self._by_address: Counter[str] = Counter()

    def enter(self, address: str, _: Accepted, /) -> "ApiError | None":
        """Count a new connection; return why it is refused, or None."""
        self._by_address[address] += 1
        return None

    def leave(self, address: str, _: Accepted, /) -> None:
        """Forget a connection that was counted."""
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class _Tls(sslproto.SSLProtocol):
    max_size = 16 * 1024
    """Of the buffer that each connection has: one record. asyncio's own has 256 KiB."""

    def __init__(self, *args: Any, shaken: Callable[[], None], lost: Callable[[], None], **more: Any) -> None:
        super().__init__(*args, **more)
        self._shaken, self._lost = shaken, lost

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        self._shaken()
        super()._on_handshake_complete(handshake_exc)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell the caller's side, and count it no more."""
        super().connection_lost(exc)
        self._lost()


class TlsCaller(asyncio.Protocol):
    """A connection to a TLS port. It is counted when it is accepted, and takes no memory for TLS before it sends."""

    def __init__(
        self,
        limits: AcceptLimits,
        context: ssl.SSLContext,
        seconds: float,
        caller: Callable[[], Caller],
    ) -> None:
        self._limits, self._context, self._seconds, self._make = limits, context, seconds, caller
        self._caller: Caller | None = None
        """From its first byte on."""
        self._transport: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._address: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or close it."""
        self._transport = cast(asyncio.Transport, transport)
        address = address_of(transport)
        if self._limits.enter(address, self) is not None:
            self._transport.abort()
            return
        self._address = address
        self._late = asyncio.get_running_loop().call_later(self._seconds, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Begin the handshake."""
        transport, address = self._transport, self._address
        if transport is None or address is None or transport.is_closing():
            return
        shaking = self._limits.shaking
        if len(shaking) >= MOST_HANDSHAKES:
            self._limits.rejected("handshakes")
            next(iter(shaking)).abort()
        shaking[self] = None
        loop, caller = asyncio.get_running_loop(), self._make()
        self._caller = caller
        more = {"server_side": True, "ssl_handshake_timeout": self._seconds}
        tls = _Tls(loop, caller, self._context, None, shaken=self.shaken, lost=self._end, **more)
        transport.set_protocol(tls)
        tls.connection_made(transport)
        while data:
            buffer = tls.get_buffer(len(data))
            size = min(len(data), len(buffer))
            buffer[:size], data = data[:size], data[size:]
            tls.buffer_updated(size)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that sent nothing."""
        del exc
        self._end()

    def shaken(self) -> None:
        """The handshake is complete."""
        if self._late is not None:
            self._late.cancel()
        self._limits.shaking.pop(self, None)

    @property
    def busy(self) -> bool:
        """Whether a request has arrived completely and is not answered."""
        return self._caller is not None and self._caller.busy

    def abort(self) -> None:
        """Close the connection at once."""
        self.shaken()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self.shaken()
        if self._address is not None:
            self._limits.leave(self._address, self)
        self._address = self._transport = self._caller = None


def _load(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Load into a context, in the thread of its handshakes: OpenSSL does not allow another one to change it."""
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        context.load_cert_chain(cert_path, key_path, password=no_password)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A file in memory, while the context is open."""
    copy = os.memfd_create("tls")
    try:
        with os.fdopen(os.dup(copy), "wb") as file:
            file.write(data)
        yield f"/proc/self/fd/{copy}"
    finally:
        os.close(copy)


def _unusable(cert: Path, key: Path, error: OSError | ssl.SSLError) -> str:
    why = "no PEM file, or a key of another certificate" if isinstance(error, ssl.SSLError) else error.strerror
    return f"KYB_TLS_CERT_FILE={cert}: {why}; it must hold a PEM certificate that fits the key in {key}"
