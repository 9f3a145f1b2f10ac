"""A cluster of which only the messages exist: managers with parked and active seats, and the routers that use them.

Rows, presence, events and signals are those of the real services, made with their message models. Signals are written
to NATS as bytes that were made before, so that twenty thousand a second cost this process little.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kybernate.bus.nats import NatsBus
from kybernate.bus.port import BusError
from kybernate.envelope import Message
from kybernate.messages import EVENT_OF_STATE, NodeTrafficSignal, Presence
from kybernate.roster import BUCKET, SeatRecord
from kybernate.seat import SeatState

SEATS_PER_NODE = 64
GROUPS_PER_NODE = 8
MODELS = 2_000
SIGNALS_PER_NODE = 20
"""A second: of ten routers, each for two busy seats."""
ROUTERS = 10
SWITCH_SECONDS = 60.0
"""Each node switches once in this time."""
SLICES = 20
"""Parts of a second in which signals are sent."""
ROWS_AT_ONCE = 2_000
_SWITCH = (SeatState.DRAINING, SeatState.PARKING, SeatState.PARKED), (SeatState.ACTIVATING, SeatState.ACTIVE)


class SimulatedCluster:
    """So many seats, ``SEATS_PER_NODE`` on each node, on this bus."""

    def __init__(self, bus: NatsBus, seats: int) -> None:
        self._bus, self._seats = bus, seats
        self.nodes = [f"node-{number:04}" for number in range(-(-seats // SEATS_PER_NODE))]
        self._epochs = itertools.count(seats + 1)
        self._routers: dict[str, float] = {}
        """Real routers: incarnation → ``Presence.sent`` of the last one."""
        self.changed = ""
        """Reason of the row that ``change`` wrote last; no row had it before."""

    @property
    def signals(self) -> int:
        """A second."""
        return len(self.nodes) * SIGNALS_PER_NODE

    async def fill(self) -> None:
        """Write the roster, and wait until it is stored."""
        for first in range(0, self._seats, ROWS_AT_ONCE):
            last = min(self._seats, first + ROWS_AT_ONCE)
            for number in range(first, last):
                await self._put(self._row(number))
            await self._stored(last)

    async def change(self) -> None:
        """Write the last row anew, as soon as the bus takes it."""
        epoch = next(self._epochs)
        self.changed = f"changed {epoch}"
        row = self._row(self._seats - 1).model_copy(update={"epoch": epoch, "reason": self.changed})
        written = 0
        while not written:
            await self._bus.until_connected()
            with contextlib.suppress(BusError):
                bucket = await self._bus.bucket(BUCKET)
                written = await bucket.put(row.key, row.model_dump_json().encode())

    @asynccontextmanager
    async def alive(self, url: str, extra: Sequence[bytes] = ()) -> AsyncIterator[None]:
        """Managers and routers publish their presence, routers their signals, and ``extra`` each second."""
        tasks = [asyncio.create_task(work) for work in (self._present(), _send(url, self._signals(), extra))]
        try:
            yield
        finally:
            await _end(tasks)

    @asynccontextmanager
    async def switching(self) -> AsyncIterator[None]:
        """Each node switches once in ``SWITCH_SECONDS``: five events, and a row after each."""
        task = asyncio.create_task(self._switch())
        try:
            yield
        finally:
            await _end([task])

    async def _present(self) -> None:
        count = asyncio.create_task(self._count())
        try:
            await self._beat()
        finally:
            count.cancel()

    async def _count(self) -> None:
        """Count the real routers, as each manager does."""
        async with self._bus.subscribe(Presence.pattern(component="router")) as messages:
            async for message in messages:
                if isinstance(message, Presence) and message.sent is not None:
                    self._routers[message.incarnation] = message.sent

    async def _beat(self) -> None:
        managers = [
            Presence(cause="p", component="gpu-manager", instance=node, incarnation="i", node=node, routers={})
            for node in self.nodes
        ]
        routers = [
            Presence(cause="p", component="router", instance=f"simulated-{number}", incarnation="i")
            for number in range(ROUTERS)
        ]
        every = [*routers, *managers]
        while True:  # in slices of 0.1 s, each once in 2 s
            for part in range(SLICES):
                for presence in every[part::SLICES]:
                    if presence.routers is not None:
                        presence = presence.model_copy(update={"routers": self._routers})
                    await self._bus.publish(presence)
                await asyncio.sleep(2.0 / SLICES)

    def _signals(self) -> list[bytes]:
        """The levels of all busy seats, each second: one part for each slice."""
        busy = []
        for number, node in enumerate(self.nodes):
            for each in range(SIGNALS_PER_NODE):
                row = self._row(number * SEATS_PER_NODE + each % 2 * GROUPS_PER_NODE)
                busy.append(level(node, row.seat, row.model, f"simulated-{each // 2}"))
        return [b"".join(busy[part::SLICES]) for part in range(SLICES)]

    async def _switch(self) -> None:
        for number in itertools.cycle(range(len(self.nodes))):
            group = number * SEATS_PER_NODE
            for seat, states in zip((group, group + 1), _SWITCH, strict=True):
                epoch = next(self._epochs)
                for seq, state in enumerate(states):
                    row = self._row(seat).model_copy(update={"epoch": epoch, "seq": seq, "state": state})
                    fields = row.model_dump(include={"node", "seat", "epoch", "seq", "model", "group", "endpoint"})
                    await self._bus.publish(EVENT_OF_STATE[state](cause="c", state=state, **fields))
                    await self._put(row)
            await asyncio.sleep(SWITCH_SECONDS / len(self.nodes))

    def _row(self, number: int) -> SeatRecord:
        node, seat = divmod(number, SEATS_PER_NODE)
        group = seat // GROUPS_PER_NODE
        return SeatRecord(
            node=self.nodes[node],
            seat=f"1x-{number:06x}.s{seat:02}",
            state=SeatState.PARKED if seat % GROUPS_PER_NODE else SeatState.ACTIVE,
            epoch=number + 1,
            model=f"org/model-{number % MODELS}",
            endpoint="http://10.0.123.145:8000",
            group=f"G{group}",
            home_group=f"G{group}",
            gpus=(group,),
            resource="kyb.ai/gpu-1x-seat",
            pod=f"models/model-{number % MODELS}-7d9f8b6c54-{number:05x}",
            pod_uid=f"00000000-0000-4000-8000-{number:012x}",
            vram_bytes=60 << 30,
            host_bytes=61 << 30,
            fixed="its engine holds memory that CUDA does not save, so it stays on the GPUs where it was started",
            activate_seconds=7.251,
            since=1.0,
            manager_url="http://127.0.0.1:9",
            reported_at=time.time(),
        )

    async def _put(self, row: SeatRecord) -> None:
        """Without waiting for the acknowledgement."""
        await self._bus.link.client.publish(f"$KV.{BUCKET}.{row.key}", row.model_dump_json().encode())

    async def _stored(self, rows: int) -> None:
        while True:
            async with self._bus.jetstream("rows", 60.0) as js:
                if (await js.stream_info(f"KV_{BUCKET}")).state.messages >= rows:
                    return
            await asyncio.sleep(0.02)


def level(node: str, seat: str, model: str, source: str) -> bytes:
    """A signal of a router about one request in flight, as a command of NATS' protocol."""
    signal = NodeTrafficSignal(
        cause="0" * 32,
        source=source,
        model=model,
        seat=seat,
        node=node,
        in_flight=1,
        arrivals=1,
        incarnation="0" * 12,
        arrived=1,
        served=0,
        served_seconds=0.0,
    )
    return _publish(signal)


def _publish(message: Message) -> bytes:
    body = message.body()
    return b"PUB %s %d\r\n%s\r\n" % (message.subject.encode(), len(body), body)


async def _send(url: str, slices: Sequence[bytes], extra: Sequence[bytes]) -> None:
    """Send the slices one after another, ``SLICES`` a second, and ``extra`` with the first of a second."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(b"CONNECT %s\r\n" % json.dumps({"verbose": False, "name": "simulated routers"}).encode())

    async def answer_pings() -> None:
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")

    answering = asyncio.create_task(answer_pings())
    try:
        due = time.monotonic()
        while True:
            for number, part in enumerate(slices):
                writer.write(part if number % SLICES else part + b"".join(extra))
                await writer.drain()
                due += 1.0 / SLICES
                await asyncio.sleep(max(0.0, due - time.monotonic()))
    finally:
        answering.cancel()
        writer.close()


async def _end(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            raise error
