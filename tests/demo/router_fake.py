"""A router and its engines in one small aiohttp application: real HTTP, right answers, and faults by order."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.http.server import HttpServer
from kybernate.messages import EVENT_OF_STATE, SeatEvent
from kybernate.seat import SeatState

right_text = expected_text


def event(
    seat: str, state: SeatState, previous: SeatState | None = None, *, at: float | None = None, **rest: object
) -> SeatEvent:
    kind = EVENT_OF_STATE[state]
    given = {"cause": "c", "node": "n", "seat": seat, "state": state, "previous": previous, **rest}
    return kind.model_validate(given | {"at": time.time() if at is None else at})


@dataclass
class FakeRouter:
    models: tuple[str, ...] = ("a", "b")
    faults: dict[str, list[str]] = field(default_factory=dict)
    """By model: what goes wrong with the next requests, one each."""
    headers: dict[str, str] = field(default_factory=lambda: {"x-kyb-held-seconds": "0.0"})
    asked: list[dict[str, Any]] = field(default_factory=list)
    last_ids: list[str | None] = field(default_factory=list)
    stored: list[SeatEvent] = field(default_factory=list)
    listeners: list[asyncio.Queue[SeatEvent | None]] = field(default_factory=list)
    seats: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Of the only node, as the manager explains them."""
    url: str = ""
    held: asyncio.Lock = field(default_factory=asyncio.Lock)
    """While it is locked no request is answered."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeRouter"]:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/seats", self._seats),
                web.get("/v1/why", self._why),
                web.get("/v1/events", self._events),
                web.get("/healthz", self._seats),
            ]
        )
        async with HttpServer(app, "127.0.0.1", 0) as server:
            self.url = server.url
            try:
                yield self
            finally:
                self.hang_up()

    def say(self, event: SeatEvent) -> None:
        self.stored.append(event)
        for listener in self.listeners:
            listener.put_nowait(event)

    def hang_up(self) -> None:
        for listener in self.listeners:
            listener.put_nowait(None)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": model} for model in self.models]})

    async def _why(self, _: web.Request) -> web.Response:
        return web.json_response({"nodes": [{"node": "n", "groups": self.groups}]})

    async def _seats(self, _: web.Request) -> web.Response:
        return web.json_response({"seats": self.seats})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["messages"][0]["content"], chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], chat=False)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: str, *, chat: bool
    ) -> web.StreamResponse:
        self.asked.append(body)
        async with self.held:
            pass
        queue = self.faults.get(body["model"], [])
        fault = queue.pop(0) if queue else ""
        if fault.startswith("status "):
            _, status, *retry = fault.split()
            headers = {"Retry-After": retry[0]} if retry else {}
            return web.json_response({"error": {"message": "busy"}}, status=int(status), headers=headers)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        text = right_text(body["model"], prompt, body["max_tokens"])
        if fault == "corrupt":
            text = text[:-1] + "?"  # one letter wrong
        if not body["stream"]:
            part = {"message": {"content": text}} if chat else {"text": text}
            choice = part if fault == "unfinished" else part | {"finish_reason": "length"}
            if fault == "nonsense":
                return web.Response(text="<html>", headers=self.headers)
            return web.json_response({"choices": [choice]}, headers=self.headers)
        return await self._stream(request, text, fault, chat=chat)

    async def _stream(self, request: web.Request, text: str, fault: str, *, chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers=self.headers | {"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        half = len(text) // 2
        for number, piece in enumerate((text[:half], text[half:])):
            if number and fault == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if number and fault == "evicted":
                error = {"error": {"message": "the seat was evicted", "code": "seat_evicted"}}
                await response.write(f"data: {json.dumps(error)}\n\n".encode())
                return response
            if fault == "nonsense":
                await response.write(b"data: {{{\n\n")
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if fault != "unfinished":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID")
        self.last_ids.append(last)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        listener: asyncio.Queue[SeatEvent | None] = asyncio.Queue()
        for event in self.stored[_after(self.stored, last) :]:
            listener.put_nowait(event)
        self.listeners.append(listener)
        try:
            await response.write(b": hello\n\n")
            while (event := await listener.get()) is not None:
                data = event.model_dump_json()
                await response.write(f"id: {event.id}\nevent: {event.kind()}\ndata: {data}\n\n".encode())
        finally:
            self.listeners.remove(listener)
        return response


def _after(stored: list[SeatEvent], last: str | None) -> int:
    ids = [event.id for event in stored]
    return ids.index(last) + 1 if last in ids else len(stored)
