"""The fake driver behind the interfaces of production code: its GPUs, its host memory, its facts for the doctor.

Registered as entry points of the group ``kybernate.dev``; see ``kybernate.extras``.
"""

import asyncio
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.client import DriverError, FakeDriverClient
from kybernate.dev.fakes.gpu.sync_client import SyncDriverClient
from kybernate.doctor.model import DriverFacts
from kybernate.gpus.port import GpuError
from kybernate.machine import Gpu, GpuEvent, GpuProcess, GpuSensors, Link, Mig, PcieLevel
from kybernate.node.host_memory import HostMemory


class FakeGpus:
    """The GPUs of the fake driver at a socket; connects at the first call, and again after the driver was restarted."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._client: FakeDriverClient | None = None
        self._connecting = asyncio.Lock()
        self._seen: tuple[FakeDriverClient, int] | None = None
        """The connection, and the number of the last event returned; a restarted driver numbers its events from 1."""

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order. Raises GpuError."""
        return tuple(_gpu(one) for one in (await self._call("devices"))["gpus"] if not one["lost"])

    async def instances(self) -> tuple[Gpu, ...]:
        """MIG instances. Raises GpuError."""
        return tuple(_gpu(one) for one in (await self._call("devices"))["instances"] if not one["lost"])

    async def links(self) -> tuple[Link, ...]:
        """Every pair of GPUs once. Raises GpuError."""
        there = {gpu.uuid for gpu in await self.list()}
        found = (await self._call("links"))["links"]
        return tuple(_link(one) for one in found if {one["a"], one["b"]} <= there)

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a context. Raises GpuError."""
        devices = await self._call("devices")
        there = {one["uuid"] for one in (*devices["gpus"], *devices["instances"]) if not one["lost"]}
        found = (await self._call("processes"))["processes"]
        return tuple(GpuProcess(one["pid"], one["gpu"], one["bytes"]) for one in found if one["gpu"] in there)

    async def sensors(self) -> tuple[GpuSensors, ...]:
        """Temperature, power and utilisation. Raises GpuError."""
        there = [one for one in (await self._call("devices"))["gpus"] if not one["lost"]]
        return tuple(
            GpuSensors(
                one["uuid"],
                one["temperature"],
                float(one["power"]),
                None if one["mig_enabled"] else one["utilization"] / 100,
            )
            for one in there
        )

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """XID events; see ``Gpus``. Raises GpuError."""
        client = await self._connected()
        if self._seen is None or self._seen[0] is not client:
            self._seen = client, (await self._ask(client, "wait_xid", timeout_ms=0))["last"]
        timeout_ms = max(0, round(timeout_seconds * 1000))
        reply = await self._ask(client, "wait_xid", after=self._seen[1], timeout_ms=timeout_ms)
        self._seen = client, reply["last"]
        return tuple(GpuEvent(one["gpu"], one["xid"]) for one in reply["events"])

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _call(self, name: str) -> dict[str, Any]:
        return await self._ask(await self._connected(), name)

    async def _connected(self) -> FakeDriverClient:
        try:
            async with self._connecting:
                if self._client is None or self._client.closed:
                    self._client = await FakeDriverClient.connect(self._socket)
                return self._client
        except ConnectionError as error:
            raise GpuError(str(error)) from error

    async def _ask(self, client: FakeDriverClient, name: str, **arguments: Any) -> dict[str, Any]:
        try:
            return await client.call(name, **arguments)
        except (DriverError, ConnectionError) as error:
            raise GpuError(str(error)) from error


class FakeHostMemory(HostMemory):
    """The host memory of the fake machine, where copies of parked processes exist by name only."""

    def __init__(self, socket: Path) -> None:
        super().__init__()
        self.socket = socket

    async def free_bytes(self) -> int:
        """Free bytes as the daemon counts them. Raises ConnectionError."""
        try:
            async with await FakeDriverClient.connect(self.socket) as client:
                reply = await client.call("host")
        except DriverError as error:
            raise ConnectionError(str(error)) from error
        return max(0, int(reply["memory_bytes"]) - int(reply["used_bytes"]))


def read_driver_facts(socket: str) -> DriverFacts:
    """What the doctor wants to know of a driver. Raises ConnectionError naming the socket and the remedy."""
    with SyncDriverClient(socket) as client:
        gpus = client.request("devices")["gpus"]
        uses = client.request("processes")["processes"]
        answers = {use["pid"]: client.request("get_restore_tid", pid=use["pid"])["code"] for use in uses}
    return DriverFacts(
        fake=True,
        binding=f"the fake driver at {socket}",
        init_code=0,
        gpu_count=len(gpus),
        gpus=tuple(_gpu(gpu) for gpu in gpus if not gpu["lost"]),
        uses=tuple(GpuProcess(use["pid"], use["gpu"], use["bytes"]) for use in uses),
        answers=answers,
    )


def _gpu(one: dict[str, Any]) -> Gpu:
    known = {name: one[name] for name in Gpu.__dataclass_fields__}
    return Gpu(**known | {"mig": Mig(**one["mig"]) if one["mig"] else None})


def _link(one: dict[str, Any]) -> Link:
    return Link(one["a"], one["b"], PcieLevel(one["level"]), one["nvlinks"], one["switched"], one["p2p"])
