"""The plugin's events while NATS disconnects and reconnects: in order, and without delaying kubelet."""

import asyncio
from pathlib import Path

import grpc.aio

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.dev.nats_server import NatsServer, free_port
from kybernate.messages import SeatAllocated
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from kybernate.seat import SeatState
from services.plugin.publish import Outbox
from tests.plugin.processes import PATIENCE, driver, logged, machine, plugin
from tests.plugin.stand import until_ready


def event(number: int) -> SeatAllocated:
    return SeatAllocated(cause="c", node="n", seat=f"1x-abcdef.s{number:02d}", state=SeatState.WAITING)


async def test_events_put_while_the_bus_was_disconnected_are_sent_in_order() -> None:
    server = MemoryServer()
    async with MemoryBus.connect(server) as bus, MemoryBus.connect(server) as other:
        outbox = Outbox(bus)
        running = asyncio.create_task(outbox.run())
        events = [event(number) for number in range(250)]
        try:
            async with other.subscribe(SeatAllocated.pattern()) as messages:
                bus.cut()
                for one in events[:200]:
                    outbox.put(one)
                bus.restore()
                for one in events[200:]:
                    outbox.put(one)
                got = [await asyncio.wait_for(anext(messages), PATIENCE) for _ in events]
                assert [one.id for one in got] == [one.id for one in events]
                assert len(server.stored) == len(events)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def allocate(folder: Path, seats: list[str]) -> None:
    (own,) = (path for path in folder.glob("kyb-*.sock") if "1x" in path.name)
    async with grpc.aio.insecure_channel(f"unix:{own}") as channel:
        stub = rpc.DevicePluginStub(channel)
        for seat in seats:
            preferred = pb.ContainerPreferredAllocationRequest(available_deviceIDs=seats, allocation_size=1)
            await stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[preferred]), timeout=9)
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[seat])])
            await stub.Allocate(request, timeout=9)


async def test_kubelet_is_answered_while_nats_is_down_and_the_events_are_sent_afterwards() -> None:
    async with machine() as (kubelet, folder):
        url = f"nats://127.0.0.1:{(port := free_port())}"
        async with driver(folder), plugin(folder, kubelet.options.folder, KYB_NATS_URL=url) as log:
            await until_ready(kubelet, timeout=PATIENCE)
            seats = sorted(kubelet.devices.endpoints["kyb.ai/gpu-1x-seat"].devices)
            await allocate(kubelet.options.folder, seats)
            # Streams exist before the plugin can connect: what it sends without them is kept nowhere.
            async with NatsServer(folder / "nats", port=free_port()) as elsewhere:
                await init(elsewhere.url)
            async with (
                NatsServer(folder / "nats", port=port) as server,
                NatsBus(server.url, source="test", name="test").opened() as bus,
            ):
                await bus.until_connected()
                found: list[SeatAllocated] = []

                async def until_allocated(count: int) -> None:
                    while len(found) < count:
                        found[:] = [m async for m in bus.replay() if isinstance(m, SeatAllocated)]
                        await asyncio.sleep(0.05)

                await until_allocated(len(seats))
                await allocate(kubelet.options.folder, seats[:1])
                await until_allocated(len(seats) + 1)
                assert [one.seat for one in found] == [*seats, seats[0]]
                assert {(one.node, one.group) for one in found} == {("node-0", "G0"), ("node-0", "G1")}
            assert logged(log, "plugin.allocation_refused") is None
