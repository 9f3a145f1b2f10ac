"""How long kubelet waits for the plugin: GetPreferredAllocation and Allocate over gRPC on unix sockets.

Plugin, fake GPU driver, nats-server and the caller (``bench.plugin_caller``) are processes of their own; this one plays
the rest of kubelet. 8 GPUs, three profiles, 256 seats.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.config import load
from kybernate.dev.fakes.gpu.client import FakeDriverClient
from kybernate.dev.fakes.gpu.node import FakeGpus
from kybernate.dev.fakes.gpu.spec import PRESETS
from kybernate.dev.nats_server import NatsServer
from kybernate.machine import Gpu, Link
from kybernate.messages import SeatAllocated
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from kybernate.topology import plan
from services.plugin.core.devices import Offer
from services.plugin.core.faults import Probation
from services.plugin.gate import StartGate
from services.plugin.servicer import NodeSeats

CALLS = 2_000
PRESET = "8xA100-nvswitch"
PROFILES = ((1, 16), (2, 20), (4, 24))
"""GPUs per group and seats per group: 8 x 16 + 4 x 20 + 2 x 24 = 256 seats."""
FLIPS_PER_SECOND = 10.0
WAITING_STARTS = 16
PATIENCE = 30.0


async def run(calls: int = CALLS) -> dict[str, float]:
    """Figures by name; ``*_ms`` are wall milliseconds that kubelet would have waited.

    ``*_floor_*`` is GetDevicePluginOptions, asked in turn with the others: it decides nothing, so what it takes is
    gRPC and the machine.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="kybb-") as name:
        folder = Path(name)
        socket = folder / "driver.sock"
        driver = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(socket), "--preset", PRESET)
        async with (
            NatsServer(folder / "nats") as server,
            _process(driver, {}, folder / "driver.log"),
            await FakeDriverClient.connect(socket, wait_seconds=PATIENCE) as gpus,
            _Cable(server.port) as cable,
            _Kubelet(folder / "device-plugins") as kubelet,
        ):
            await init(server.url)
            env = _environment(folder, f"nats://127.0.0.1:{cable.port}")
            machine = FakeGpus(socket)
            found = await machine.list(), await machine.links()
            await machine.close()
            async with _process(
                ("-m", "tests.quick", "services.plugin", "reread_seconds=0.1"), env, folder / "plugin.log"
            ) as plugin:
                await kubelet.listening(len(PROFILES))
                figures["seats"] = float(sum(len(seats) for seats in kubelet.seats.values()))
                figures |= await _asked("idle", kubelet, calls)
                async with _load(gpus, kubelet) as flips:
                    before = kubelet.lists
                    figures |= await _asked("loaded", kubelet, calls)
                figures["loaded_lists_sent"] = float(kubelet.lists - before)
                figures["loaded_gpu_faults"] = float(flips[0])
                await _until(lambda: all(kubelet.healthy.values()))
                given = len(kubelet.given)
                cable.cut()
                figures |= await _asked("nats_down", kubelet, calls)
                cable.mend()
                figures |= await _caught_up(server.url, kubelet.given[given:])
                plugin.send_signal(signal.SIGTERM)
                await plugin.wait()
        figures |= _decisions(folder, *found, calls)
    return figures


@dataclass
class _Cable:
    """The way from the plugin to NATS, which can be cut."""

    target: int
    port: int = 0
    whole: bool = True
    _server: asyncio.Server | None = None
    _lines: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> "_Cable":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        self.whole = False
        for line in tuple(self._lines):
            line.close()

    def mend(self) -> None:
        self.whole = True

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.whole:
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self._lines |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._lines -= {writer, back}

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()


@dataclass
class _Kubelet:
    """Accepts registrations, dials back and keeps the list of each resource."""

    folder: Path
    seats: dict[str, list[str]] = field(default_factory=dict)
    healthy: dict[str, bool] = field(default_factory=dict)
    lists: int = 0
    given: list[str] = field(default_factory=list)
    _endpoints: dict[str, str] = field(default_factory=dict)
    _streams: list["asyncio.Task[None]"] = field(default_factory=list)
    _server: Any = None

    async def __aenter__(self) -> "_Kubelet":
        self.folder.mkdir()
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        await self._server.stop(grace=0)

    async def Register(self, request: pb.RegisterRequest, _: object) -> pb.Empty:  # noqa: N802
        self._endpoints[request.resource_name] = request.endpoint
        self._streams.append(asyncio.create_task(self._listen(request.resource_name)))
        return pb.Empty()

    def address(self, resource: str) -> str:
        return f"unix:{self.folder / self._endpoints[resource]}"

    async def listening(self, resources: int) -> None:
        await _until(lambda: len(self.seats) == resources)

    async def _listen(self, resource: str) -> None:
        async with grpc.aio.insecure_channel(self.address(resource)) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty()):
                    self.seats[resource] = [device.ID for device in answer.devices]
                    self.healthy[resource] = all(device.health == "Healthy" for device in answer.devices)
                    self.lists += 1

    async def ask(self, calls: int) -> dict[str, list[float]]:
        """Calls of one pod after another; milliseconds of each, by kind."""
        addresses = {resource: self.address(resource) for resource in self.seats}
        order = json.dumps({"addresses": addresses, "seats": self.seats, "calls": calls})
        caller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.plugin_caller"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await caller.communicate(order.encode())
        found = json.loads(answer)
        self.given += found.pop("given")
        return {name: [float(value) for value in values] for name, values in found.items()}


async def _asked(name: str, kubelet: _Kubelet, calls: int) -> dict[str, float]:
    asked = await kubelet.ask(calls)
    found = {}
    for call in ("preferred", "allocate", "floor"):
        took = sorted(asked[call])
        found[f"{name}_{call}_p50_ms"] = took[len(took) // 2]
        found[f"{name}_{call}_p99_ms"] = took[min(len(took) - 1, len(took) * 99 // 100)]
        found[f"{name}_{call}_max_ms"] = took[-1]
    return found


@asynccontextmanager
async def _load(gpus: FakeDriverClient, kubelet: _Kubelet) -> AsyncIterator[list[int]]:
    """GPUs fail and recover all the time (each time complete lists for every resource), and starts wait at the gate."""
    uuids = [gpu["uuid"] for gpu in (await gpus.call("devices"))["gpus"]]
    flips = [0]

    async def flip() -> None:
        while True:
            await gpus.call("inject", fault="xid", gpu=uuids[flips[0] % len(uuids)], xid=48)
            flips[0] += 1
            await asyncio.sleep(1 / FLIPS_PER_SECOND)

    async def wait_at_the_gate(resource: str, seat: str) -> None:
        async with grpc.aio.insecure_channel(kubelet.address(resource)) as channel:
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await rpc.DevicePluginStub(channel).PreStartContainer(
                        pb.PreStartContainerRequest(devices_ids=[seat]), timeout=PATIENCE
                    )

    resource = sorted(kubelet.seats)[0]
    tasks = [asyncio.create_task(flip())]
    tasks += [
        asyncio.create_task(wait_at_the_gate(resource, seat)) for seat in kubelet.seats[resource][:WAITING_STARTS]
    ]
    try:
        yield flips
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _caught_up(url: str, given: list[str]) -> dict[str, float]:
    """After NATS came back: the events of the outage are in the stream, in order, each once."""
    began = time.monotonic()
    async with NatsBus(url, source="kyb/bench", name="bench").opened() as bus:
        await bus.until_connected()
        found: list[str] = []
        ids: list[str] = []
        while len(found) < len(given) or found[-len(given) :] != given:
            assert time.monotonic() < began + PATIENCE, "the events did not follow"
            kept = [message async for message in bus.replay() if isinstance(message, SeatAllocated)]
            found, ids = [message.seat for message in kept], [message.id for message in kept]
        return {
            "after_outage_events": float(len(given)),
            "after_outage_duplicates": float(len(ids) - len(set(ids))),
            "after_outage_seconds": time.monotonic() - began,
        }


def _decisions(folder: Path, gpus: tuple[Gpu, ...], links: tuple[Link, ...], calls: int) -> dict[str, float]:
    """The same without a wire: microseconds of the plugin's own work."""
    topology = plan(load(folder / "config.yaml"), gpus, links)
    offer = Offer(topology.groups, gpus, folder / "seats", links=links)
    probation = Probation(frozenset(gpu.uuid for gpu in gpus))
    node = NodeSeats(offer, StartGate(folder / "seats"), probation, lambda _: None)
    found = {}
    for resource in offer.resources:
        seats = [seat for seat, group in offer.seats.items() if group.profile.resource == resource]
        began = time.perf_counter()
        for _ in range(calls // 4):
            node.preferred(resource, seats, (), 1)
        size = offer.seats[seats[0]].profile.group_size
        found[f"decide_{size}x_of_{len(seats)}_us"] = (time.perf_counter() - began) / (calls // 4) * 1e6
    return found


def _environment(folder: Path, nats: str) -> dict[str, str]:
    profiles = [
        {
            "name": f"{size}x",
            "resource": f"kyb.ai/gpu-{size}x-seat",
            "groupSize": size,
            "seatsPerGroup": seats,
            "placement": "topology-aware",
        }
        for size, seats in PROFILES
    ]
    text = json.dumps({"profiles": profiles, "gpuTopology": {"overlap": "timeshare"}})
    (folder / "config.yaml").write_text(text)
    (folder / "state").mkdir()
    (folder / "state" / "ledger").touch()  # a manager has been here
    assert PRESETS[PRESET].count == 8
    return {
        "KYB_CONFIG": str(folder / "config.yaml"),
        "KYB_NODE": "node-0",
        "KYB_FAKE_DRIVER": str(folder / "driver.sock"),
        "KYB_KUBELET_DIR": str(folder),
        "KYB_RUN_DIR": str(folder / "run"),
        "KYB_STATE_DIR": str(folder / "state"),
        "KYB_NATS_URL": nats,
        "KYB_LOG_LEVEL": "error",
    }


@asynccontextmanager
async def _process(
    arguments: tuple[str, ...], env: dict[str, str], log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=clean | env, stdout=output, stderr=output
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        await asyncio.sleep(0.01)
