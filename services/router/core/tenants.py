"""What tenants may use of a router and what they have used: models, requests, tokens. Pure; ``now`` in wall seconds."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kybernate.api_keys import Tenant

TAIL_BYTES = 4096
"""Kept of the begin and of the end of an answer, where engines write the tokens that they have counted."""
BYTES_PER_TOKEN = 4
"""Of requests, and of answers that are no streams, whose engine has counted nothing."""
_COUNTED = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens"\s*:\s*(\d{1,12})')


class Tokens(NamedTuple):
    """Of a request and its answer."""

    prompt: int = 0
    completion: int = 0


class AnswerTokens:
    """Finds the tokens of one answer in its bytes: what the engine has counted, else an estimate, so that an answer
    without ``usage`` is not free."""

    __slots__ = ("_begin", "_end", "_events", "_size", "media")

    def __init__(self, *, media: bool = False) -> None:
        self._begin = self._end = b""
        self._events = self._size = 0
        self.media = media
        """It is sound, a picture or numbers, whose bytes are no tokens: only what the engine has counted."""

    def feed(self, piece: bytes) -> None:
        """Take a piece of the answer's body."""
        if len(self._begin) < TAIL_BYTES:
            self._begin += piece[: TAIL_BYTES - len(self._begin)]
        self._end = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self._end + piece)[-TAIL_BYTES:]
        if not self.media:
            self._events += piece.count(b"data:")
            self._size += len(piece)

    def tokens(self, request_bytes: Callable[[], int], *, complete: bool) -> Tokens:
        """Return the tokens; ``request_bytes`` counts those of text in the request. Of an answer that is not
        ``complete`` the engine may have counted only the first tokens: then at least those count that have arrived."""
        text = self._begin if len(self._begin) < TAIL_BYTES else self._begin + b"\n" + self._end
        counted = {bool(of_prompt): int(count) for of_prompt, count in _COUNTED.findall(text)}
        arrived = self._events or math.ceil(self._size / BYTES_PER_TOKEN)
        prompt, completion = counted.get(True), counted.get(False, 0 if counted else arrived)
        return Tokens(
            math.ceil(request_bytes() / BYTES_PER_TOKEN) if prompt is None else prompt,
            completion if complete else max(completion, arrived),
        )


@dataclass(slots=True)
class Allowance:
    """``most`` in so many seconds, which may all be used at once."""

    most: int
    seconds: float
    left: float
    at: float

    def take(self, count: int, now: float) -> int:
        """Take so many and return 0; else return the seconds until they are left."""
        self.left = min(self.most, self.left + (now - self.at) * self.most / self.seconds)
        self.at = now
        if count > self.left:
            return math.ceil((count - self.left) * self.seconds / self.most)
        self.left -= count
        return 0


@dataclass(slots=True)
class _Account:
    tenant: Tenant
    requests: Allowance | None = None
    running: int = 0


@dataclass(slots=True)
class Used:
    """What a tenant has used of a model since the router started."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class Tenants:
    """The accounts of all tenants of this router. A key without a tenant is a tenant without limits."""

    used: dict[tuple[str, str], Used] = field(default_factory=dict)
    """By tenant and model."""
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def apply(self, tenants: Iterable[Tenant], now: float) -> None:
        """Set the limits; what was used in the last minute counts on."""
        before, self._accounts = self._accounts, {}
        for tenant in tenants:
            known = before.get(tenant.name)
            account = self._accounts[tenant.name] = _Account(tenant, running=known.running if known else 0)
            limit, had = tenant.requests_per_minute, known.requests if known else None
            if limit is not None:
                left = limit if had is None else min(limit, had.left)
                account.requests = Allowance(limit, 60.0, left, now if had is None else had.at)

    def of(self, name: str) -> Tenant | None:
        """Return the tenant of this name, if it has limits."""
        account = self._accounts.get(name)
        return account.tenant if account else None

    def begin(self, name: str, now: float) -> tuple[str, int] | None:
        """Count a request, until ``end``; return why it is refused, and the seconds until it may be tried again."""
        account = self._accounts.get(name)
        if account is None:
            return None
        most = account.tenant.concurrency
        if most is not None and account.running >= most:
            return f"{account.running} of {most} requests at a time (concurrency)", 1
        if account.requests is not None and (wait := account.requests.take(1, now)):
            return f"{account.requests.most} requests in a minute (requestsPerMinute)", wait
        account.running += 1
        return None

    def end(self, name: str, model: str, tokens: Tokens) -> None:
        """End a request that was begun. ``model``: a known one, or ``unknown``."""
        account = self._accounts.get(name)
        if account is not None:
            account.running = max(0, account.running - 1)
        used = self.used.setdefault((name, model), Used())
        used.requests += 1
        used.prompt_tokens += tokens.prompt
        used.completion_tokens += tokens.completion
