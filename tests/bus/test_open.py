"""A bus without its server, one client's connection, and the example that uses none of our code."""

import asyncio
import sys
from pathlib import Path

import pytest

from kybernate.bus.port import BusDownError
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.dev.nats_server import NatsServer
from kybernate.messages import GpuHealthChanged, GroupDecided, SeatEvent
from tests.bus.worlds import activated, connected, epoch_of, within

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "subscribe.py"


async def test_one_client_in_memory_can_be_cut_off() -> None:
    server = MemoryServer()
    async with (
        MemoryBus.connect(server) as cut,
        MemoryBus.connect(server) as other,
        cut.subscribe(SeatEvent.pattern()) as got,
        other.subscribe(SeatEvent.pattern()) as theirs,
    ):
        changes: list[bool] = []
        cut.on_change(changes.append)
        cut.cut()
        await other.publish(activated(1))
        with pytest.raises(BusDownError):
            await cut.publish(activated(2))
        cut.restore()
        await other.publish(activated(3))
        assert (await epoch_of(got), await epoch_of(theirs)) == (3, 1)
        assert changes == [False, True]


async def test_the_example_prints_every_kind_of_event(tmp_path: Path) -> None:
    """Of a decision and a GPU it once printed a traceback: they have no seat."""
    events = [
        activated(1, model="org/model"),
        activated(1, model="moved", seat="s2", way="restart", came_from="G0", reason="room"),
        GroupDecided(cause="c", node="n1", group="G0", decision="stay", reason="it waits"),
        GpuHealthChanged(cause="c", node="n1", gpu="GPU-1", healthy=False, reason="XID 79"),
    ]
    printed: list[list[str]] = []
    async with (
        NatsServer(tmp_path / "nats") as server,
        connected(server.url) as bus,
    ):
        example = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), server.url, stdout=asyncio.subprocess.PIPE
        )
        assert example.stdout is not None

        async def repeat() -> None:
            while True:  # until it listens
                for event in events:
                    await bus.publish(event)
                await asyncio.sleep(0.05)

        talking = asyncio.create_task(repeat())
        try:
            while len(printed) < 2 * len(events):
                printed.append((await within(example.stdout.readline())).decode().split())
        finally:
            talking.cancel()
            await asyncio.wait([talking])
            example.kill()
            await example.communicate()
    assert ["n1/s1", "active", "org/model"] in printed
    assert ["n1/s2", "active", "moved", "from", "G0", "by", "restart:", "room"] in printed
    assert ["n1/G0", "decided", "it", "waits"] in printed
    assert ["n1/GPU-1", "gpu-health", "XID", "79"] in printed
    assert "kybernate" not in EXAMPLE.read_text()
