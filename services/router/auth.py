"""API keys and TLS of the router's port."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from kybernate.api_keys import ApiKey, Scope, find, load
from kybernate.config_errors import ConfigError
from kybernate.files import changes
from kybernate.logs import get_logger
from kybernate.tls import ServerCertificate
from services.router.api import RouterError
from services.router.settings import RouterSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADER = "X-Kyb-Key"
"""Header for callers that send the engine's key as Authorization; without it, Authorization has the router's key."""
_CALLER, _WITHHELD = "kyb.caller", "kyb.withheld"
_NOTHING: frozenset[str] = frozenset()


class ApiKeyGuard:
    """Admits callers by the API keys of a file; without a file, all callers."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: tuple[ApiKey, ...] = load(path) if path is not None else ()

    def needs(self, *scopes: Scope) -> Callable[[Handler], Handler]:
        """Wrap a handler that needs one of these scopes: 401 without a known key, 403 if the key has none of them."""

        def guard(handler: Handler) -> Handler:
            async def guarded(request: web.Request) -> web.StreamResponse:
                self._admit(request, scopes)
                return await handler(request)

            return guarded if self._path is not None else handler

        return guard

    async def watch(self) -> NoReturn:
        """Apply each change of the file until cancelled. An invalid file is logged and changes nothing."""
        if self._path is None:
            await asyncio.Event().wait()
        assert self._path is not None
        async for _ in changes(self._path, asyncio.Event()):
            try:
                keys = await asyncio.to_thread(load, self._path)
            except ConfigError as error:
                get_logger().error("keys.refused", reason=str(error), meaning="the previous keys stay in force")
                continue
            if keys != self._keys:
                self._keys = keys
                get_logger().info("keys.applied", names=[key.name for key in keys])
        raise AssertionError("changes ended")

    def _admit(self, request: web.Request, scopes: tuple[Scope, ...]) -> None:
        token, header = _token(request)
        key = find(self._keys, token) if token else None
        if key is None:
            what = "this API key is not known" if token else "an API key is needed"
            raise RouterError(401, "invalid_api_key", f"{what}; send Authorization: Bearer <key> or {HEADER}: <key>")
        if not any(key.may(scope) for scope in scopes):
            get_logger().warning("caller.forbidden", caller=key.name, method=request.method, path=request.path)
            text = f"the key {key.name!r} has the scopes {', '.join(key.scopes)}; this call needs {' or '.join(scopes)}"
            raise RouterError(403, "insufficient_permissions", text)
        request[_CALLER], request[_WITHHELD] = key.name, frozenset({header.lower()})


def caller_of(request: web.Request) -> str | None:
    """Return the name of the caller's key; None if the router needs no keys."""
    name: str | None = request.get(_CALLER)
    return name


def withheld(request: web.Request) -> frozenset[str]:
    """Return the headers that must not reach an engine, because they carry the caller's key for the router."""
    found: frozenset[str] = request.get(_WITHHELD, _NOTHING)
    return found


def _token(request: web.Request) -> tuple[str, str]:
    """Return the key and the name of its header."""
    for header in (HEADER, "Authorization", "X-Api-Key"):  # Anthropic's clients send the last one
        value = request.headers.get(header, "").strip()
        if header == "Authorization":
            kind, _, token = value.partition(" ")
            value = token.strip() if kind.lower() == "bearer" else ""
        if value:
            return value, header
    return "", HEADER


def open_auth(settings: RouterSettings) -> tuple[ApiKeyGuard, ServerCertificate | None]:
    """Load the API keys and the certificate that the settings name. Raises ConfigError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is not None:
        raise ConfigError(f"KYB_TLS_KEY_FILE={key}: KYB_TLS_CERT_FILE is not set; set both, or none")
    return ApiKeyGuard(settings.api_keys_file), ServerCertificate(cert, key) if cert is not None else None
