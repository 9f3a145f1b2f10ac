"""The node on which the contract is tried: real plugin process, and kubelet fake or real."""

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from bench.node import GPUS, SEATS, Doorkeeper, Node, short_folder
from kybernate.dev.fakes.kubelet.device_manager import NumaTopology
from kybernate.dev.fakes.kubelet.kubelet import Kubelet, Options
from kybernate.dev.fakes.kubelet.plugins import Call
from kybernate.dev.fakes.kubelet.process import BackOff
from kybernate.envelope import slug
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from tests.kubelet.stand import ScriptedPlugin, register, serving
from tests.until import until, until_equal

FOREIGN = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))
"""As kubelet (grpc-go) connects."""


@dataclass
class Probe:
    """A scripted plugin, registered beside ours under a separate resource."""

    stand: "Stand"
    plugin: ScriptedPlugin
    resource: str
    endpoint: str

    async def register(self, endpoint: str | None = None, resource: str | None = None, **more: str) -> str | None:
        """Why kubelet refused; None when it did not."""
        return await register(
            self.stand.kubelet_dir, self.endpoint if endpoint is None else endpoint, resource or self.resource, **more
        )

    async def seats(self) -> set[str]:
        """What kubelet counts as healthy."""
        return set((await self.stand.allocatable()).get(self.resource, ()))

    async def until_seats(self, *expected: str) -> None:
        await until_equal(self.seats, set(expected), what="allocatable")


@dataclass
class Stand(Node):
    """A node and what tests do to it."""

    kubelet: Kubelet | None = None
    """None: a real one, out of reach."""
    restart_command: str = ""
    """Restarts a real one."""
    door: Doorkeeper = field(init=False)
    before_kubelet: dict[str, str] = field(default_factory=dict)
    """Why the plugin was not ready while there was no kubelet; empty on a real kubelet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.door = Doorkeeper(self.seats_dir)

    @property
    def fake(self) -> Kubelet:
        """The fake kubelet, in tests that need it."""
        assert self.kubelet is not None, "mark this test fake_only"
        return self.kubelet

    async def restart_kubelet(self, **faked: Any) -> None:
        """Restart kubelet, fake (``faked``: how) or real."""
        if self.kubelet is not None:
            await self.kubelet.restart(**faked)
        else:
            child = await asyncio.create_subprocess_shell(self.restart_command)
            assert await child.wait() == 0, f"{self.restart_command!r} failed"

    async def until_ready(self) -> None:
        await until(self.ready, what="the registration of every resource")

    async def tidy(self) -> None:
        """Undo what a test did to the node's programs."""
        self.door.reset()
        for program in (self.driver, self.plugin):
            program.signal(signal.SIGCONT)
        if not self.driver.name.endswith(str(GPUS)):
            await self.with_gpus(GPUS)
        await self.until_ready()
        await until(lambda: not self.door.calls(), what="the end of all waiting starts")

    async def unmet(self) -> dict[str, str]:
        """Why the plugin says that it is not ready."""
        serving = await until(lambda: self.plugin.log.exists() and self.plugin.logged("plugin.serving"), what="start")
        async with aiohttp.ClientSession() as session, session.get(f"{serving[0]['url']}/readyz") as answer:
            return dict((await answer.json())["unmet"])

    def sockets(self, resource: str = "") -> list[Path]:
        """The plugin's own sockets, of one resource or of all."""
        name = slug(resource.rpartition("/")[2]) if resource else ""
        return sorted(self.kubelet_dir.glob(f"kyb-{name}*.sock"))

    @asynccontextmanager
    async def calling(self, resource: str) -> "AsyncIterator[rpc.DevicePluginAsyncStub]":
        """The plugin's side of a resource, as kubelet calls it."""
        (own,) = self.sockets(resource)
        async with grpc.aio.insecure_channel(f"unix:{own}", options=FOREIGN) as channel:
            yield rpc.DevicePluginStub(channel)

    async def allocate(self, resource: str, *seats: str) -> pb.ContainerAllocateResponse:
        """The plugin's answer for one container, asked for directly."""
        async with self.calling(resource) as stub:
            request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=seats)])
            (answer,) = (await stub.Allocate(request, timeout=20)).container_responses
            return answer

    @asynccontextmanager
    async def probe(self, *seats: str, plugin: ScriptedPlugin | None = None) -> AsyncIterator[Probe]:
        """A probe that serves; with seats it is registered, too, and kubelet counts them."""
        plugin = plugin or ScriptedPlugin()
        name = f"probe-{uuid.uuid4().hex[:6]}"
        probe = Probe(self, plugin, f"kyb.ai/{name}", f"{name}.sock")
        async with serving(plugin, self.kubelet_dir, probe.endpoint):
            if seats:
                assert await probe.register() is None
                plugin.send(*seats)
                await probe.until_seats(*seats)
            yield probe

    def asked(self, name: str, resource: str = "") -> list[Call]:
        """What the fake kubelet asked of plugins, oldest first."""
        return [call for call in self.fake.calls if call.name == name and resource in ("", call.resource)]

    def seats_of(self, resource: str) -> list[str]:
        return sorted(self.fake.devices.endpoints[resource].devices)


@asynccontextmanager
async def _serving(stand: Stand) -> AsyncIterator[Stand]:
    await stand.start()
    door = asyncio.create_task(stand.door.watch())
    try:
        yield stand
    finally:
        door.cancel()
        await asyncio.gather(door, return_exceptions=True)
        await stand.stop()


@asynccontextmanager
async def fake_stand(**changes: Any) -> AsyncIterator[Stand]:
    """The plugin comes first, then kubelet."""
    with short_folder() as folder:
        (folder / "device-plugins").mkdir()
        constants = ("gate_seconds=2", "reread_seconds=0.2")
        async with _serving(Stand(folder / "device-plugins", folder, constants=constants)) as stand:

            async def waits() -> bool:
                stand.before_kubelet = await stand.unmet()
                tried = "not yet registered with kubelet" not in stand.before_kubelet.values()
                return tried and stand.before_kubelet.keys() == SEATS.keys()

            await until(waits, what="a plugin that waits for kubelet")
            options: dict[str, Any] = {"backoff": BackOff(0.01, 0.1), "seed": 1} | changes
            async with Kubelet(
                Options(folder=folder / "device-plugins", run_dir=folder / "run", **options)
            ) as stand.kubelet:
                await stand.until_ready()
                yield stand


@asynccontextmanager
async def real_stand(kubelet_dir: Path, restart_command: str) -> AsyncIterator[Stand]:
    """Beside a kubelet that runs already."""
    with short_folder() as folder:
        constants = ("gate_seconds=10", "reread_seconds=0.2")
        async with _serving(Stand(kubelet_dir, folder, constants=constants, restart_command=restart_command)) as stand:
            await stand.until_ready()
            yield stand


@asynccontextmanager
async def own_kubelet(
    topology: NumaTopology | None = None, settings: Mapping[str, str] | None = None, **changes: Any
) -> AsyncIterator[Stand]:
    """A fake kubelet for what the shared one must not be used for. Our plugin is not started."""
    with short_folder() as folder:
        options = {"backoff": BackOff(0.01, 0.1), "seed": 1, "topology": topology or NumaTopology()} | changes
        stand = Stand(folder / "device-plugins", folder, settings or {})
        async with Kubelet(
            Options(folder=folder / "device-plugins", run_dir=folder / "run", **options)
        ) as stand.kubelet:
            try:
                yield stand
            finally:
                await stand.stop()
