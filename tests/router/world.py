"""A router with a bus in memory, a manager that the test controls, and engines without GPUs; all else is real."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.envelope import Message
from kybernate.http.server import HttpServer
from kybernate.messages import (
    EVENT_OF_STATE,
    ActivateSeat,
    AuditRecord,
    CommandReply,
    DrainAck,
    DrainNode,
    MigrateSeat,
    NodeTrafficSignal,
    ParkSeat,
    PinSeat,
    Presence,
    ResumeNode,
    SeatEvent,
    TrafficSignal,
    UnpinSeat,
)
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState
from services.router.service import RunningRouter, open_router
from services.router.settings import RouterSettings
from tests.router.engine import Engine
from tests.until import until

NODE = "n1"


class Manager:
    """Owns the roster of one node. ``auto``: a requested seat becomes active at once."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.auto = True
        self.rows: dict[str, SeatRecord] = {}
        self.received: list[Message] = []
        self.reply: CommandReply | None = None
        self.http_queries = 0
        self.url = ""
        self.epochs = itertools.count(100)
        self.seqs = itertools.count(1)
        self.control_seconds = 0.001
        self.counted: dict[str, float] = {}
        self.lists = True
        """It receives the presences of routers, and its own arrives."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    async def put(self, seat: str, state: SeatState = SeatState.PARKED, **fields: Any) -> SeatRecord:
        """Write a row of the roster without an event."""
        known = self.rows.get(seat)
        values = known.model_dump() if known else {"node": NODE, "seat": seat, "manager_url": self.url}
        values |= {"state": state, "since": time.time(), "reported_at": time.time()}
        values |= {"epoch": next(self.epochs), "seq": next(self.seqs)}
        record = SeatRecord.model_validate(values | fields)
        self.rows[seat] = record
        bucket = await self.bus.bucket(BUCKET)
        await bucket.put(record.key, record.model_dump_json().encode())
        return record

    async def move(
        self, seat: str, state: SeatState, *, cause: str = "test", roster: bool = True, **fields: Any
    ) -> SeatEvent:
        """Make a transition: publish the event, then the row, at a new epoch unless one is given."""
        old = self.rows[seat]
        epoch = fields.pop("epoch", None) or next(self.epochs)
        event = EVENT_OF_STATE[state](
            cause=cause,
            node=NODE,
            seat=seat,
            state=state,
            previous=old.state,
            epoch=epoch,
            seq=next(self.seqs),
            model=old.model,
            group=old.group,
            endpoint=old.endpoint,
            **fields,
        )
        await self.bus.publish(event)
        if roster:
            await self.put(seat, state, epoch=epoch, reason=fields.get("reason", ""))
        return event

    async def activate(self, seat: str, cause: str = "test") -> None:
        epoch = next(self.epochs)
        op = f"{NODE}-{epoch}"
        await self.move(seat, SeatState.ACTIVATING, cause=cause, epoch=epoch, op=op)
        done = {"op": op, "seconds": {"control": self.control_seconds}, "last_call_at": time.time()}
        await self.move(seat, SeatState.ACTIVE, cause=cause, epoch=epoch, **done)

    async def answer(self, message: Message) -> CommandReply:
        self.received.append(message)
        if self.reply is not None:
            return self.reply
        if isinstance(message, ActivateSeat) and self.auto and self.rows[message.seat].state is SeatState.PARKED:
            asyncio.get_running_loop().call_soon(self._spawn, message)
        return CommandReply(accepted=True, op="op1", epoch=1)

    def _spawn(self, message: ActivateSeat) -> None:
        self.task = asyncio.create_task(self.activate(message.seat, message.cause))

    async def listen(self) -> None:
        signals = TrafficSignal.pattern(), NodeTrafficSignal.pattern()
        patterns = (*signals, DrainAck.pattern(), Presence.pattern(), AuditRecord.pattern())
        async with self.bus.subscribe(*patterns) as messages:
            async for message in messages:
                self.received.append(message)
                if isinstance(message, Presence) and message.component == "router" and message.sent is not None:
                    self.counted[message.incarnation] = message.sent
                    await self.list_routers()

    async def list_routers(self) -> None:
        """Publish the presence, with the routers that are counted."""
        if self.lists:
            known = dict(self.counted)
            await self.bus.publish(
                Presence(cause="p", component="gpu-manager", instance="m", incarnation="m1", node=NODE, routers=known)
            )

    async def seats(self, _: web.Request) -> web.Response:
        self.http_queries += 1
        return web.json_response({"seats": [row.model_dump(mode="json") for row in self.rows.values()]})


class World:
    def __init__(
        self, router: RunningRouter, manager: Manager, server: MemoryServer, bus: MemoryBus, http: Any
    ) -> None:
        self.router, self.manager, self.server, self.bus, self.http = router, manager, server, bus, http
        self.url: str = router.url
        self.engines: list[Engine] = []

    async def seat(self, seat: str, model: str, state: SeatState = SeatState.PARKED, **fields: Any) -> Engine:
        """Add a seat of a model with its own engine, and wait until the router knows it."""
        engine = Engine()
        self.engines.append(engine)
        await engine.start()
        await self.manager.put(
            seat, state, model=model, endpoint=engine.endpoint, group="G0", home_group="G0", gpus=(0,), **fields
        )
        await until(
            lambda: f"{NODE}.{seat}" in self.router.traffic.table.upstreams or not self.bus.connected,
            what=f"the router knows seat {seat}",
            saw=lambda: self.router.traffic.table.upstreams.keys(),
        )
        return engine

    async def ready(self) -> None:
        sure = self.router.traffic.trust.sure
        await until(lambda: sure(NODE, time.monotonic()), what="the router has a lease and the roster")

    def ask(self, model: str, *, stream: bool = False, **more: Any) -> "asyncio.Task[Answered]":
        return asyncio.create_task(self._ask({"model": model, "stream": stream, "messages": []}, **more))

    async def _ask(self, body: dict[str, Any], **headers: str) -> "Answered":
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.fetch("POST", f"{self.router.url}/v1/chat/completions", json=body, headers=named)

    async def hold(self, model: str, **more: Any) -> "asyncio.Task[Answered]":
        """Ask, and wait until the router holds the call."""
        before = self.held(model)
        call = self.ask(model, **more)
        await until(lambda: self.held(model) > before, what=f"a call of {model} is held", saw=lambda: call)
        return call

    async def last(self, kind: type[Any], check: Callable[[Any], object]) -> Any:
        """Wait until the last message of a kind that the manager has received is as wanted; return it."""
        of = self.manager.of
        return await until(
            lambda: next((one for one in of(kind)[-1:] if check(one)), None),
            what=f"the last {kind.__name__} is as wanted",
            saw=lambda: of(kind),
        )

    async def call(self, method: str, path: str, **how: Any) -> "Answered":
        return await self.fetch(method, self.url + path, **how)

    async def fetch(self, method: str, url: str, **how: Any) -> "Answered":
        async with self.http.request(method, url, **how) as response:
            return Answered(response.status, response.headers.copy(), await response.read())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))

    def held(self, model: str) -> int:
        known = self.router.traffic.table.models.get(model)
        return len(known.held) if known else 0

    def upstream(self, seat: str) -> Any:
        return self.router.traffic.table.upstreams[f"{NODE}.{seat}"]


class Answered:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


@asynccontextmanager
async def world(*, connected: bool = True, tracer: Any = None, **settings: Any) -> AsyncIterator[World]:
    """Run a router. Settings are those of RouterSettings."""
    async with AsyncExitStack() as stack:
        server = MemoryServer()
        bus = await stack.enter_async_context(MemoryBus.connect(server))
        other = await stack.enter_async_context(MemoryBus.connect(server))
        if not connected:
            bus.cut()
        manager = Manager(other)
        app = web.Application()
        app.router.add_get("/v1/seats", manager.seats)
        manager.url = (await stack.enter_async_context(HttpServer(app, "127.0.0.1", 0))).url
        for kind in (ActivateSeat, ParkSeat, PinSeat, UnpinSeat, MigrateSeat, DrainNode, ResumeNode):
            await stack.enter_async_context(other.serve(kind.pattern(node=NODE), manager.answer))
        values = {"host": "127.0.0.1", "port": 0, "instance": "router-0", **settings}
        router = await stack.enter_async_context(open_router(RouterSettings.model_validate(values), bus, tracer=tracer))
        jobs = [manager.listen(), *router.jobs().values()]
        tasks = [asyncio.create_task(job) for job in jobs]
        stack.push_async_callback(end, tasks)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        here = World(router, manager, server, bus, http)
        try:
            if connected:
                await here.ready()
                router.traffic.trust.settles = 0.0  # it runs for a while
            yield here
            failed = [task.exception() for task in tasks if task.done()]
            assert not failed, failed
        finally:
            for engine in here.engines:
                await engine.stop()


async def end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
