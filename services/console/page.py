"""``/ui``: the page for operators, and its data.

Reading needs no key. Commands need one with the scope ``admin``, and the playground one with ``infer``, where there are
keys. The page's files are in ``assets/``; nothing is loaded from another host.
"""

import asyncio
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from kybernate.bus.port import Bus, BusError
from kybernate.clock import Clock, to_beat
from kybernate.http_api import Handler, number
from kybernate.logs import get_logger
from kybernate.messages import GroupDecided, SeatEvent
from kybernate.roster import GpuRecord, SeatRecord
from services.console.core.cluster import Cluster
from services.console.core.timeline import Timeline, WaitingLines
from services.console.follow import Event

ASSETS = Path(__file__).parent / "assets"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
TICK_SECONDS = 1.0
"""How often pages get what has changed."""
FIRST_SECONDS = 600.0
"""How much of the past the first answer has."""
MOST_SECONDS = 86_400.0
READER_BACKLOG = 60
"""Pieces that may wait for one page; a slower page is disconnected, and gets the state again when it is back."""
RECENT_EVENTS = 500
PIECE_BYTES = 64 * 1024
"""Of an answer, sent at a time."""
UNSHOWN = {"endpoint", "manager_url", "pod_uid", "riders", "epoch", "seq", "node_signals", "reported_at"}
"""Of a seat's row: a page needs no key, so it has no address of an engine."""
CHAT_BYTES = 256 * 1024
"""The longest body of a request of the page."""


class Page:
    """The routes of the page; ``run`` is a job. Other parts call ``add``."""

    def __init__(self, bus: Bus, cluster: Cluster, clock: Clock, *, keys: bool) -> None:
        """``keys``: commands need one."""
        self._bus, self._cluster, self._clock, self._keys = bus, cluster, clock, keys
        self.troubles: Callable[[], dict[str, str]] = dict
        """What is wrong with the console, by condition."""
        self.problems: Callable[[], dict[str, Any] | None] = lambda: None
        """What is wrong with the stack."""
        self._shown: dict[str, Any] | None = None
        """Problems that pages have."""
        self._timeline, self._lines = Timeline(time.time()), WaitingLines()
        self._events: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._new: list[Event] = []
        """Those that no page got yet."""
        self._revision = 0
        """How many events were added."""
        self._while_reading: list[SeatEvent | GroupDecided] | None = None
        self._readers: set[asyncio.Queue[bytes | None]] = set()

    def routes(self, admin: Callable[[Handler], Handler]) -> list[web.RouteDef]:
        """Return the routes of the page's own data; ``admin`` wraps handlers that need the scope."""
        return [
            web.get("/", _to_page),
            web.get("/ui", _to_page),
            web.get("/ui/", self._file),
            web.get("/ui/timeline", self._past),
            web.get("/ui/live", self._live),
            web.get("/ui/allowed", admin(_allowed)),
        ]

    def watched(self) -> bool:
        """Whether a page is open."""
        return bool(self._readers)

    def files(self) -> web.RouteDef:
        """Return the route of all other paths below ``/ui``."""
        return web.get("/ui/{file:.+}", self._file)

    def add(self, event: Event) -> None:
        """Take a new event of the cluster."""
        self._revision += 1
        self._events.append(event)
        self._new.append(event)
        if isinstance(event, SeatEvent | GroupDecided):
            self._timeline.add(event)
            if self._while_reading is not None:
                self._while_reading.append(event)

    async def run(self) -> NoReturn:
        """Sample waiting requests, and send changes to the pages that are open, until cancelled."""
        while True:
            await asyncio.sleep(to_beat(TICK_SECONDS))
            now = time.time()
            self._cluster.loads.forget(time.monotonic())
            # No pause in a step: a page that opens later has what is new in its state.
            lanes = self._lines.sample(self._waiting(), now)
            if self._readers:
                piece = b"data: " + self._changes(now, lanes) + b"\n\n"
                for reader in list(self._readers):
                    self._send(reader, piece)
            else:
                self._new.clear()
                self._cluster.seats.take(), self._cluster.gpus.take()

    def stop(self) -> None:
        """End every stream, because the console stops."""
        for reader in list(self._readers):
            self._end(reader)

    # --- what the page reads ------------------------------------------------------------------------------------------

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """The state, then once per second what changed since then, as server-sent events.

        Changes are collected before the state is read: nothing is missed between them, also after a break.
        """
        reader: asyncio.Queue[bytes | None] = asyncio.Queue(READER_BACKLOG)
        self._readers.add(reader)
        stream = _Stream(request)
        try:
            await stream.response.prepare(request)
            await self._read_back(time.time() - FIRST_SECONDS)
            await stream.write(b"event: state\n")
            for piece in self._state():
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

    def _state(self) -> Iterator[bytes]:
        """Everything that a page shows first, in pieces; all of the moment of the first piece."""
        now = time.time()
        head = {
            "at": now,
            "keys": self._keys,
            "troubles": self.troubles(),
            "problems": self.problems(),
            "loads": self._load(),
            "revision": self._revision,
        }
        window, past = self._window(FIRST_SECONDS, now)
        lists: dict[str, Iterator[object]] = {
            "events": map(_event, list(self._events)),
            "gpus": map(_gpu, list(self._cluster.gpus.rows.values())),
            "seats": (_row(key, record, self._clock) for key, record in dict(self._cluster.seats.rows).items()),
        }
        return _pieces(head | window, past | lists)

    async def _past(self, request: web.Request) -> web.StreamResponse:
        """A longer part of the past: ``?seconds=``."""
        seconds, now = max(0.0, min(MOST_SECONDS, number(request.query, "seconds", FIRST_SECONDS))), time.time()
        response = web.StreamResponse(headers={"Content-Type": "application/json", **HEADERS})
        response.enable_compression()
        await self._read_back(now - seconds)
        await response.prepare(request)
        for piece in _pieces(*self._window(seconds, now)):
            await response.write(piece)
        await response.write_eof()
        return response

    def _window(self, seconds: float, now: float) -> tuple[dict[str, object], dict[str, Iterator[object]]]:
        """Blocks, switches and waiting lines: what is short, and the rest as of the moment when this returns."""
        since, timeline = now - seconds, self._timeline
        for record in self._cluster.seats.rows.values():
            timeline.adopt(record)
        blocks, switches = list(timeline.blocks(since)), list(timeline.switches.items())
        return {"since": max(since, timeline.since), "lines": dict(self._lines.lines(since))}, {
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

    def _changes(self, now: float, lanes: Mapping[str, int]) -> bytes:
        """What differs from the piece before."""
        seats, gpus = self._cluster.seats, self._cluster.gpus
        touched = seats.take()
        events, self._new = self._new, []
        body: dict[str, object] = {
            "at": now,
            "revision": self._revision,
            "events": [_event(event) for event in events],
            "gpus": {key: _gpu(gpu) if (gpu := gpus.rows.get(key)) else None for key in gpus.take()},
            "gone": [key for key in touched if key not in seats.rows],
            "seats": [_row(key, seats.rows[key], self._clock) for key in touched if key in seats.rows],
            "loads": self._load(),
            "lanes": lanes,
            "troubles": self.troubles(),
        }
        if (problems := self.problems()) is not self._shown:
            self._shown = body["problems"] = problems
        return _json(body)

    def _load(self) -> dict[str, list[float]]:
        """By model: waiting, in flight, and how long the oldest has waited in wall seconds."""
        found: dict[str, list[float]] = {}
        for model, _, load in self._cluster.loads.busy(time.monotonic()):
            row = found.setdefault(model, [0, 0, 0.0])
            row[0] += load.waiting
            row[1] += load.in_flight
            row[2] = max(row[2], round(self._clock.to_wall(load.oldest), 1))
        return found

    def _waiting(self) -> dict[str, int]:
        """Waiting requests by lane; those of no seat count for the lane of a seat of their model."""
        found: dict[str, int] = {}
        for model, seat, load in self._cluster.loads.busy(time.monotonic()):
            if load.waiting and (records := self._cluster.seats.of_model(model)):
                record = next((one for one in records if one.seat == seat), records[-1])
                lane = f"{record.node}/{record.group or record.home_group}"
                found[lane] = found.get(lane, 0) + load.waiting
        return found

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

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A file of the page."""
        name = request.match_info.get("file", "index.html")
        try:
            path = (ASSETS / name).resolve()
            found = path.is_relative_to(ASSETS) and path.is_file() and not name.endswith("/")
        except (ValueError, OSError):  # a NUL, or a name that is too long
            found = False
        if not found:
            raise web.HTTPNotFound
        return web.FileResponse(path, headers=HEADERS)


def _event(event: Event) -> dict[str, Any]:
    """What the page shows of an event."""
    return {"type": event.kind(), **event.model_dump(mode="json", exclude_defaults=True)}


def _gpu(gpu: GpuRecord) -> dict[str, Any]:
    """What the page shows of a GPU."""
    return {"key": gpu.key, **gpu.model_dump(mode="json")}


def _row(key: str, record: SeatRecord, clock: Clock) -> dict[str, Any]:
    """What the page shows of a seat: its row, less what is empty."""
    fields = record.model_dump(mode="json", exclude=UNSHOWN) | {
        "key": key,
        "group": record.group or record.home_group,
        "slo_seconds": clock.to_wall(record.slo_seconds),
        "blocked": record.failed or record.blocked,
    }
    return {name: value for name, value in fields.items() if value}


def _json(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _pieces(head: Mapping[str, object], lists: Mapping[str, Iterator[object]]) -> Iterator[bytes]:
    """A JSON object in pieces, none of which has a line break: the lists are made while they are sent."""
    piece = bytearray(_json(head)[:-1])
    for name, items in lists.items():
        piece += b',"%s":[' % name.encode()
        for place, item in enumerate(items):
            piece += b"," * bool(place) + _json(item)
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        piece += b"]"
    yield bytes(piece) + b"}"


class _Stream:
    """An answer of server-sent events, compressed for a reader that accepts it: each write reaches it at once."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        self._gzip: Any = None
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            self._gzip = zlib.compressobj(zlib.Z_BEST_SPEED, wbits=31)
            self.response.headers["Content-Encoding"] = "gzip"

    async def write(self, data: bytes) -> None:
        """Send a part. Raises ConnectionResetError if the reader has left."""
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        await self.response.write(data)


async def _to_page(_: web.Request) -> NoReturn:
    raise web.HTTPFound("ui/")  # relative: a proxy may serve it below another path


async def _allowed(_: web.Request) -> web.Response:
    """Answer a key that may send commands."""
    return web.json_response({"allowed": True}, headers=HEADERS)
