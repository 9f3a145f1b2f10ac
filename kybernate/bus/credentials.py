"""Credentials of a process at a NATS server: its nkey's seed and TLS files, read at each connection.

A replaced file (a rotated key, a renewed certificate) is used from the next connection on, without a restart. Secrets
stay in the files and in ``Identity``, whose repr shows none of them.
"""

import base64
import binascii
import ssl
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kybernate.bus.port import BusError
from kybernate.tls import trusting

NAMES = {"nkey_file": "NKEY_FILE", "ca_file": "CA_FILE", "cert_file": "CERT_FILE", "key_file": "KEY_FILE"}


class CredentialsError(BusError):
    """A file of the credentials cannot be used; the text names it, the reason and the remedy, never its content."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials of one connection."""

    options: dict[str, Any] = field(repr=False)
    """For nats-py's ``connect``: seed, TLS, inbox prefix."""
    public_key: str = ""
    """Of the nkey: ``U…``, which is no secret; empty without one."""
    tls: bool = False
    """True if a connection without TLS must be refused."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files with the credentials of one role. Without any file: for a server that requires none."""

    role: str = ""
    """The role, which has the rights (``kybernate.bus.rights``) and names the inbox. Empty: no role."""
    nkey_file: Path | None = None
    """Seed of the role's nkey, one line that begins with ``SU``."""
    ca_file: Path | None = None
    """Authority of the server's certificate; if set, a server without TLS is refused."""
    cert_file: Path | None = None
    """Certificate of this client, for servers that verify clients."""
    key_file: Path | None = None
    """The certificate's private key."""

    @property
    def inbox(self) -> str:
        """Prefix of the subjects for answers to this role; other roles may not subscribe to it."""
        return inbox(self.role)

    @property
    def renewable(self) -> bool:
        """True if another attempt may succeed because a file was replaced."""
        return self.nkey_file is not None or self.cert_file is not None

    def read(self) -> Identity:
        """Read and check the files. Blocking, for an instant. Raises CredentialsError."""
        options: dict[str, Any] = {"inbox_prefix": self.inbox}
        public = ""
        if self.nkey_file is not None:
            seed = self._text(self.nkey_file, "nkey_file")
            try:
                public = public_key(seed)
            except ValueError as error:
                raise self._wrong("nkey_file", f"is not the seed of a user's nkey: {error}") from None
            options["nkeys_seed_str"] = seed
        context = self._tls()
        if context is not None:
            options["tls"] = context
        return Identity(options, public, tls=context is not None)

    def _tls(self) -> ssl.SSLContext | None:
        if self.key_file is not None and self.cert_file is None:
            raise self._wrong("key_file", "needs the certificate, too: set KYB_NATS_CERT_FILE")
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = trusting(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise self._wrong("ca_file", f"{_why(error)}; it must hold PEM certificates of an authority") from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                text = f"{_why(error)}; it must hold a PEM certificate that fits KYB_NATS_KEY_FILE={self.key_file}"
                raise self._wrong("cert_file", text) from None
        return context

    def _text(self, path: Path, name: str) -> str:
        try:
            return path.read_text(encoding="ascii").strip()
        except OSError as error:
            whose = f"role {self.role}" if self.role else "this service's role"
            remedy = f"it must hold the seed of {whose}; make one with: kyb bus keys"
            raise self._wrong(name, f"{_why(error)}; {remedy}") from None
        except UnicodeDecodeError:
            raise self._wrong(name, "is not the seed of a user's nkey: it is not text") from None

    def _wrong(self, name: str, why: str) -> CredentialsError:
        return CredentialsError(f"KYB_NATS_{NAMES[name]}={getattr(self, name)}: {why}")


NO_CREDENTIALS = Credentials()
"""For servers that require none."""


ANY_INBOX = "_INBOX"
"""Prefix of every inbox, ours (``_INBOX_router.…``) and those of other clients (``_INBOX.…``)."""


def inbox(role: str) -> str:
    """Prefix of the inboxes of a role, e.g. ``_INBOX_router``."""
    return f"{ANY_INBOX}_{role}" if role else ANY_INBOX


_MISTYPED = "its check sum is wrong: it is cut off or mistyped"


def new_seed() -> str:
    """A new seed of a user's nkey, from the operating system's randomness."""
    import os

    import nkeys

    return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())


def public_key(seed: str) -> str:
    """Return the public key ``U…`` of a seed. Raises ValueError with the reason, without the seed."""
    import nkeys  # here: most processes that import this module have no key

    if not seed:
        raise ValueError("it is empty")
    if len(seed.split()) > 1:
        raise ValueError("it holds more than one line")
    if not seed.startswith("SU"):
        kind = "a public key, whose seed is in another file" if seed.startswith("U") else "something else"
        raise ValueError(f"a user's seed begins with SU, this is {kind}")
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except binascii.Error:
        raise ValueError(_MISTYPED) from None
    if len(raw) != 36 or struct.unpack("<H", raw[-2:])[0] != nkeys.crc16(bytearray(raw[:-2])):
        raise ValueError(_MISTYPED)
    pair = nkeys.from_seed(bytearray(seed.encode()))
    try:
        return str(pair.public_key.decode())
    finally:
        pair.wipe()


def _no_password() -> str:
    raise ValueError("its private key is encrypted, and no password can be entered")


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
