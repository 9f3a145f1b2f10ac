"""A small engine for the router's tests: an OpenAI server whose responses a test can delay or break."""

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web
from multidict import CIMultiDictProxy


class Engine:
    def __init__(self) -> None:
        self.port = 0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[CIMultiDictProxy[str]] = []
        self.status = 200
        """Of plain responses."""
        self.plain: tuple[str, bytes] | None = None
        """Media type and body of responses, a stream's media type apart; None: an answer of its model."""
        self.gate = asyncio.Event()
        self.gate.set()
        """Cleared: a stream stops after its first chunk, a plain response does not begin."""
        self.silent = asyncio.Event()
        self.silent.set()
        """Cleared: no request is answered."""
        self.end = asyncio.Event()
        self.end.set()
        """Cleared: a stream does not end after its last event."""
        self.running = 0
        self.aborted = 0
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/{path:.+}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        self.running += 1
        try:
            await self.silent.wait()
            return await (self._stream(request, body) if body.get("stream") else self._whole(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _whole(self, body: dict[str, Any]) -> web.StreamResponse:
        await self.gate.wait()
        if self.plain is not None:
            media, raw = self.plain
            return web.Response(body=raw, status=self.status, content_type=media)
        message = {"role": "assistant", "content": "hello from " + body["model"]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]},
            status=self.status,
            headers={"X-Engine": "yes"},
        )

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.plain is not None:
            await response.write_eof(self.plain[1])
            return response
        for number in range(3):
            delta = {"index": 0, "delta": {"role": "assistant", "content": f"w{number} "}, "finish_reason": None}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            with contextlib.suppress(ConnectionResetError):
                await response.write(b"data: " + json.dumps({**chunk, "choices": [delta]}).encode() + b"\n\n")
            await self.gate.wait()
        with contextlib.suppress(ConnectionResetError):
            await response.write(b"data: [DONE]\n\n")
            await self.end.wait()
            await response.write_eof()
        return response
