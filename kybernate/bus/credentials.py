"""Credentials of a process at a NATS server: nkey's seed, or JWT and seed, and TLS files, read at each connection.

A replaced file (a rotated key, a renewed certificate) is used from the next connection on, without a restart. Secrets
stay in the files and in ``Identity``, whose repr shows none of them.
"""

import base64
import binascii
import json
import os
import re
import ssl
import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kybernate.bus.port import BusError
from kybernate.files import read
from kybernate.tls import key_of, no_password, trusting

_JWT, _SEED = "NATS USER JWT", "USER NKEY SEED"
"""The two parts of a .creds file, as its lines name them."""


class CredentialsError(BusError):
    """A file of the credentials cannot be used; the text names it, the reason and the remedy, never its content."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The credentials of one connection."""

    options: dict[str, Any] = field(repr=False)
    """For nats-py's ``connect``: seed, TLS, inbox prefix."""
    tls: bool
    """True if a connection without TLS must be refused."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files with the credentials of one role. Without any file: for a server that requires none."""

    role: str = ""
    """The role, which has the rights (``kybernate.bus.rights``) and names the inbox. Empty: no role."""
    creds_file: Path | None = None
    """Seed of the role's nkey, one line that begins with ``SU``; in a file that ends in ``.creds``, for a server in
    operator mode, the user's JWT and its seed, as nsc writes them."""
    ca_file: Path | None = None
    """Authority of the server's certificate; if set, a server without TLS is refused."""
    cert_file: Path | None = None
    """Certificate of this client, for servers that verify clients."""

    @property
    def has_jwt(self) -> bool:
        """Whether the server is in operator mode."""
        return self.creds_file is not None and self.creds_file.suffix == ".creds"

    @property
    def file(self) -> Path | None:
        """Where the identity is: another attempt may succeed because it was replaced. None: there is none."""
        return self.creds_file or self.cert_file

    @property
    def grant(self) -> str:
        """How to give this role the rights of this version, for texts."""
        if self.has_jwt:
            return "give its user the rights that examples/nsc.sh lists"
        return "run kyb bus keys, reload NATS"

    def read(self, now: float = 0.0) -> Identity:
        """Read and check the files. Blocking, for an instant. Raises CredentialsError.

        ``now``: wall time at which a JWT must not have expired; 0: it may have.
        """
        options: dict[str, Any] = {"inbox_prefix": inbox(self.role)}
        if self.creds_file is not None:
            text = self._text(self.creds_file)
            if self.has_jwt:
                options["user_credentials"] = self._user(text, now)
            else:
                try:
                    public_key(text)
                except ValueError as error:
                    raise self._wrong("creds_file", f"is not the seed of a user's nkey: {error}") from None
                options["nkeys_seed_str"] = text
        context = self._tls()
        if context is not None:
            options["tls"] = context
        return Identity(options, tls=context is not None)

    def _user(self, text: str, now: float) -> object:
        """Return what nats-py takes as the content of a .creds file."""
        from nats.aio.client import RawCredentials  # here, because settings import this module

        found = {part: re.search(rf"-+BEGIN {part}-+\s+(\w[\w.=-]*)", text) for part in (_JWT, _SEED)}
        token, seed = (match[1] if match else "" for match in found.values())
        again = "write it anew with: nsc generate creds"
        if not (token and seed):
            raise self._wrong("creds_file", f"has no {_SEED if token else _JWT}; {again}")
        try:
            public = public_key(seed)
            subject, expires = _claims(token)
        except ValueError as error:
            raise self._wrong("creds_file", f"is not a user's JWT and seed: {error}; {again}") from None
        if subject != public:
            raise self._wrong("creds_file", f"its JWT is of user {subject}, its seed of {public}; {again}")
        if 0 < expires <= now:
            when = f"{datetime.fromtimestamp(expires, UTC):%Y-%m-%d %H:%M:%S} UTC"
            raise self._wrong("creds_file", f"its JWT expired at {when}: extend it (nsc edit user --expiry), {again}")
        # Written anew, because nats-py takes the line ends of another system as part of JWT and seed.
        return RawCredentials(f"BEGIN {_JWT}\n{token}\nBEGIN {_SEED}\n{seed}\n")

    def _tls(self) -> ssl.SSLContext | None:
        if self.ca_file is None and self.cert_file is None:
            return None
        try:
            context = trusting(self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise self._wrong("ca_file", f"{_why(error)}; it must hold PEM certificates of an authority") from None
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, key_of(self.cert_file), password=no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                text = f"{_why(error)}; it must hold a PEM certificate that fits the key in {key_of(self.cert_file)}"
                raise self._wrong("cert_file", text) from None
        return context

    def _text(self, path: Path) -> str:
        try:
            return read(path).decode("ascii").strip()
        except OSError as error:
            whose = f"role {self.role}" if self.role else "this service's role"
            remedy = f"it must hold the seed of {whose}; make one with: kyb bus keys"
            if self.has_jwt:
                remedy = f"it must hold the JWT and seed of {whose}; make one with: examples/nsc.sh"
            raise self._wrong("creds_file", f"{_why(error)}; {remedy}") from None
        except UnicodeDecodeError:
            raise self._wrong("creds_file", "holds no seed of a user's nkey: it is not text") from None

    def _wrong(self, name: str, why: str) -> CredentialsError:
        return CredentialsError(f"KYB_NATS_{name.upper()}={getattr(self, name)}: {why}")


NO_CREDENTIALS = Credentials()
"""For servers that require none."""


ANY_INBOX = "_INBOX"
"""Prefix of every inbox, ours (``_INBOX_router.…``) and those of other clients (``_INBOX.…``)."""


def inbox(role: str) -> str:
    """Prefix of the inboxes of a role, e.g. ``_INBOX_router``; other roles may not subscribe to them."""
    return f"{ANY_INBOX}_{role}" if role else ANY_INBOX


_MISTYPED = "its check sum is wrong: it is cut off or mistyped"


def new_seed() -> str:
    """A new seed of a user's nkey, from the operating system's randomness."""
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


def _claims(token: str) -> tuple[str, float]:
    """Subject and expiry of a JWT (wall time; 0: never), whose signature the server checks. Raises ValueError."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return str(claims["sub"]), float(claims.get("exp", 0))
    except (LookupError, TypeError, ValueError):
        raise ValueError("the JWT is cut off or mistyped") from None


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
