"""Keys of the router's HTTP API and their scopes. The file holds hashes; a key itself is shown once, when it is made.

A key has 256 random bits: it cannot be guessed, so that one round of SHA-256 is enough to store it.
"""

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kybernate.config_errors import ConfigError, Document, Source, Strict, read_documents

Scope = Literal["infer", "view", "signals", "admin"]
"""infer: inference calls, the list of models, /v1/hold, /v1/wake; view: /v1/seats, /v1/events, the list of models;
signals: POST /v1/signals; admin: activate, park, pin, unpin, and all of view."""

Priority = Literal["low", "normal", "high"]

RESERVED = ("router",)
"""Names that managers take for a router itself."""


def _fits(pattern: str, what: str, remedy: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise PydanticCustomError("form", what, {"remedy": remedy})
        return text

    return AfterValidator(check)


Name = Annotated[
    str, _fits(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", "cannot name a caller", "write up to 63 of a-z, 0-9, - and .")
]
Digest = Annotated[str, _fits(r"[0-9a-f]{64}", "is no SHA-256", "make the key and its row with: kyb router keys add")]


class ApiKey(Strict):
    """One caller."""

    name: Name
    """Name of the caller, for audit records and logs."""
    sha256: Digest
    """Of the key, in hexadecimal digits."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    priority: Priority = "normal"
    """Highest priority that its requests may ask for with X-Kyb-Priority."""

    def may(self, scope: Scope) -> bool:
        """True if this caller has the scope."""
        return scope in self.scopes or (scope == "view" and "admin" in self.scopes)


class _File(Strict):
    keys: tuple[ApiKey, ...] = ()


def load(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file. Raises ConfigError, also for a file without keys, a repeated or a reserved name."""
    document = read_documents(path)[0]
    keys = document.validate(_File, document.data).keys
    names = Counter(key.name for key in keys)
    for at, key in enumerate(keys):
        place = ("keys", at, "name")
        if names[key.name] > 1:
            raise document.source.error(place, key.name, "is there twice", "give each key its own name")
        if key.name in RESERVED:
            raise document.source.error(place, key.name, "is reserved", "give the key another name")
    if not keys:
        raise document.source.error(("keys",), None, "holds no key", "make one with: kyb router keys add")
    return keys


def find(keys: Iterable[ApiKey], token: str) -> ApiKey | None:
    """Return the key with this token, or None. The time taken does not depend on which one it is."""
    digest, found = digest_of(token), None
    for key in keys:
        if hmac.compare_digest(key.sha256, digest):
            found = key
    return found


def make(name: str, scopes: Iterable[str]) -> tuple[ApiKey, str]:
    """Make a key for a caller; return its row and the key itself. Raises ConfigError for an invalid name or scope."""
    token = f"kyb_{secrets.token_urlsafe(32)}"
    row = {"name": name, "sha256": digest_of(token), "scopes": tuple(scopes)}
    if name in RESERVED:
        raise ConfigError(f"name: {name!r} is reserved; give the key another name")
    return Document(row, Source()).validate(ApiKey, row), token


def digest_of(token: str) -> str:
    """Return the hash that the file holds of a key."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def dump(keys: Iterable[ApiKey]) -> str:
    """Return the text of a file with these keys."""
    rows = [
        {"name": key.name, "sha256": key.sha256, "scopes": list(key.scopes)}
        | ({} if key.priority == "normal" else {"priority": key.priority})
        for key in keys
    ]
    return "# Keys of Kybernate's router, as hashes. Made by: kyb router keys\n" + yaml.safe_dump(
        {"keys": rows}, sort_keys=False
    )
