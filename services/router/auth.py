"""Who may call the router: API keys, if a file of them is set. Also keeps the certificate of its TLS fresh."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from kybernate.api_keys import ApiKey, Scope, find, load
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


class Certificate:
    """TLS of the router's port; a renewed certificate is taken up by the connections that come after."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key
        self._loading = asyncio.Lock()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            self._load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(_unusable(cert, key, error)) from None

    async def watch(self) -> NoReturn:
        """Take up each change of the certificate or its key, whichever is written last, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for path in {self._cert, self._key or self._cert}:
                group.create_task(self._follow(path))
        raise AssertionError("changes ended")

    async def _follow(self, path: Path) -> None:
        async for _ in changes(path, asyncio.Event()):
            try:
                async with self._loading:
                    await asyncio.to_thread(self._load)
            except (OSError, ssl.SSLError) as error:
                reason = _unusable(self._cert, self._key, error)
                get_logger().error("certificate.refused", reason=reason, meaning="the one from before stays in force")

    def _load(self) -> None:
        # Elsewhere first: a context that was given a certificate without its key serves nobody any more.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
        self.context.load_cert_chain(self._cert, self._key)


def open_door(settings: RouterSettings) -> tuple[Doorkeeper, Certificate | None]:
    """Keys and certificate as the settings name them. Raises ConfigError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is not None:
        raise ConfigError(f"KYB_TLS_KEY_FILE={key}: KYB_TLS_CERT_FILE is not set; set both, or none")
    return Doorkeeper(settings.api_keys_file), Certificate(cert, key) if cert is not None else None


def _unusable(cert: Path, key: Path | None, error: OSError | ssl.SSLError) -> str:
    why = error.strerror or str(error)
    return f"KYB_TLS_CERT_FILE={cert}: {why}; it must hold a PEM certificate that fits KYB_TLS_KEY_FILE={key or cert}"
