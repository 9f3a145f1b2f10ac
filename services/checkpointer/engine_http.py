"""HTTP calls to the engines of the node's seats, and the check of their models' answers.

An engine is addressed by pod IP and port, as the manager knows them from the node, and never through a Service. An
answer counts only if the container that the job names lives before and after it: its address may be another pod's then.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kybernate import deadlines
from kybernate.clock import within
from kybernate.files import read
from kybernate.http_api import content_of
from kybernate.logs import get_logger
from kybernate.messages import SeatTarget
from services.checkpointer.backends.port import EngineReply, EngineSilentError, SeatProcesses
from services.checkpointer.core.answers import (
    MISSHAPEN,
    REQUESTS,
    ModelAnswer,
    difference,
    read_answer,
    well,
    worse_health,
)
from services.checkpointer.processes import alive

log = get_logger()

KEY_NAME = re.compile(r"[A-Za-z0-9._-]+")
RECORD_SECONDS = 10.0
"""Model seconds for the answers before a first park; an engine that takes longer is parked without."""
FIRST_ANSWER_SECONDS = 300.0
"""The same before a rehearsal, for which nothing waits: an engine compiles for its first request."""
UNANSWERED_SECONDS = 120.0
"""Model seconds from the first test request on in which a seat is not parked while it has answered none."""
UNHEARD_SECONDS = 600.0
"""Wall seconds for which an engine that answered nothing is not asked again before a park."""
TOLERANCE = 0.1
"""Of a log probability; of an embedding the share of its length."""
FLOOR_WALL_SECONDS = 10.0
"""Least deadline of an answer, so that a busy machine is no wrong answer."""


@dataclass
class EngineHttp:
    """Calls to engines; ``keys`` is the folder with a file per engine key: the namespace, a dot, and the name
    in ``kyb.ai/engine-key``."""

    session: aiohttp.ClientSession
    keys: Path | None = None

    async def call(
        self, seat: SeatProcesses, method: str, path: str, *, seconds: float, body: Any = None
    ) -> EngineReply:
        """One call. Raises EngineSilentError if there is no answer from this container within ``seconds`` (wall)."""
        target = seat.target
        if not target.endpoint:
            raise EngineSilentError("its address is not known")
        data = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        if target.engine_key:
            headers["Authorization"] = f"Bearer {self._key(target)}"
            if not headers["Authorization"].isprintable():
                raise EngineSilentError(f"key {target.engine_key!r} cannot be sent: its file is not one line of text")
        self._check_container(seat)
        try:
            url = target.endpoint + path
            asked = self.session.request(method, url, data=data, headers=headers, allow_redirects=False)
            async with within(seconds), asked as answer:
                data = await content_of(answer)
        except TimeoutError:
            raise EngineSilentError(f"{method} {path} was not answered within {seconds:.1f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineSilentError(f"{method} {path}: {str(error) or repr(error)}") from error
        self._check_container(seat)
        text = data.decode(errors="replace")  # whatever charset it names
        return EngineReply(answer.status, _json(text), text)

    def _check_container(self, seat: SeatProcesses) -> None:
        if seat.root is None or not alive(seat.root):
            raise EngineSilentError(f"container {seat.target.container_id} has ended", ended=True)

    def _key(self, target: SeatTarget) -> str:
        """Read at each call, so that a changed key needs no restart. Raises EngineSilentError."""
        if self.keys is None or not KEY_NAME.fullmatch(target.engine_key) or set(target.engine_key) <= {"."}:
            raise EngineSilentError(f"key {target.engine_key!r} is no file in KYB_ENGINE_KEYS_DIR ({self.keys})")
        try:
            return read(self.keys / target.engine_key).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            remedy = "name it so in the Secret of the engine keys: the namespace, a dot, and kyb.ai/engine-key"
            raise EngineSilentError(f"key {target.engine_key!r} cannot be read: {error}; {remedy}") from error


_BUSY = (429, 503)


class _BusyError(ValueError):
    """The engine refused a request as busy."""


@dataclass(slots=True)
class _Known:
    """What one container has answered before its first park."""

    container: str
    health: int | None = None
    answers: tuple[ModelAnswer, ...] = ()
    listing: str = ""
    """The path at which it lists its models, where it has no earlier one of ``_LISTINGS``."""
    unverified: str = ""
    ask_after: float = 0.0
    """Monotonic seconds."""
    asked_at: float = 0.0
    """When it got its first test request; monotonic seconds."""


@dataclass
class AnswerCheck:
    """Records the answers of a seat's models before its first park, and compares them later."""

    engines: EngineHttp
    seconds: float = deadlines.VERIFY_SECONDS
    """Model seconds for health and all answers of a seat, where nothing is learned."""
    speed: float = 1.0
    _known: dict[str, _Known] = field(default_factory=dict)
    """By seat."""

    async def recorded(self, seat: SeatProcesses, *, patient: bool = False) -> SeatProcesses:
        """The seat with its health and its models' answers; models that answer none of the requests are left out.

        An engine that answers nothing is asked again at a park after UNHEARD_SECONDS, so that parks do not wait for it.
        ``patient``: it rehearses. ``unanswered`` is set while it may still compute the first test request.
        """
        target = seat.target
        if not self._applies(seat) or seat.parked_on:
            return seat
        known = self._known.get(target.seat)
        if known is None or known.container != target.container_id:
            known = self._known[target.seat] = _Known(target.container_id)
        deadline = time.monotonic() + self._wall(FIRST_ANSWER_SECONDS if patient else RECORD_SECONDS)
        unanswered = ""
        try:
            if time.monotonic() >= known.ask_after:
                if known.health is None or not well(known.health):
                    health = await self._health(seat, deadline)
                    if known.health is None or not worse_health(known.health, health):
                        known.health = health
                known.unverified = ""
                for model in await self._models(seat, known, deadline):
                    if all(answer.model != model for answer in known.answers):
                        known.asked_at = known.asked_at or time.monotonic()
                        known.answers += await self._first_answer(seat, model, deadline)
        except EngineSilentError as error:
            if known.health is None:
                if not known.unverified:
                    log.warning("engine.unreachable", seat=target.seat, endpoint=target.endpoint, reason=str(error))
                known.unverified, known.ask_after = str(error), time.monotonic() + UNHEARD_SECONDS
            elif known.asked_at and time.monotonic() < known.asked_at + self._wall(UNANSWERED_SECONDS):
                unanswered = f"its engine has not answered the test request yet: {error}"
        return seat.model_copy(
            update={
                "answers": known.answers,
                "health": known.health,
                "unverified": known.unverified,
                "unanswered": unanswered,
            }
        )

    async def wrong(self, seat: SeatProcesses) -> str:
        """Why the engine must not serve; empty if its health is no worse and it answers as before its first park. One
        that answered nothing then, and nothing now, is out of reach: that proves nothing."""
        if not self._applies(seat):
            return ""
        deadline = time.monotonic() + deadlines.learned(self._wall(self.seconds), seat.target.usual_seconds)
        changes = asyncio.create_task(self._changed(seat, deadline))
        try:
            health = await self._health(seat, deadline)
            if health in _BUSY:  # it may serve one request at a time: each that it refused is asked again alone
                with contextlib.suppress(_BusyError):
                    await changes
                health = await self._health(seat, deadline)
            if worse_health(seat.health, health):
                return f"its health answers {health}"
            try:
                changed = await changes
            except _BusyError:
                changed = await self._changed(seat, deadline)
            if changed:
                return changed
        except EngineSilentError as error:
            return str(error) if error.ended or seat.answers or seat.health is not None else ""
        except ValueError as error:
            return str(error)
        finally:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)
        if seat.health is not None:
            listing = known.listing if (known := self._known.get(seat.target.seat)) is not None else ""
            self._known[seat.target.seat] = _Known(seat.target.container_id, seat.health, seat.answers, listing)
        return ""

    async def _health(self, seat: SeatProcesses, deadline: float) -> int:
        """The status of its health. Raises EngineSilentError."""
        return (await self.engines.call(seat, "GET", "/health", seconds=_left(deadline))).status

    async def _changed(self, seat: SeatProcesses, deadline: float) -> str:
        """How an answer differs from the one before the first park; empty if none does. Raises like ``_ask``."""
        for before in seat.answers:
            now = await self._ask(seat, before.model, before.kind, deadline)
            if changed := difference(before, now, TOLERANCE):
                return changed
        return ""

    async def _models(self, seat: SeatProcesses, known: _Known, deadline: float) -> list[str]:
        """The models that answer without being loaded first: of Ollama and llama.cpp those in memory. None of a list in
        another shape."""
        absent = True
        for path in (known.listing,) if known.listing else _LISTINGS:
            reply = await self.engines.call(seat, "GET", path, seconds=_left(deadline))
            if reply.status == 200 and isinstance(reply.body, dict):
                known.listing = path if absent else ""
                with contextlib.suppress(*MISSHAPEN):
                    return _LISTINGS[path](reply.body)
                return []
            absent = absent and reply.status in (404, 405)  # else it may have the path, and fails
        return []

    async def _first_answer(self, seat: SeatProcesses, model: str, deadline: float) -> tuple[ModelAnswer, ...]:
        for kind in REQUESTS:
            try:
                return (await self._ask(seat, model, kind, deadline),)
            except ValueError:
                continue
        return ()

    async def _ask(self, seat: SeatProcesses, model: str, kind: str, deadline: float) -> ModelAnswer:
        """Raises ValueError if the reply is no answer, EngineSilentError without a reply."""
        path, body = REQUESTS[kind]
        reply = await self.engines.call(seat, "POST", path, seconds=_left(deadline), body={**body, "model": model})
        if reply.status != 200:
            refused = _BusyError if reply.status in _BUSY else ValueError
            raise refused(f"{path} answers {reply.status} for {model}: {reply.text[:200]}")
        return read_answer(model, kind, reply.body)

    def _applies(self, seat: SeatProcesses) -> bool:
        return seat.target.verify and bool(seat.target.endpoint)

    def _wall(self, model_seconds: float) -> float:
        return max(model_seconds / self.speed, FLOOR_WALL_SECONDS)


_LISTINGS: Mapping[str, Callable[[dict[str, Any]], list[str]]] = {
    "/api/ps": lambda body: [str(model["name"]) for model in body.get("models") or ()],
    "/v1/models": lambda body: [
        str(model["id"])
        for model in body.get("data") or ()
        if (model.get("status") or {}).get("value", "loaded") == "loaded"
    ],
}
"""How the models in memory are read, by path; an engine is asked for the first that it has."""


@asynccontextmanager
async def open_engines(keys: Path | None = None) -> AsyncIterator[EngineHttp]:
    """Cookies are not kept, and no connection: one that an engine closed while parked would look like a dead engine."""
    connector, jar = aiohttp.TCPConnector(force_close=True, limit=0), aiohttp.DummyCookieJar()
    endless = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=jar, timeout=endless) as session:
        yield EngineHttp(session, keys)


def _left(deadline: float) -> float:
    return max(deadlines.FLOOR_SECONDS, deadline - time.monotonic())


def _json(text: str) -> Any:
    """None also with half a character, as ``"\\ud800"``: no journal and no message can carry that."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError):
        return None
