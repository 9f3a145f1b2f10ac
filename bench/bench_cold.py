"""The router's own part of a wait for a parked model: a real router and nats-server; this process plays the rest.

``accept``: from the first byte of a call until its ActivateSeat is answered here, as a manager does. ``send``: from the
publication of SeatActivated until the engine has the first byte of the call. Wall times, in which the machine's other
work counts.
``make bench ARGS=switch`` has the same with a real manager.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from bench.bench_peers import bus, router
from bench.proxies import Caller, Engine
from kybernate.bus.nats import NatsBus
from kybernate.dev.demo.report import percentile
from kybernate.envelope import Message
from kybernate.messages import EVENT_OF_STATE, ActivateSeat, CommandReply
from kybernate.seat import SeatState

COLD = 300
WARM = 10
"""Calls before those that are measured."""
PAUSE_SECONDS = 0.02
"""Between a command's answer and the events, and between two calls."""


class TimedEngine(Engine):
    """Notes when it gets bytes."""

    got: "asyncio.Future[float]"

    def data_received(self, data: bytes) -> None:
        """Note the first."""
        if not TimedEngine.got.done():
            TimedEngine.got.set_result(time.perf_counter())
        super().data_received(data)


async def run(cold: int = COLD) -> dict[str, float]:
    """Return median and p99 of both, in wall milliseconds."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(TimedEngine, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    asked: asyncio.Queue[tuple[float, str]] = asyncio.Queue()

    async def accept(message: Message) -> CommandReply:
        asked.put_nowait((time.perf_counter(), message.cause))
        return CommandReply(accepted=True, op="op", epoch=1)

    accepts: list[float] = []
    sends: list[float] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kyb-bench-")))
        url = await stack.enter_async_context(bus(folder, endpoint, SeatState.PARKED))
        manager = await stack.enter_async_context(NatsBus(url, source="kyb/bench", name="manager").opened())
        await manager.until_connected()
        await stack.enter_async_context(manager.serve(ActivateSeat.pattern(), accept))
        peer = await stack.enter_async_context(router("router", Path.cwd(), folder, url))
        tell = _teller(manager, endpoint)
        for _ in range(cold + WARM):
            TimedEngine.got = loop.create_future()
            _, caller = await loop.create_connection(lambda: Caller(False, 1), "127.0.0.1", peer.port)
            async with asyncio.timeout(30):
                at, cause = await asked.get()
                accepts.append(at - caller.began)
                await asyncio.sleep(PAUSE_SECONDS)
                await tell(SeatState.ACTIVATING, cause)
                await asyncio.sleep(PAUSE_SECONDS)
                published = time.perf_counter()
                await tell(SeatState.ACTIVE, cause)
                sends.append(await TimedEngine.got - published)
                await caller.done
            await tell(SeatState.PARKED, cause)
            await asyncio.sleep(PAUSE_SECONDS)
    server.close()
    figures = {}
    for name, seconds in (("accept", accepts[WARM:]), ("send", sends[WARM:])):
        figures[f"{name} p50 ms"] = median(seconds) * 1e3
        figures[f"{name} p99 ms"] = (percentile(seconds, 0.99) or 0.0) * 1e3
    return figures


def _teller(manager: NatsBus, endpoint: str) -> Callable[[SeatState, str], Awaitable[None]]:
    """Return what publishes the next event of the seat."""
    numbers = itertools.count(2)

    async def tell(state: SeatState, cause: str) -> None:
        number = next(numbers)
        event = EVENT_OF_STATE[state](
            cause=cause,
            node="bench",
            seat="s0",
            state=state,
            epoch=number,
            seq=number,
            model="bench",
            endpoint=endpoint,
        )
        await manager.publish(event)

    return tell
