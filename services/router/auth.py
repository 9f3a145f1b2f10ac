"""API keys and TLS of the router's port."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from kybernate.api_keys import KeyFile, Scope
from kybernate.http.head import Head
from kybernate.key_guard import KeyGuard
from kybernate.tls import ServerCertificate
from services.router.api import PRIORITIES, RouterError
from services.router.core.tenants import Tenants
from services.router.settings import RouterSettings


class Caller(NamedTuple):
    """Who sends a request."""

    name: str | None = None
    """Of the key; None if the router needs no keys."""
    highest_priority: int = max(PRIORITIES.values())
    """The highest that its requests may ask for."""
    tenant: str = ""
    """Its tenant, or the name of the key; empty if the router needs no keys."""
    lane: str = ""
    """Its tenant in the queue of a model; empty if no other one could call."""
    views: bool = True
    """It may see seats, and so the reasons of their managers."""


ANYBODY = Caller()
_CALLER = web.RequestKey("kyb.caller", Caller)


class ApiKeyGuard(KeyGuard):
    """Admits callers by the API keys of a file, each up to its limits; without a file, all callers."""

    def __init__(self, path: Path | None, most_requests: int = 4096) -> None:
        super().__init__(path)
        self._most_requests = most_requests
        self._requests: Counter[str] = Counter()
        self.tenants = Tenants()
        self.applied(self._file)

    @contextlib.contextmanager
    def admitted(self, request: web.Request, scopes: tuple[Scope, ...]) -> Iterator[None]:
        """While a request is handled. Raises RouterError 401, 403 or 429."""
        caller = request[_CALLER] = self.admit(request.headers, scopes, request.method, request.path)
        try:
            yield
        finally:
            self.release(caller)

    def admit(self, headers: Mapping[str, str], scopes: tuple[Scope, ...], method: str, path: str) -> Caller:
        """Return who sends a request, until ``release``. Raises RouterError 401, 403 or 429."""
        if not self.required:
            return ANYBODY
        key = self.allowed(headers, scopes, method, path)
        if self._requests[key.name] >= self._most_requests:
            text = f"the key {key.name!r} has {self._requests[key.name]} requests open, the most that it may have"
            raise RouterError(429, "too_many_requests", f"{text}; try again in 1 s", 1)
        self._requests[key.name] += 1
        tenant = self.tenants.of(key.tenant or "")
        priority = min(PRIORITIES[key.priority], PRIORITIES[tenant.priority] if tenant else PRIORITIES["high"])
        name = key.tenant or key.name
        return Caller(key.name, priority, name, name if self._several else "", key.may("view"))

    def release(self, caller: Caller) -> None:
        """End a request."""
        if caller.name is not None:
            self._requests[caller.name] -= 1

    def withheld(self, head: Head) -> frozenset[bytes]:
        """Return the headers that must not reach an engine, because they carry a key for the router, of any caller."""
        if head.withheld is None or head.withheld[0] is not self._file:
            names = frozenset(lower for lower, _, value in head.pairs if self.carries_key(lower, value))
            head.withheld = self._file, names
        return head.withheld[1]

    def applied(self, file: KeyFile) -> None:
        """Take the keys and tenants of a file that has changed."""
        super().applied(file)
        self.tenants.apply(file.tenants, time.monotonic())
        calling = (key for key in file.keys if key.may("infer") or key.may("gateway"))
        self._several = len({key.tenant or key.name for key in calling}) > 1


def sender_of(request: web.Request) -> Caller:
    """Return who sends a request."""
    caller: Caller = request.get(_CALLER, ANYBODY)
    return caller


def open_auth(settings: RouterSettings) -> tuple[ApiKeyGuard, ServerCertificate | None]:
    """Load the API keys and the certificate that the settings name. Raises ConfigError."""
    cert = settings.tls_cert_file
    guard = ApiKeyGuard(settings.api_keys_file, settings.caller_requests)
    return guard, ServerCertificate(cert) if cert is not None else None
