"""A router of a few lines, with the shapes of the real one, and ``kyb`` run against it."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kybernate.envelope import Message
from kybernate.http.server import HttpServer
from kybernate.messages import GroupDecided, SeatActivated, SeatEvent, SeatLoad, SeatParked
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.console.core.overview import SeatNameError, resolve
from services.console.history import KINDS


def seat(number: int, model: str, state: SeatState, group: str = "G0", **more: Any) -> SeatRecord:
    return SeatRecord(
        node="laptop",
        seat=f"1x-abcdef.s{number:02d}",
        state=state,
        model=model,
        group=group,
        home_group=group,
        gpus=(0,),
        resource="kyb.ai/gpu-1x-seat",
        started=True,
        since=1_700_000_000.0,
        **{"vram_bytes": 40 * 2**30} | more,
    )


SEATS = [
    seat(0, "qwen3-32b", SeatState.ACTIVE, pinned=True),
    seat(1, "gemma-3-27b", SeatState.PARKED, pod="demo/gemma", pod_uid="uid-7"),
    seat(2, "phi-4", SeatState.QUARANTINED, "G1", reason="a foreign process holds GPU 1"),
    seat(3, "twin", SeatState.PARKED, "G1"),
    seat(4, "twin", SeatState.WAITING, "G1", vram_bytes=0),
    seat(5, "", SeatState.FREE, "G1"),
]


def happened(kind: type[SeatEvent], number: int, model: str, state: SeatState) -> SeatEvent:
    name = f"1x-abcdef.s{number:02d}"
    return kind(
        id=f"e{number}", cause="c", at=1_700_000_000.0, node="laptop", seat=name, model=model, state=state, group="G0",
        epoch=7, seconds={"park": 1.25} if state is SeatState.PARKED else {},
    )  # fmt: skip


EVENTS = [
    happened(SeatParked, 0, "qwen3-32b", SeatState.PARKED),
    happened(SeatActivated, 1, "gemma-3-27b", SeatState.ACTIVE),
]


DECIDED = GroupDecided(
    cause="req-7", at=1_700_000_002.0, node="laptop", group="G0", decision="switch", op="G0-7", model="gemma-3-27b",
    victim_model="qwen3-32b", victim="v", incoming="i", reason="0.7 > 0.2",
    loads=(SeatLoad(seat="i", model="gemma-3-27b", state=SeatState.PARKED, waiting=3, oldest_wait_seconds=8.2),),
)  # fmt: skip
STORY = {
    "request": {"request": "req/7", "model": "gemma-3-27b", "router": "router-0"},
    "phases": {"hold": 2.5, "drain": 0.4},
    "steps": [
        {"step": "arrived", "at": 0.0, "model": "gemma-3-27b"},
        {"step": "decided", "at": 0.01, "decision": "switch", "model": "gemma-3-27b", "victim_model": "qwen3-32b",
         "reason": "0.7 > 0.2"},
        {"step": "parked", "at": 1.2, "model": "qwen3-32b"},
        {"step": "ended", "at": 3.5, "status": 200, "reason": ""},
    ],
    "events": [],
}  # fmt: skip


def seen(name: str, model: str, **more: Any) -> dict[str, Any]:
    """A seat as the policy saw it."""
    zero = ("waiting", "in_flight", "oldest_wait_seconds", "rate_fast", "rate_slow")
    costs = {"service_seconds": 5.0, "park_seconds": 2.0, "activate_seconds": 3.0, "weight": 1.0, "slo_seconds": 20.0}
    plain = {"seat": name, "model": model, "state": "parked", "tier": "standard", "pinned": False}
    return {**plain, **costs, **dict.fromkeys(zero, 0), **more}


BLOCKED = {"blocked": "did not come back once; others go first for 1 s: room: GPU 0 is full"}
WHY = {
    "nodes": [
        {
            "node": "laptop",
            "policy": "kyb-balanced",
            "errors": 2,
            "last_error": "group G1: ZeroDivisionError: division by zero",
            "problems": ["kyb.ai/tier: 'god' of pod demo/phi is no tier here; did you mean gold?"],
            "groups": [
                {
                    "group": "G0",
                    "why": "a idle; b 0.7 > c 0.2",
                    "seats": [
                        seen("s0", "qwen", state="draining", in_flight=1, pinned=True),
                        seen("s1", "gemma", waiting=3, oldest_wait_seconds=8.25, rate_fast=0.1) | BLOCKED,
                    ],
                },
                {"group": "G1", "why": "no demand", "seats": [seen("s2", "phi")]},
            ],
        },
        {"node": "other", "unanswered": "its manager at http://x does not answer (nothing in time)"},
    ]
}


@dataclass
class SmallRouter:
    """What was asked, and what is answered."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    last_ids: list[str | None] = field(default_factory=list)
    sinces: list[str | None] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """What stood in Authorization."""
    refuse: str = ""
    """Reason with which commands are refused."""
    history_unavailable: bool = False
    past: list[Message] = field(default_factory=lambda: [*EVENTS, DECIDED])

    def app(self) -> web.Application:
        app = web.Application()
        app.on_response_prepare.append(self._note_key)
        app.add_routes(
            [
                web.get("/v1/seats", self._seats),
                web.get("/v1/why", self._why),
                web.get("/v1/routers", self._routers),
                web.get("/readyz", self._readyz),
                web.post("/v1/seats/{name:.+}/{verb}", self._command),
                web.get("/v1/events", self._events),
                web.get("/v1/history", self._history),
                web.get("/v1/requests/{request:.+}", self._request),
            ]
        )
        return app

    async def _note_key(self, request: web.Request, _: web.StreamResponse) -> None:
        if "Authorization" in request.headers:
            self.keys.append(request.headers["Authorization"])

    async def _seats(self, _: web.Request) -> web.Response:
        rows = [{**row.model_dump(mode="json"), "waiting": 2 * row.pinned, "in_flight": 0} for row in SEATS]
        return web.json_response({"seats": rows, "models": {}, "nodes": {}})

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "unmet": {}})

    async def _routers(self, _: web.Request) -> web.Response:
        return web.json_response({"routers": [{"router": "router-0", "url": "http://r", "unmet": {}}]})

    async def _why(self, _: web.Request) -> web.Response:
        return web.json_response(WHY)

    async def _command(self, request: web.Request) -> web.Response:
        try:
            row = resolve(request.match_info["name"], SEATS)
        except SeatNameError as error:
            code = "ambiguous_name" if error.candidates else "seat_not_found"
            return self._error(409 if error.candidates else 404, code, str(error))
        if self.refuse:
            return self._error(409, "pinned", f"seat {row.seat}: {self.refuse}")
        self.asked.append(f"{request.match_info['verb']} {row.seat}")
        body = {"accepted": True, "op": "op1", "epoch": 3, "seat": row.seat, "model": row.model, "node": row.node}
        return web.json_response(body, status=202)

    async def _history(self, request: web.Request) -> web.Response:
        self.asked.append(f"history {request.query_string}")
        if self.history_unavailable:
            return self._error(503, "bus_unavailable", "the history cannot be read")
        events = [{"type": event.kind(), **event.model_dump(mode="json", exclude_none=True)} for event in self.past]
        asked = {name: request.query[name] for name in ("model", "group") if name in request.query}
        found = [event for event in events if asked.items() <= event.items()]
        if kind := request.query.get("kind"):
            if kind not in KINDS:
                return self._error(400, "invalid_field", f"kind: {kind!r} is none of …")
            found = [event for event in found if event.get("decision") == kind]
        return web.json_response({"events": found, "complete": True})

    async def _request(self, request: web.Request) -> web.Response:
        if request.match_info["request"] != "req/7":
            return self._error(404, "no_record", "no record of request 'x'")
        return web.json_response(STORY)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """One event per connection, as if the router were restarted after each."""
        last = request.headers.get("Last-Event-ID")
        self.last_ids.append(last)
        self.sinces.append(request.query.get("since"))
        ids = [event.id for event in EVENTS]
        event = EVENTS[ids.index(last) + 1 if last in ids else 0]
        body = {"type": event.kind(), **json.loads(event.body())}
        text = f": hello\n\nid: {event.id}\ndata: {json.dumps(body)}\n\n"
        return web.Response(text=text, content_type="text/event-stream")

    @staticmethod
    def _error(status: int, code: str, message: str) -> web.Response:
        return web.json_response({"error": {"message": message, "type": "error", "code": code}}, status=status)


@pytest.fixture
async def router() -> AsyncIterator[SmallRouter]:
    small = SmallRouter()
    async with HttpServer(small.app(), "127.0.0.1", 0) as server:
        small.url = server.url
        yield small
