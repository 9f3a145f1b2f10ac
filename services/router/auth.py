"""Who may call the router: API keys, if a file of them is set."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from kybernate.api_keys import ApiKey, Scope, find, load
from kybernate.certificate import Certificate
from kybernate.config_errors import ConfigError
from kybernate.config_watch import changes
from kybernate.logs import get_logger
from services.router.answers import ApiError
from services.router.settings import RouterSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADER = "X-Kyb-Key"
"""For callers whose Authorization is meant for the engine. Without it, Authorization: Bearer is the router's key."""
_CALLER, _WITHHELD = "kyb.caller", "kyb.withheld"
_NOTHING: frozenset[str] = frozenset()


class Doorkeeper:
    """Lets callers in by the keys of a file; without a file, everybody."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: tuple[ApiKey, ...] = load(path) if path is not None else ()

    def needs(self, *scopes: Scope) -> Callable[[Handler], Handler]:
        """For handlers: the caller must have one of these scopes. 401 without a key, 403 with too small a one."""

        def guard(handler: Handler) -> Handler:
            async def guarded(request: web.Request) -> web.StreamResponse:
                self._admit(request, scopes)
                return await handler(request)

            return guarded if self._path is not None else handler

        return guard

    async def watch(self) -> NoReturn:
        """Take up each change of the file until cancelled. One that cannot be used is said, and changes nothing."""
        if self._path is None:
            await asyncio.Event().wait()
        assert self._path is not None
        async for _ in changes(self._path, asyncio.Event()):
            try:
                keys = await asyncio.to_thread(load, self._path)
            except ConfigError as error:
                get_logger().error("keys.refused", reason=str(error), meaning="those from before stay in force")
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
            raise ApiError(401, "invalid_api_key", f"{what}; send Authorization: Bearer <key> or {HEADER}: <key>")
        if not any(key.may(scope) for scope in scopes):
            get_logger().warning("caller.forbidden", caller=key.name, method=request.method, path=request.path)
            text = f"the key {key.name!r} has the scopes {', '.join(key.scopes)}; this call needs {' or '.join(scopes)}"
            raise ApiError(403, "insufficient_permissions", text)
        request[_CALLER], request[_WITHHELD] = key.name, frozenset({header.lower()})


def caller_of(request: web.Request) -> str | None:
    """Name of the key that a call came with; None where none is asked for."""
    name: str | None = request.get(_CALLER)
    return name


def withheld(request: web.Request) -> frozenset[str]:
    """Headers that are for the router alone: an engine must not learn a caller's key."""
    found: frozenset[str] = request.get(_WITHHELD, _NOTHING)
    return found


def _token(request: web.Request) -> tuple[str, str]:
    """The key, and the header that it stands in."""
    for header in (HEADER, "Authorization", "X-Api-Key"):  # the last is what Anthropic's clients send
        value = request.headers.get(header, "").strip()
        if header == "Authorization":
            kind, _, token = value.partition(" ")
            value = token.strip() if kind.lower() == "bearer" else ""
        if value:
            return value, header
    return "", HEADER


def open_door(settings: RouterSettings) -> tuple[Doorkeeper, Certificate | None]:
    """Keys and certificate as the settings name them. Raises ConfigError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is not None:
        raise ConfigError(f"KYB_TLS_KEY_FILE={key}: KYB_TLS_CERT_FILE is not set; set both, or none")
    return Doorkeeper(settings.api_keys_file), Certificate(cert, key) if cert is not None else None
