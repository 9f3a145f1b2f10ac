"""API keys and TLS of the router's port."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from aiohttp import web

from kybernate.api_keys import ApiKey, KeyFile, Scope, digest_of, find, load
from kybernate.config_errors import ConfigError
from kybernate.files import changes
from kybernate.logs import get_logger
from kybernate.tls import ServerCertificate
from services.router.api import PRIORITIES, RouterError, cause_of, random_id
from services.router.core.head import Head, Pair
from services.router.core.tenants import Tenants
from services.router.settings import RouterSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADER = "X-Kyb-Key"
"""Header for callers that send the engine's key as Authorization; without it, Authorization has the router's key."""


class Caller(NamedTuple):
    """Who sends a request."""

    name: str | None = None
    """Of the key; None if the router needs no keys."""
    highest_priority: int = max(PRIORITIES.values())
    """The highest that its requests may ask for."""
    tenant: str = ""
    """Its tenant, or the name of the key; empty if the router needs no keys."""
    views: bool = True
    """It may see seats, and so the reasons of their managers."""


ANYBODY = Caller()
_CALLER = web.RequestKey("kyb.caller", Caller)
_CAUSE = web.RequestKey("kyb.cause", str)


class ApiKeyGuard:
    """Admits callers by the API keys of a file; without a file, all callers."""

    def __init__(self, path: Path | None, most_requests: int = 4096, workers: int = 1) -> None:
        self._path, self._most_requests = path, most_requests
        self._requests: Counter[str] = Counter()
        self._file = load(path) if path is not None else KeyFile()
        self.tenants = Tenants(workers=workers)
        self.tenants.apply(self._file.tenants, time.monotonic())

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    def needs(self, *scopes: Scope) -> Callable[[Handler], Handler]:
        """Wrap a handler that needs one of these scopes: 401 without a known key, 403 if the key has none of them."""

        def guard(handler: Handler) -> Handler:
            async def guarded(request: web.Request) -> web.StreamResponse:
                caller = self.admit(request.headers, scopes, request.method, request.path)
                request[_CALLER], request[_CAUSE] = caller, self._cause(request.headers)
                try:
                    return await handler(request)
                finally:
                    self.release(caller)

            return guarded if self._path is not None else handler

        return guard

    def admit(self, headers: Mapping[str, str], scopes: tuple[Scope, ...], method: str, path: str) -> Caller:
        """Return who sends a request, until ``release``. Raises RouterError 401, 403 or 429."""
        if self._path is None:
            return ANYBODY
        key = self._key(headers)
        if not any(key.may(scope) for scope in scopes):
            get_logger().warning("caller.forbidden", caller=key.name, method=method, path=path)
            text = f"the key {key.name!r} has the scopes {', '.join(key.scopes)}; this call needs {' or '.join(scopes)}"
            raise RouterError(403, "insufficient_permissions", text)
        if self._requests[key.name] >= self._most_requests:
            text = f"the key {key.name!r} has {self._requests[key.name]} requests open (KYB_CALLER_REQUESTS)"
            raise RouterError(429, "too_many_requests", f"{text}; try again in 1 s", 1)
        self._requests[key.name] += 1
        tenant = self.tenants.of(key.tenant or "")
        priority = min(PRIORITIES[key.priority], PRIORITIES[tenant.priority] if tenant else PRIORITIES["high"])
        return Caller(key.name, priority, key.tenant or key.name, key.may("view"))

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise RouterError 401 where keys are needed and this request has no known one."""
        if self._path is not None:
            self._key(headers)

    def _key(self, headers: Mapping[str, str]) -> ApiKey:
        token = _token(headers)
        key = find(self._file.keys, token) if token else None
        if key is None:
            what = "this API key is not known" if token else "an API key is needed"
            raise RouterError(401, "invalid_api_key", f"{what}; send Authorization: Bearer <key> or {HEADER}: <key>")
        return key

    def release(self, caller: Caller) -> None:
        """End a request."""
        if caller.name is not None:
            self._requests[caller.name] -= 1

    def withheld(self, head: Head) -> frozenset[bytes]:
        """Return the headers that must not reach an engine, because they carry a key for the router, of any caller."""
        if head.withheld is None or head.withheld[0] is not self._file:
            head.withheld = self._file, frozenset(self._withheld(head.pairs))
        return head.withheld[1]

    def _withheld(self, pairs: Iterable[Pair]) -> Iterator[bytes]:
        if not (digests := {key.sha256 for key in self._file.keys}):
            return
        for lower, _, value in pairs:
            parts = {value.strip(b" \t"), value.split(b" ")[-1].strip(b" \t")}
            if not digests.isdisjoint(digest_of(part.decode("utf-8", "surrogateescape")) for part in parts):
                yield lower

    def _cause(self, headers: Mapping[str, str]) -> str:
        given = cause_of(headers)
        return (
            random_id()
            if any(self._withheld([(b"x-request-id", b"", given.encode("utf-8", "surrogateescape"))]))
            else given
        )

    async def watch(self) -> NoReturn:
        """Apply each change of the file until cancelled. An invalid file is logged and changes nothing."""
        if self._path is None:
            await asyncio.Event().wait()
        assert self._path is not None
        async for _ in changes(self._path, asyncio.Event()):
            try:
                file = await asyncio.to_thread(load, self._path)
            except ConfigError as error:
                get_logger().error("keys.refused", reason=str(error), meaning="the previous keys stay in force")
                continue
            if file != self._file:
                self._file = file
                self.tenants.apply(file.tenants, time.monotonic())
                get_logger().info("keys.applied", names=[key.name for key in file.keys])
        raise AssertionError("changes ended")


def sender_of(request: web.Request) -> Caller:
    """Return who sends a request."""
    caller: Caller = request.get(_CALLER, ANYBODY)
    return caller


def caller_of(request: web.Request) -> str | None:
    """Return the name of the caller's key; None if the router needs no keys."""
    return sender_of(request).name


def request_cause(request: web.Request) -> str:
    """Return the cause of what a request to the router itself begins: its X-Request-Id unless that is a key."""
    return request.get(_CAUSE) or cause_of(request.headers)


def _token(headers: Mapping[str, str]) -> str:
    """Return the caller's key."""
    for header in ("x-kyb-key", "authorization", "x-api-key"):  # Anthropic's clients send the last one
        value = headers.get(header, "").strip(" \t")  # as ``withheld`` does
        if header == "authorization":
            kind, _, token = value.partition(" ")
            value = token.strip(" \t") if kind.lower() == "bearer" else ""
        if value:
            return value
    return ""


def open_auth(settings: RouterSettings) -> tuple[ApiKeyGuard, ServerCertificate | None]:
    """Load the API keys and the certificate that the settings name. Raises ConfigError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is not None:
        raise ConfigError(f"KYB_TLS_KEY_FILE={key}: KYB_TLS_CERT_FILE is not set; set both, or none")
    guard = ApiKeyGuard(settings.api_keys_file, settings.caller_requests, max(1, settings.workers))
    return guard, ServerCertificate(cert, key) if cert is not None else None
