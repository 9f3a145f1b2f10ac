"""TLS: the certificate of a server, reloaded when it changes, and the authorities that a client trusts."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kybernate.files import changes
from kybernate.logs import get_logger


class ServerCertificate:
    """TLS of a port; later connections use a renewed certificate.

    Named in texts as ``KYB_TLS_CERT_FILE``. Raises ConfigError when it cannot be used.
    """

    def __init__(self, cert: Path) -> None:
        self._cert, self._key = cert, key_of(cert)
        self._loading = asyncio.Lock()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            _load(self.context, *self._checked())
        except (OSError, ssl.SSLError) as error:
            from kybernate.config_errors import ConfigError  # needs PyYAML, which the GPU bench does without

            raise ConfigError(_unusable(cert, self._key, error)) from None

    async def watch(self) -> NoReturn:
        """Load each change of the certificate or its key, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for path in {self._cert, self._key}:
                group.create_task(self._follow(path))
        raise AssertionError("changes ended")

    async def _follow(self, path: Path) -> None:
        async for _ in changes(path, asyncio.Event()):
            try:
                async with self._loading:
                    _load(self.context, *await asyncio.to_thread(self._checked))
            except (OSError, ssl.SSLError) as error:
                reason = _unusable(self._cert, self._key, error)
                get_logger().error("certificate.refused", reason=reason, meaning="the previous one stays in force")

    def _checked(self) -> tuple[bytes, bytes]:
        # In another context first: one that got a certificate with a wrong key can serve no connection any more. Both
        # contexts get the same bytes: the files may be replaced meanwhile.
        found = self._cert.read_bytes(), self._key.read_bytes()
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *found)
        return found


def key_of(cert: Path) -> Path:
    """The private key of a certificate: the file beside it that ends in ``.key``, else the certificate's own file."""
    beside = cert.with_suffix(".key")
    return beside if beside.exists() else cert


def trusting(ca_file: Path | str | None) -> ssl.SSLContext:
    """Return a client's context that trusts the authorities in ``ca_file`` (PEM); None: those of the machine.

    Python 3.13 refuses authorities without a key usage extension (RFC 5280, ``VERIFY_X509_STRICT``); many clusters'
    own authority has none, and Go, so kubectl and kubelet, takes them. Signatures, names and times are checked. Raises
    OSError or ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _load(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Load into a context, in the thread of its handshakes: OpenSSL does not allow another one to change it."""
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        context.load_cert_chain(cert_path, key_path)


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
    why = error.strerror or str(error)
    return f"KYB_TLS_CERT_FILE={cert}: {why}; it must hold a PEM certificate that fits the key in {key}"
