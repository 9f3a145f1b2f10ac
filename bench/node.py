"""A GPU node of which only the GPUs and kubelet are made up: the device plugin is the real process.

For benchmarks and the conformance suite. Eight GPUs in groups of 1, 1, 2 and 4, so that there are three resources.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kybernate.pb import podresources_pb2 as pb
from kybernate.pb import podresources_pb2_grpc as rpc

ONE, TWO, FOUR = "kyb.ai/conformance-1x", "kyb.ai/conformance-2x", "kyb.ai/conformance-4x"
SEATS = {ONE: 4, TWO: 2, FOUR: 2}
"""How many seats each resource has."""
GPUS = 8
NO_NATS = "nats://127.0.0.1:9"
"""No bus: the plugin must do without."""
_GROUPS = {"A": [0], "B": [1], "CD": [2, 3], "E-H": [4, 5, 6, 7]}
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def config(**more: Any) -> str:
    """The node's configuration; ``more`` are further top-level keys."""
    profiles = [
        {"name": "one", "resource": ONE, "groupSize": 1, "seatsPerGroup": 2},
        {"name": "two", "resource": TWO, "groupSize": 2, "seatsPerGroup": 2},
        {"name": "four", "resource": FOUR, "groupSize": 4, "seatsPerGroup": 2},
    ]
    groups = [{"name": name, "gpus": gpus} for name, gpus in _GROUPS.items()]
    return json.dumps({"profiles": profiles, "gpuTopology": {"groups": groups}} | more)


@dataclass
class Program:
    """A process that can be started again and again; each start writes its own log."""

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    work: Path
    child: asyncio.subprocess.Process | None = None
    starts: int = 0

    @property
    def log(self) -> Path:
        """Of the last start."""
        return self.work / f"{self.name}-{self.starts}.log"

    async def start(self) -> None:
        """Start it; the former one must have ended."""
        self.starts += 1
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
        with self.log.open("wb") as output:
            self.child = await asyncio.create_subprocess_exec(
                sys.executable, *self.arguments, env=clean | self.env, stdout=output, stderr=output
            )

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(signum)

    async def stop(self) -> None:
        """Ask it to end; kill it when it does not."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        if self.child is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.child.wait(), 10)
        await self.kill()

    async def kill(self) -> None:
        """End it without giving it a chance to clean up; nothing happens when it does not run."""
        self.signal(signal.SIGKILL)
        if self.child is not None:
            await self.child.wait()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Entries of the last start's log."""
        found = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("event") == event:
                    found.append(entry)
        return found


@dataclass
class Node:
    """The node's programs and folders. Kubelet belongs to the caller."""

    kubelet_dir: Path
    """Kubelet's device plugin folder."""
    work: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of the plugin."""
    constants: tuple[str, ...] = ()
    """Other constants of it: ``reread_seconds=0.2``."""
    driver: Program = field(init=False)
    plugin: Program = field(init=False)

    def __post_init__(self) -> None:
        socket = self.work / "driver.sock"
        self.driver = self._driver("driver", GPUS)
        env = {
            "KYB_CONFIG": str(self.work / "config.yaml"),
            "KYB_NODE": "node-0",
            "KYB_FAKE_DRIVER": str(socket),
            "KYB_KUBELET_DIR": str(self.kubelet_dir.parent),
            "KYB_RUN_DIR": str(self.work / "run"),
            "KYB_STATE_DIR": str(self.work / "state"),
            "KYB_CDI_DIR": str(self.work / "cdi"),
            "KYB_LOG_FORMAT": "json",
            "KYB_NATS_URL": NO_NATS,
        }
        program = ("-m", "tests.quick", "services.plugin", *self.constants)
        self.plugin = Program("plugin", program, env | dict(self.settings), self.work)

    def _driver(self, name: str, gpus: int) -> Program:
        arguments = ("-m", "kybernate.dev.fakes.gpu", "--socket", str(self.work / "driver.sock"), "--gpus", str(gpus))
        return Program(name, (*arguments, "--log-level", "error"), {}, self.work)

    @property
    def pod_resources(self) -> Path:
        """Kubelet's PodResources socket."""
        return self.kubelet_dir.parent / "pod-resources" / "kubelet.sock"

    @property
    def seats_dir(self) -> Path:
        """Seat folders, with tickets and calls of the start gate."""
        return self.work / "run" / "seats"

    async def start(self, **more: Any) -> None:
        """Start driver and plugin; ``more`` are further keys of the configuration."""
        (self.work / "config.yaml").write_text(config(**more))
        (self.work / "state").mkdir(exist_ok=True)
        (self.work / "state" / "ledger").touch()  # a manager has been here
        await self.driver.start()
        await self.plugin.start()

    async def stop(self) -> None:
        """End both."""
        await self.plugin.stop()
        await self.driver.kill()

    async def with_gpus(self, count: int) -> None:
        """A machine with so many GPUs from now on: the driver goes and comes back with them."""
        await self.driver.kill()
        self.driver = self._driver(f"driver-{count}", count)
        await self.driver.start()

    async def ask_kubelet(self, call: str, request: Any) -> Any:
        """A call to PodResources; again while everybody on the node together asks too often. Raises AioRpcError."""
        async with grpc.aio.insecure_channel(f"unix:{self.pod_resources}", options=_OPTIONS) as channel:
            while True:
                try:
                    return await getattr(rpc.PodResourcesListerStub(channel), call)(request, timeout=20)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                await asyncio.sleep(0.05)

    async def allocatable(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Healthy seats as kubelet tells: by resource and ID, their NUMA nodes. Empty when kubelet cannot be asked."""
        try:
            answer = await self.ask_kubelet("GetAllocatableResources", pb.AllocatableResourcesRequest())
        except grpc.aio.AioRpcError:
            return {}
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for entry in answer.devices:
            for seat in entry.device_ids:
                own = found.setdefault(entry.resource_name, {})
                own[seat] = (*own.get(seat, ()), *(node.ID for node in entry.topology.nodes))
        return found

    async def ready(self) -> bool:
        """Whether kubelet counts every seat of every resource as healthy."""
        found = await self.allocatable()
        return {resource: len(found.get(resource, ())) for resource in SEATS} == SEATS


@dataclass
class Doorkeeper:
    """Plays the GPU manager at the start gate: every call gets a ticket, unless ``held``."""

    seats_dir: Path
    held: bool = False
    """Grant no call."""
    given: list[str] = field(default_factory=list)
    """Seats that got a ticket, in order."""

    async def watch(self) -> None:
        """Grant tickets until cancelled."""
        answered: set[str] = set()
        while True:
            for folder, call in self.calls().items():
                if not self.held and call["call"] not in answered:
                    answered.add(call["call"])
                    self._ticket(self.seats_dir / folder, call["call"])
            await asyncio.sleep(0.02)

    def calls(self) -> dict[str, dict[str, Any]]:
        """Return the waiting calls by seat."""
        found = {}
        for path in self.seats_dir.glob("*/call.json"):
            with contextlib.suppress(OSError, ValueError):
                found[path.parent.name] = json.loads(path.read_text())
        return found

    def say(self, seat: str, text: str) -> None:
        """Set the text for a refused start of this seat."""
        (self.seats_dir / seat / "status.json").write_text(json.dumps({"text": text}))

    def reset(self) -> None:
        """Remove the texts and grant every call again."""
        self.held = False
        for path in self.seats_dir.glob("*/status.json"):
            path.unlink()

    def _ticket(self, folder: Path, call: str) -> None:
        self.given.append(folder.name)
        new = folder / "ticket.new"
        new.write_text(json.dumps({"call": call, "seat": folder.name, "pod_uid": "u", "epoch": 1}))
        new.replace(folder / "ticket.json")


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose sockets have short paths."""
    folder = Path(tempfile.mkdtemp(prefix="kybn-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def running_node(kubelet_dir: Path, work: Path, **settings: str) -> AsyncIterator[Node]:
    """Driver and plugin run; whether they are registered is another question."""
    node = Node(kubelet_dir, work, settings)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()
