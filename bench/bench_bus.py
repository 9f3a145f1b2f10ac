"""How much the bus carries: messages per second and round trips through NatsBus and a real nats-server."""

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer
from kybernate.envelope import Message
from kybernate.logs import configure
from kybernate.messages import ActivateSeat, CommandReply, SeatActivated, TrafficSignal
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState

MESSAGES = 20_000
ROUND_TRIPS = 2_000
BATCH = 200
"""Messages between two looks at how far the reader is, so that its inbox never overflows."""


async def run(messages: int = MESSAGES, round_trips: int = ROUND_TRIPS) -> dict[str, float]:
    """Figures by name: ``*_per_second`` is publish to decoded at the reader, ``*_ms`` are wall milliseconds.

    Publisher, reader and server share this machine; publisher and reader also one Python process.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kyb-bench-") as folder:
        async with (
            NatsServer(Path(folder)) as server,
            NatsBus(server.url, source="kyb/bench/writer", name="bench-writer").opened() as writer,
            NatsBus(server.url, source="kyb/bench/reader", name="bench-reader").opened() as reader,
        ):
            await init(server.url)
            async with asyncio.timeout(10):
                await writer.until_connected()
                await reader.until_connected()
            signal = TrafficSignal(cause="bench", source="router-0", model="org/model-7b", waiting=3, arrivals=2)
            figures["signals_per_second"] = await _carried(writer, reader, [signal] * messages)
            events: list[Message] = [_event(n) for n in range(messages)]
            figures["events_per_second"] = await _carried(writer, reader, events)
            figures |= await _requests(writer, reader, round_trips)
            figures |= await _puts(writer, round_trips)
    return figures


async def _carried(writer: NatsBus, reader: NatsBus, messages: list[Message]) -> float:
    """Messages per second from the first publish to the last one decoded."""
    arrived = asyncio.Semaphore(0)

    async def read() -> None:
        async for _ in got:
            arrived.release()

    async with reader.subscribe(type(messages[0]).pattern()) as got:
        task = asyncio.create_task(read())
        begin = time.perf_counter()
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            for message in batch:
                await writer.publish(message)
            for _ in batch:
                await arrived.acquire()
        seconds = time.perf_counter() - begin
        task.cancel()
        await asyncio.wait([task])
    return len(messages) / seconds


async def _requests(asker: NatsBus, server: NatsBus, count: int) -> dict[str, float]:
    async def accept(_: Message) -> CommandReply:
        return CommandReply(accepted=True, op="op", epoch=1)

    async def ask(_: int) -> None:
        await asker.request(ActivateSeat(cause="bench", node="n1", seat="s1"), CommandReply, timeout=5)

    async with server.serve(ActivateSeat.pattern(node="n1"), accept):
        return await _timed("request", ask, count)


async def _puts(bus: NatsBus, count: int) -> dict[str, float]:
    bucket = await bus.bucket(BUCKET)

    async def put(n: int) -> None:
        record = SeatRecord(node="n1", seat=f"s{n % 32}", state=SeatState.ACTIVE, epoch=n, model="org/model-7b")
        await bucket.put(record.key, record.model_dump_json().encode())

    return await _timed("kv_put", put, count)


async def _timed(name: str, step: Callable[[int], Awaitable[None]], count: int) -> dict[str, float]:
    took = []
    for n in range(count):
        begin = time.perf_counter()
        await step(n)
        took.append((time.perf_counter() - begin) * 1000)
    took.sort()
    return {f"{name}_p50_ms": took[count // 2], f"{name}_p99_ms": took[min(count - 1, count * 99 // 100)]}


def _event(n: int) -> SeatActivated:
    return SeatActivated(
        cause="bench",
        node="n1",
        seat="s1",
        state=SeatState.ACTIVE,
        epoch=n,
        model="org/model-7b",
        seconds={"park": 1.2, "activate": 1.4},
    )


if __name__ == "__main__":
    configure("bench")  # logs to stderr
    print(json.dumps(asyncio.run(run()), indent=2))
