"""Admits HTTP requests by the API keys of a file, which it follows."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from kybernate.api_keys import PREFIX, ApiKey, KeyFile, Scope, digest_of, load
from kybernate.config_errors import ConfigError
from kybernate.files import changes
from kybernate.http_api import ApiError, Handler, cause_of, random_id
from kybernate.logs import get_logger

_KEY_HEADERS = frozenset({b"authorization", b"x-api-key", b"x-kyb-key"})
"""Where a key of any form is looked for; elsewhere those that ``kyb router keys`` made."""
HEADER = "X-Kyb-Key"
"""Header for callers that send the engine's key as Authorization; without it, Authorization has the service's key."""
_NAME = web.RequestKey("kyb.key", str)
_CAUSE = web.RequestKey("kyb.cause", str)


class KeyGuard:
    """Admits requests by the keys of a file; without a file, all. Raises ConfigError."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        try:
            self._file = load(path) if path is not None else KeyFile()
        except ConfigError as error:
            raise ConfigError(f"KYB_API_KEYS_FILE: {error}") from None
        self._keys = _by_digest(self._file)
        self._wrong = ""
        """What is wrong with the file, without what is in it; empty: its keys are in force."""
        self._seen: dict[str, ApiKey] = {}
        """By the key itself: those of the file that were sent since it was read."""

    @property
    def refused(self) -> str | None:
        """Why keys of before are in force; None: those of the file are."""
        why = self._wrong if self._path is None or os.path.exists(self._path) else f"{self._path}: no such file"
        return f"KYB_API_KEYS_FILE is refused; the previous keys stay in force until a restart: {why}" if why else None

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    def listed(self) -> dict[str, Any]:
        """Return keys and tenants for people: never a hash."""
        rows = self._file.model_dump(mode="json", exclude={"keys": {"__all__": {"sha256"}}})
        return {"required": self.required, **rows}

    def needs(self, *scopes: Scope) -> Callable[[Handler], Handler]:
        """Wrap a handler that needs one of these scopes: 401 without a known key, 403 if the key has none of them."""

        def guard(handler: Handler) -> Handler:
            async def guarded(request: web.Request) -> web.StreamResponse:
                with self.admitted(request, scopes):
                    given = cause_of(request.headers)
                    is_key = self.carries_key(b"x-request-id", given.encode("utf-8", "surrogateescape"))
                    request[_CAUSE] = random_id() if is_key else given
                    return await handler(request)

            return guarded if self._path is not None else handler

        return guard

    @contextlib.contextmanager
    def admitted(self, request: web.Request, scopes: tuple[Scope, ...]) -> Iterator[None]:
        """While a request is handled. Raises ApiError 401 or 403."""
        request[_NAME] = self.allowed(request.headers, scopes, request.method, request.path).name
        yield

    def allowed(self, headers: Mapping[str, str], scopes: tuple[Scope, ...], method: str, path: str) -> ApiKey:
        """Return the key of a request. Raises ApiError 401 without a known one, 403 if it has none of the scopes."""
        key = self._key(headers)
        if not any(key.may(scope) for scope in scopes):
            get_logger().warning("caller.forbidden", caller=key.name, method=method, path=path)
            text = f"the key {key.name!r} has the scopes {', '.join(key.scopes)}; this call needs {' or '.join(scopes)}"
            raise ApiError(403, "insufficient_permissions", text)
        return key

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError 401 where keys are needed and this request has no known one."""
        if self._path is not None:
            self._key(headers)

    def carries_key(self, name: bytes, value: bytes) -> bool:
        """Whether the value of a header is a key of the file, or ends with one as ``Bearer <key>`` does."""
        if not self._keys or (name not in _KEY_HEADERS and PREFIX not in value):
            return False
        whole = value.strip(b" \t").decode("utf-8", "surrogateescape")
        last = whole.rpartition(" ")[2]  # first: a known one needs no hash
        return self._find(last) is not None or (last != whole and self._find(whole) is not None)

    def _key(self, headers: Mapping[str, str]) -> ApiKey:
        token = _token(headers)
        key = self._find(token) if token else None
        if key is None:
            what = "this API key is not known" if token else "an API key is needed"
            raise ApiError(401, "invalid_api_key", f"{what}; send Authorization: Bearer <key> or {HEADER}: <key>")
        return key

    def _find(self, token: str) -> ApiKey | None:
        found = self._seen.get(token)
        if found is None and (found := self._keys.get(digest_of(token))) is not None:
            self._seen[token] = found
        return found

    def applied(self, file: KeyFile) -> None:
        """Take the keys of a file that has changed."""
        self._file, self._keys, self._seen = file, _by_digest(file), {}

    async def watch(self) -> None:
        """Apply each change of the file until cancelled. An invalid file is logged and changes nothing."""
        if self._path is None:
            await asyncio.Event().wait()
        assert self._path is not None
        async for _ in changes(self._path, asyncio.Event()):
            try:
                file = await asyncio.to_thread(load, self._path)
            except ConfigError as error:
                self._wrong = error.place
                get_logger().error("keys.refused", reason=str(error), meaning="the previous keys stay in force")
                continue
            self._wrong = ""
            if file != self._file:
                self.applied(file)
                get_logger().info("keys.applied", names=[key.name for key in file.keys])


def caller_of(request: web.Request) -> str | None:
    """Return the name of the caller's key; None if no keys are needed."""
    return request.get(_NAME)


def request_cause(request: web.Request) -> str:
    """Return the cause of what a request begins: its X-Request-Id unless that is a key."""
    return request.get(_CAUSE) or cause_of(request.headers)


def _by_digest(file: KeyFile) -> dict[str, ApiKey]:
    """A search by hash tells nothing about a key: which hashes are near each other cannot be chosen."""
    return {key.sha256: key for key in file.keys}


def _token(headers: Mapping[str, str]) -> str:
    """Return the caller's key."""
    for header in ("x-kyb-key", "authorization", "x-api-key"):  # Anthropic's clients send the last one
        value = headers.get(header, "").strip(" \t")
        if header == "authorization":
            kind, _, token = value.partition(" ")
            value = token.strip(" \t") if kind.lower() == "bearer" else ""
        if value:
            return value
    return ""
