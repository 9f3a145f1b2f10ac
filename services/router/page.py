"""``/ui`` on the operations port: the page for operators, its data, and the commands of its buttons.

Reading needs no key. Commands need one with the scope ``admin``, and the playground one with ``infer``, where the
router has keys. The page's files are in ``assets/``; nothing is loaded from another host.
"""

import asyncio
import contextlib
import gc
import json
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import aiohttp
from aiohttp import web

from kybernate.bus.follow import ROWS, Slices
from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock
from kybernate.http_api import number
from kybernate.logs import get_logger
from kybernate.messages import GroupDecided, SeatEvent
from kybernate.roster import GpuRecord, SeatRecord
from services.router.api import RouterError
from services.router.auth import ApiKeyGuard
from services.router.core.step import Forward
from services.router.core.timeline import Timeline, WaitingLines, Waits
from services.router.core.traffic import Traffic
from services.router.level_watch import LevelWatch
from services.router.operator_api import VERBS, Event, OperatorApi
from services.router.plan_view import PlanView
from services.router.roster_sync import GpuInventory
from services.router.token_rates import TokenRates, readable

if TYPE_CHECKING:
    from services.router.core.upstreams import Upstream

ASSETS = Path(__file__).parent / "assets"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TICK_SECONDS = 1.0
"""How often pages get what has changed."""
TOKENS_SECONDS = 5.0
"""How often engines are asked for their tokens, while a page is open."""
FIRST_SECONDS = 600.0
"""How much of the past the first answer has."""
MOST_SECONDS = 86_400.0
READER_BACKLOG = 60
"""Pieces that may wait for one page; a slower page is disconnected, and gets the state again when it is back."""
RECENT_EVENTS = 500
PIECE_BYTES = 64 * 1024
"""Of an answer, sent at a time."""
THREAD_BYTES = 8 * 1024
"""A longer piece is compressed in a thread."""
CHAT_BYTES = 256 * 1024
"""The longest body of a request of the page."""
_SENT = ("authorization", "content-type", "x-kyb-key", "x-request-id")
"""Headers of the playground's request that go on to the router's port."""


class Page:
    """The routes of the page; ``run`` and ``read_tokens`` are jobs. Other parts call ``add`` and ``forwarded``."""

    def __init__(
        self,
        bus: Bus,
        traffic: Traffic,
        levels: LevelWatch,
        inventory: GpuInventory,
        http: aiohttp.ClientSession,
        guard: ApiKeyGuard,
        clock: Clock,
    ) -> None:
        self._bus, self._traffic, self._levels, self._inventory, self._http = bus, traffic, levels, inventory, http
        self._guard, self._clock = guard, clock
        self.api_url = ""
        """The router's public port, for the playground."""
        self.troubles: Callable[[], dict[str, str]] = dict
        """What is wrong with this router, by condition; the router sets it."""
        self._timeline, self._lines, self._waits = Timeline(time.time()), WaitingLines(), Waits()
        self._events: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._new: list[Event] = []
        """Those that no page got yet."""
        self._revision = 0
        """How many events were added."""
        self._while_reading: list[SeatEvent | GroupDecided] | None = None
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._tokens = TokenRates(http)
        self.plans = PlanView(clock)

    def routes(self, operator: OperatorApi) -> list[web.RouteDef]:
        """Return the routes of the operations port."""
        admin = self._guard.needs("admin")
        verbs = "|".join(VERBS)
        return [
            web.get("/ui", _to_page),
            web.get("/ui/", self._file),
            web.get("/ui/timeline", self._past),
            web.get("/ui/live", self._live),
            web.get("/ui/why", operator.why),
            web.get("/ui/allowed", admin(_allowed)),
            web.get("/ui/plan", self.plans.state),
            web.post("/ui/plan", admin(_from_page(self.plans.start))),
            web.get("/ui/plan/report", self.plans.report),
            web.post("/ui/chat", self._chat),
            web.post("/ui/seats/{seat:.+}/{verb:" + verbs + "}", admin(_from_page(operator.command))),
            web.post("/ui/groups/{group:.+}/{verb:drain|resume}", admin(_from_page(operator.group))),
            web.post("/ui/nodes/{node:.+}/{verb:drain|resume}", admin(_from_page(operator.node))),
            web.get("/ui/{file:.+}", self._file),
        ]

    def add(self, event: Event) -> None:
        """Take a new event of the cluster."""
        self._revision += 1
        self._events.append(event)
        self._new.append(event)
        if isinstance(event, SeatEvent | GroupDecided):
            self._timeline.add(event)
            if self._while_reading is not None:
                self._while_reading.append(event)

    def forwarded(self, call: Forward) -> None:
        """Take how long a request waited that is sent to an engine now."""
        upstream = self._traffic.table.upstreams.get(call.key)
        if upstream is not None:
            self._waits.add(upstream.model, call.held_seconds)

    async def run(self) -> NoReturn:
        """Sample waiting requests, and send changes to the pages that are open, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now, slices = time.time(), Slices()
            waiting = await self._waiting(slices)
            # No pause from here until _changes has taken what is new: a page that opens later has it in its state.
            lanes, readers = self._lines.sample(waiting, now), list(self._readers)
            if not readers:
                self._new.clear()
                self._traffic.table.touched.clear()
                self._inventory.touched.clear()
                continue
            piece = b"data: " + await self._changes(now, lanes, slices) + b"\n\n"
            for reader in readers:
                self._send(reader, piece)

    async def read_tokens(self) -> NoReturn:
        """Ask the engines for their tokens while a page is open, until cancelled."""
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            if self._readers:
                slices, active = Slices(), dict[str, SeatRecord]()
                for upstream in self._upstreams():
                    if readable(upstream.record):
                        active[upstream.key] = upstream.record
                    await slices.pause()
                await self._tokens.read(active)

    def stop(self) -> None:
        """End every stream, because the router stops."""
        for reader in list(self._readers):
            self._end(reader)

    # --- what the page reads ------------------------------------------------------------------------------------------

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """The state, then once per second what changed since then, as server-sent events.

        Changes are collected before the state is read, and one router answers the whole connection: nothing is missed
        between them, also after a break, and whichever router answers then.
        """
        reader: asyncio.Queue[bytes | None] = asyncio.Queue(READER_BACKLOG)
        self._readers.add(reader)
        stream = _Stream(request)
        try:
            await stream.open()
            await stream.write(b"event: state\n")
            async for piece in self._state():
                await stream.write(b"data: %s\n" % piece)
                if reader not in self._readers:  # ended meanwhile; a message without its end is dropped
                    return stream.response
            await stream.write(b"\n")
            while (change := await reader.get()) is not None:
                await stream.write(change)
        except ConnectionResetError:
            return web.Response(status=499)
        finally:
            self._readers.discard(reader)
        return stream.response

    async def _state(self) -> AsyncIterator[bytes]:
        """Everything that a page shows first, in pieces."""
        now, slices = time.time(), Slices()
        head = {
            "at": now,
            "keys": self._guard.required,
            "plans": self.plans.offered,
            "troubles": self.troubles(),
            "loads": await self._load(slices),
            "waits": await self._waited(self._traffic.table.models, slices),
        }
        window, past = await self._window(FIRST_SECONDS, now)
        # Without a pause after it: the past and the events are of one moment, which the revision names.
        head |= window | {"revision": self._revision}
        lists: dict[str, Iterator[object]] = {
            "events": map(_event, list(self._events)),
            "gpus": (_gpu(gpu) for gpu in self._inventory.gpus),
            "seats": (_row(upstream.key, upstream.record, self._clock) for upstream in self._upstreams()),
        }
        async for piece in _pieces(head, past | lists):
            yield piece

    async def _past(self, request: web.Request) -> web.StreamResponse:
        """A longer part of the past: ``?seconds=``."""
        seconds = max(0.0, min(MOST_SECONDS, number(request.query, "seconds", FIRST_SECONDS)))
        response = web.StreamResponse(headers={"Content-Type": "application/json", **HEADERS})
        response.enable_compression()
        head, lists = await self._window(seconds, time.time())
        await response.prepare(request)
        async for piece in _pieces(head, lists):
            await response.write(piece)
        await response.write_eof()
        return response

    async def _window(self, seconds: float, now: float) -> tuple[dict[str, object], dict[str, Iterator[object]]]:
        """Blocks, switches and waiting lines: what is short, and the rest as of the moment when this returns."""
        since, slices = now - seconds, Slices()
        await self._read_back(since)
        adopted = 0
        for upstream in self._upstreams():
            adopted += self._timeline.adopt(upstream.record)
            if adopted == ROWS:
                adopted = 0
                gc.freeze()  # as the rows of the roster: a full collection would walk them in one step
            await slices.pause()
        lines = dict[str, object]()
        for lane, line in self._lines.lines(since):
            lines[lane] = line
            await slices.pause()
        timeline = self._timeline
        blocks, switches = list(timeline.blocks(since)), list(timeline.switches.items())
        return {"since": max(since, timeline.since), "lines": lines}, {
            "blocks": (block.as_json() for block in blocks),
            "switches": ((model, last._asdict()) for model, last in switches),
        }

    async def _read_back(self, since: float) -> None:
        """Build the timeline from stored events, if it does not reach back to ``since``; one reader at a time."""
        if self._timeline.since <= since or self._timeline.full or self._while_reading is not None:
            return
        timeline, self._while_reading = Timeline(since), []
        try:
            async for event in self._bus.replay(since=since):
                if isinstance(event, SeatEvent | GroupDecided):
                    timeline.add(event)
            for event in self._while_reading:
                timeline.add(event)
            self._timeline = timeline
        except BusError as error:
            get_logger().info("timeline.unavailable", error=str(error))
        finally:
            self._while_reading = None

    async def _changes(self, now: float, lanes: Mapping[str, int], slices: Slices) -> bytes:
        """What differs from the piece before."""
        table, inventory = self._traffic.table, self._inventory
        touched, table.touched = table.touched, set()
        gpus, inventory.touched = inventory.touched, set()
        events, self._new, revision = self._new, [], self._revision
        models, self._waits.changed = self._waits.changed, set()
        seats, gone = list[bytes](), list[str]()
        for key in touched:
            if (upstream := table.upstreams.get(key)) is None:
                gone.append(key)
            else:
                seats.append(_json(_row(key, upstream.record, self._clock)))
            await slices.pause()
        head = {
            "at": now,
            "revision": revision,
            "events": [_event(event) for event in events],
            "gpus": {key: _gpu(gpu) if (gpu := inventory.rows.get(key)) else None for key in gpus},
            "gone": gone,
            "loads": await self._load(slices),
            "waits": await self._waited(models, slices),
            "lanes": lanes,
            "troubles": self.troubles(),
            "tokens": self._tokens.of_model,
        }
        return _json(head)[:-1] + b',"seats":[' + b",".join(seats) + b"]}"

    async def _load(self, slices: Slices) -> dict[str, list[float]]:
        """By model: waiting, in flight, and how long the oldest has waited in wall seconds."""
        found: dict[str, list[float]] = {}
        now = time.monotonic()
        for model, count in self._levels.loads.in_flight(now):
            if count:
                found.setdefault(model, [0, 0, 0.0])[1] += count
            await slices.pause()
        for model, _, count, oldest in self._levels.loads.waiting(now):
            row = found.setdefault(model, [0, 0, 0.0])
            row[0] += count
            row[2] = max(row[2], round(self._clock.to_wall(oldest), 1))
            await slices.pause()
        return found

    async def _waited(self, models: Iterable[str], slices: Slices) -> dict[str, dict[str, float]]:
        """How long the last requests of these models waited."""
        found = {}
        for model in list(models):
            if waits := self._waits.of(model):
                found[model] = waits
            await slices.pause()
        return found

    async def _waiting(self, slices: Slices) -> dict[str, int]:
        """Waiting requests by lane; those of no seat count for the lane of a seat of their model."""
        found: dict[str, int] = {}
        seats: dict[str, dict[str, SeatRecord]] = {}
        for model, seat, count, _ in self._levels.loads.waiting(time.monotonic()):
            if model not in seats:
                seats[model] = {record.seat: record for record in self._traffic.table.records_of(model)}
            if of := seats[model]:
                record = of.get(seat) or next(reversed(of.values()))
                lane = f"{record.node}/{record.group or record.home_group}"
                found[lane] = found.get(lane, 0) + count
            await slices.pause()
        return found

    def _upstreams(self) -> "list[Upstream]":
        return list(self._traffic.table.upstreams.values())

    def _send(self, reader: "asyncio.Queue[bytes | None]", piece: bytes) -> None:
        try:
            reader.put_nowait(piece)
        except asyncio.QueueFull:
            self._end(reader)

    def _end(self, reader: "asyncio.Queue[bytes | None]") -> None:
        self._readers.discard(reader)
        while not reader.empty():
            reader.get_nowait()
        reader.put_nowait(None)

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A file of the page."""
        path = (ASSETS / request.match_info.get("file", "index.html")).resolve()
        if not path.is_relative_to(ASSETS) or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, headers=HEADERS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Send the playground's request to the router's own port, as any client would, and stream its answer."""
        _check_origin(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() in _SENT}
        body = await request.read()
        url = f"{self.api_url}/v1/chat/completions"
        # This process' own port: its certificate names a public host.
        try:
            async with self._http.post(url, data=body, headers=headers, ssl=False) as answer:
                passed = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-kyb-")}
                response = web.StreamResponse(status=answer.status, headers=passed | HEADERS)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in _chunks(answer):
                    await response.write(chunk)
        except aiohttp.ClientError as error:
            raise RouterError(502, "router_unanswered", f"the router's port does not answer: {error}") from error
        except ConnectionResetError:
            return web.Response(status=499)
        return response


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield an answer; one that breaks off ends."""
    with contextlib.suppress(aiohttp.ClientPayloadError):
        async for chunk in answer.content.iter_any():
            yield chunk


def _event(event: Event) -> dict[str, Any]:
    """What the page shows of an event."""
    return {"type": event.kind(), **event.model_dump(mode="json", exclude_defaults=True)}


def _gpu(gpu: GpuRecord) -> dict[str, Any]:
    """What the page shows of a GPU."""
    return {"key": gpu.key, **gpu.model_dump(mode="json")}


def _row(key: str, record: SeatRecord, clock: Clock) -> dict[str, Any]:
    """What the page shows of a seat; what is empty is left out."""
    fields = {
        "key": key,
        "seat": record.seat,
        "node": record.node,
        "state": record.state,
        "model": record.model,
        "group": record.group or record.home_group,
        "home": record.home_group,
        "gpus": record.gpus,
        "resource": record.resource,
        "pod": record.pod,
        "tier": record.tier,
        "slo": clock.to_wall(record.slo_seconds),
        "pinned": record.pinned,
        "vram": record.vram_bytes,
        "host": record.host_bytes,
        "reason": record.reason,
        "blocked": record.blocked,
        "drained": record.drained,
        "since": record.since,
    }
    return {name: value for name, value in fields.items() if value}


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def _pieces(head: Mapping[str, object], lists: Mapping[str, Iterator[object]]) -> AsyncIterator[bytes]:
    """A JSON object in pieces, none of which has a line break: the lists are made while they are sent."""
    slices, piece = Slices(), bytearray(_json(head)[:-1])
    for name, items in lists.items():
        piece += b',"%s":[' % name.encode()
        for place, item in enumerate(items):
            piece += b"," * bool(place) + _json(item)
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
            await slices.pause()
        piece += b"]"
    yield bytes(piece) + b"}"


class _Stream:
    """An answer of server-sent events, compressed for a reader that accepts it: each write reaches it at once."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        self._request = request
        self._gzip: Any = None
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            self._gzip = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=31)
            self.response.headers["Content-Encoding"] = "gzip"

    async def open(self) -> None:
        """Send the head."""
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send a part. Raises ConnectionResetError if the reader has left."""
        if self._gzip is not None:
            small = len(data) < THREAD_BYTES
            data = self._compressed(data) if small else await asyncio.to_thread(self._compressed, data)
        await self.response.write(data)

    def _compressed(self, data: bytes) -> bytes:
        done: bytes = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        return done


async def _to_page(_: web.Request) -> NoReturn:
    raise web.HTTPFound("ui/")  # relative: a proxy may serve it below another path


async def _allowed(_: web.Request) -> web.Response:
    """Answer a key that may send commands."""
    return web.json_response({"allowed": True}, headers=HEADERS)


def _from_page(handler: Any) -> Any:
    """Wrap a command: it is refused when another site's page sends it."""

    async def checked(request: web.Request) -> web.StreamResponse:
        _check_origin(request)
        response: web.StreamResponse = await handler(request)
        return response

    return checked


def _check_origin(request: web.Request) -> None:
    """Raise RouterError 403 for a request of another site's page; a browser names the site, other clients need not."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise RouterError(403, "wrong_origin", f"a page of {origin[:200]} may not send this; use the page below /ui")
