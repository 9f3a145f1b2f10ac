"""Keys of the router's HTTP API and their scopes. The file holds hashes; a key itself is shown once, when it is made.

A key has 256 random bits: it cannot be guessed, so that one round of SHA-256 is enough to store it.
"""

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from kybernate.config_errors import ConfigError, Document, Source, Strict, read_documents

Scope = Literal["infer", "gateway", "view", "signals", "admin"]
"""infer: inference calls, the list of models, /v1/wake; gateway: permits of /v1/hold; view: what the console shows,
the list of models; signals: POST /v1/signals; admin: activate, park, pin, unpin, and all of view."""

Priority = Literal["low", "normal", "high"]

PREFIX = b"kyb_"
"""Of every key that is made here."""
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


Limit = Annotated[int, Field(ge=1)]


class Tenant(Strict):
    """Callers that share limits, which each router counts by itself."""

    name: Name
    models: tuple[str, ...] = ("*",)
    """Names of models that its callers may use and see; ``*`` stands for any text."""
    priority: Priority = "high"
    """Highest priority of its callers, whatever their keys allow."""
    requests_per_minute: Limit | None = None
    concurrency: Limit | None = None
    """Requests at a time, held or in flight."""

    def may_use(self, model: str) -> bool:
        """True if its callers may use this model."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


class ApiKey(Strict):
    """One caller."""

    name: Name
    """Name of the caller, for audit records and logs."""
    sha256: Digest
    """Of the key, in hexadecimal digits."""
    scopes: Annotated[tuple[Scope, ...], Field(min_length=1)]
    priority: Priority = "normal"
    """Highest priority that its requests may ask for with X-Kyb-Priority."""
    tenant: Name | None = None
    """One of the file's tenants; none: the key is a tenant without limits."""

    def may(self, scope: Scope) -> bool:
        """True if this caller has the scope."""
        return scope in self.scopes or (scope == "view" and "admin" in self.scopes)


class KeyFile(Strict):
    """The callers of a router."""

    keys: tuple[ApiKey, ...] = ()
    tenants: tuple[Tenant, ...] = ()


def load(path: Path) -> KeyFile:
    """Read the keys of a file. Raises ConfigError, also for a file without keys, a repeated or a reserved name."""
    document = read_documents(path)[0]
    file = document.validate(KeyFile, document.data)
    keys, tenants = file.keys, {tenant.name for tenant in file.tenants}
    for kind, names in (("keys", [key.name for key in keys]), ("tenants", [tenant.name for tenant in file.tenants])):
        counts = Counter(names)
        for at, name in enumerate(names):
            if counts[name] > 1:
                raise document.source.error((kind, at, "name"), name, "is there twice", "give each its own name")
            if name in RESERVED:
                raise document.source.error((kind, at, "name"), name, "is reserved", "use another name")
    first: dict[str, str] = {}
    for at, key in enumerate(keys):
        if (other := first.setdefault(key.sha256, key.name)) != key.name:
            what = f"is the key of {other}, too: one of the two names is never used"
            raise document.source.error(
                ("keys", at, "sha256"), None, what, "make a key of its own: kyb router keys add"
            )
        if key.tenant is not None and key.tenant not in tenants:
            known = f"it has {', '.join(sorted(tenants)) or 'none'}"
            raise document.source.error(("keys", at, "tenant"), key.tenant, "is no tenant of the file", known)
        if key.tenant is None and key.name in tenants:  # it would be taken for that tenant
            remedy = f"use another name, or add tenant: {key.name}"
            raise document.source.error(("keys", at, "name"), key.name, "is the name of a tenant", remedy)
    if not keys:
        raise document.source.error(("keys",), None, "holds no key", "make one with: kyb router keys add")
    return file


def make(name: str, scopes: Iterable[str]) -> tuple[ApiKey, str]:
    """Make a key for a caller; return its row and the key itself. Raises ConfigError for an invalid name or scope."""
    token = PREFIX.decode() + secrets.token_urlsafe(32)
    row = {"name": name, "sha256": digest_of(token), "scopes": tuple(scopes)}
    if name in RESERVED:
        raise ConfigError(f"name: {name!r} is reserved; give the key another name")
    return Document(row, Source()).validate(ApiKey, row), token


def digest_of(token: str) -> str:
    """Return the hash that the file holds of a key."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def dump(keys: Iterable[ApiKey], tenants: Iterable[Tenant] = ()) -> str:
    """Return the text of a file with these keys and tenants."""
    found = {"keys": [_row(key) for key in keys], "tenants": [_row(tenant) for tenant in tenants]}
    rows = {name: rows for name, rows in found.items() if rows}
    return "# Keys of Kybernate's router, as hashes. Made by: kyb router keys\n" + yaml.safe_dump(rows, sort_keys=False)


def _row(model: Strict) -> dict[str, object]:
    return model.model_dump(mode="json", exclude_defaults=True, by_alias=True)
