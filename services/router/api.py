"""The router's HTTP messages: requests with JSON bodies, and responses and errors in OpenAI's shape."""

import contextlib
import json
import math
import random
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from kybernate.config_errors import ConfigError
from services.router.core.step import Reject

LONGEST_NAME = 512
"""Characters of a model's name, and of a caller's request id."""
_TYPES = dict.fromkeys((*range(400, 500), 505), "invalid_request_error")
_TYPES |= {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "rate_limit_error"}


class RouterError(Exception):
    """A response with an error status. ``retry_after`` in seconds; ``closes``: the connection ends with it."""

    def __init__(
        self, status: int, code: str, message: str, retry_after: int | None = None, *, closes: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.closes = closes

    @classmethod
    def of(cls, reject: Reject, *, detailed: bool) -> "RouterError":
        """Return the error of a rejected call; ``detailed``: its caller may see seats."""
        text = f"{reject.message} ({reject.detail})" if detailed and reject.detail else reject.message
        return cls(reject.status, reject.code, f"{text}; try again in {reject.retry_after} s", reject.retry_after)

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "code"}}``."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> web.Response:
        """Return the HTTP response, with Retry-After if the caller should try again."""
        return web.json_response(self.body(), status=self.status, headers={**self._headers(), **(headers or {})})

    def raw(self, *, close: bool = True, headers: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of the HTTP response; ``close``: the connection ends with it."""
        body = json.dumps(self.body()).encode()
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += ["Content-Type: application/json; charset=utf-8", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in {**self._headers(), **(headers or {})}.items()]
        lines += ["Connection: close"] if close else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    def _headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def sse(self) -> bytes:
        """Return the error as an event for a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"


# --- engine paths ----------------------------------------------------------------------------------------------------

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "openai": (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/moderations",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
    ),
    "anthropic": ("/v1/messages", "/v1/messages/count_tokens"),
    "rerank": ("/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling"),
    "tokenize": ("/v1/tokenize", "/v1/detokenize"),
}
"""Paths of inference calls by API. Engines have further ones below /v1/ that load adapters or run code."""


def engine_paths(families: str, more: str) -> frozenset[bytes]:
    """Return the paths that are forwarded. Raises ConfigError."""
    found: set[str] = set()
    for family in filter(None, (name.strip() for name in families.split(","))):
        if family not in FAMILIES:
            raise ConfigError(f"KYB_API_FAMILIES={families!r}: {family!r} is none of {', '.join(FAMILIES)}")
        found.update(FAMILIES[family])
    for path in filter(None, (path.strip() for path in more.split(","))):
        if re.fullmatch(r"/v1(/[\w.~-]*[\w~-])+", path, re.ASCII) is None:
            raise ConfigError(
                f"KYB_ENGINE_PATHS={more!r}: {path!r} is not a plain path below /v1/, such as /v1/tokenize"
            )
        found.add(path)
    return frozenset(path.encode() for path in found)


def aliases_of(text: str) -> dict[str, str]:
    """Return the models by their further names. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        alias, _, model = (part.strip() for part in pair.partition("="))
        if not printable(alias) or not printable(model) or alias in found:
            raise ConfigError(
                f"KYB_ALIASES={text!r}: {pair!r}: write alias=model, each alias once, with commas between"
            )
        found[alias] = model
    for alias, model in found.items():
        if model in found:
            raise ConfigError(
                f"KYB_ALIASES={text!r}: {alias} stands for {model}, an alias; name its model {found[model]}"
            )
    return found


# --- requests ---------------------------------------------------------------------------------------------------------


def printable(text: str) -> bool:
    """Return whether ``text`` can be used on the bus, in logs and as a label; bytes that are not UTF-8 cannot."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def number(query: Mapping[str, str], name: str, default: float) -> float:
    """Return the number that a query parameter holds; ``default`` without one. Raises RouterError 400."""
    text = query.get(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RouterError(400, "invalid_field", f"{name}: {text!r} is not a number; write one, such as 3600")
    return value


def cause_of(headers: Mapping[str, str]) -> str:
    """Return the caller's X-Request-Id if it is printable, else a new id: the cause of all messages that follow."""
    given = headers.get("x-request-id", "")
    return given if given and printable(given) else random_id()


def random_id() -> str:
    """Return 32 hexadecimal digits: unique, no secret, and without a question to the kernel."""
    return f"{random.getrandbits(128):032x}"


async def body_of(request: web.Request, most_bytes: int) -> bytes:
    """Return the body of a request to this router, which was read and unpacked before. Raises RouterError 413."""
    body = await request.read()
    if len(body) > most_bytes:
        raise RouterError(413, "body_too_large", f"the body is larger than {most_bytes} bytes")
    return body


def json_of(body: bytes) -> Any:
    """Parse a body. Raises RouterError 400."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise RouterError(400, "invalid_json", "the body is nested too deeply") from error
    except ValueError as error:
        raise RouterError(400, "invalid_json", f"the body is not JSON: {error}") from error


def model_of(model: object, how: str = 'the body must name its model: {"model": "…"}') -> str:
    """Return the model of a request; ``how`` explains in the error where to name it. Raises RouterError 400."""
    if not isinstance(model, str) or not printable(model):
        raise RouterError(400, "model_missing", f"{how}, in at most {LONGEST_NAME} printable characters")
    return model


PRIORITIES = {"low": -1, "normal": 0, "high": 1}


def priority_of(headers: Mapping[str, str], most: int) -> int:
    """Return the priority that X-Kyb-Priority asks for, at most ``most``. Raises RouterError 400."""
    asked = headers.get("x-kyb-priority")
    if asked is None:
        return min(0, most)
    name = asked.strip().lower()
    if name not in PRIORITIES:
        raise RouterError(400, "invalid_priority", f"X-Kyb-Priority: {name[:40]!r}: send low, normal or high")
    return min(PRIORITIES[name], most)


_PATIENCE = (("x-kyb-timeout", 1.0), ("x-stainless-read-timeout", 1.0), ("x-envoy-expected-rq-timeout-ms", 0.001))
"""Headers with the time after which a caller gives up, and their unit in seconds: ours, OpenAI's clients', Envoy's."""


def patience_of(headers: Mapping[str, str]) -> float | None:
    """Return after how many wall seconds without an answer the caller gives up; None: it does not say."""
    least: float | None = None
    for name, unit in _PATIENCE:
        if name in headers:
            with contextlib.suppress(ValueError):
                seconds = float(headers[name]) * unit
                if 0 < seconds < (math.inf if least is None else least):
                    least = seconds
    return least
