"""The plugin's parts in this process: an offer on four made-up GPUs, registered with a kubelet."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate.config import NodeConfig
from kybernate.dev.fakes.kubelet.kubelet import Kubelet
from kybernate.machine import Gpu
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.topology import plan
from services.plugin.core.devices import Offer
from services.plugin.core.faults import Probation
from services.plugin.gate import StartGate
from services.plugin.registration import Registration
from services.plugin.servicer import NodeSeats
from tests.kubelet.stand import until_capacity
from tests.until import until

ONE, TWO = "kyb.ai/gpu-1x-seat", "kyb.ai/gpu-2x-seat"
GPUS = tuple(
    # Minor numbers and PCI order both differ from the index, as on real machines.
    Gpu(i, f"GPU-{i}", minor=7 - i, pci_bus_id=bus, name="fake", memory_bytes=80 * 2**30, numa_node=i // 2)
    for i, bus in enumerate(("0000:C1:00.0", "0000:41:00.0", "0000:81:00.0", "0000:01:00.0"))
)


def config(expose: str = "group") -> dict[str, Any]:
    """Groups G0 and G1 with two 1x seats each, G23 with two 2x seats."""
    return {
        "profiles": [
            {"name": "one", "resource": ONE, "groupSize": 1, "seatsPerGroup": 2},
            {"name": "two", "resource": TWO, "groupSize": 2, "seatsPerGroup": 2, "exposeDevices": expose},
        ],
        "gpuTopology": {
            "groups": [
                {"name": "G0", "gpus": [0]},
                {"name": "G1", "gpus": [1]},
                {"name": "G23", "gpus": [2, 3]},
            ]
        },
    }


def paths(answer: pb.ContainerAllocateResponse) -> set[str]:
    """The device nodes that the container gets; each has the same path on both sides."""
    assert all((one.host_path, one.permissions) == (one.container_path, "rw") for one in answer.devices)
    return {one.host_path for one in answer.devices}


def offer(expose: str = "group", **changes: Any) -> Offer:
    groups = plan(NodeConfig.model_validate_json(json.dumps(config(expose))), GPUS).groups
    return Offer(**({"groups": groups, "gpus": GPUS, "seats_dir": Path("/run/kyb/seats")} | changes))


def waiting_call(seats_dir: Path, seat: str) -> dict[str, Any] | None:
    """The waiting start of a seat."""
    try:
        return json.loads((seats_dir / seat / "call.json").read_text())
    except FileNotFoundError:
        return None


def give_ticket(seats_dir: Path, seat: str, call: str, /, **facts: object) -> None:
    """As the manager does. ``facts``: of the ticket."""
    new = seats_dir / seat / "ticket.new"
    new.write_text(json.dumps({"call": call, "seat": seat, "pod_uid": "u", "epoch": 1} | facts))
    new.replace(new.with_name("ticket.json"))


@dataclass
class Plugin:
    """A node's plugin without its process."""

    node: NodeSeats
    registrations: list[Registration]

    def registered(self) -> bool:
        return all(registration.unmet is None for registration in self.registrations)


@asynccontextmanager
async def running_plugin(
    folder: Path,
    run_dir: Path,
    *,
    gate_seconds: float = 20.0,
    resources: tuple[str, ...] = (ONE, TWO),
    refused: Callable[[], str | None] = lambda: None,
    offered: Offer | None = None,
) -> AsyncIterator[Plugin]:
    gate = StartGate(run_dir / "seats", gate_seconds)
    offered = offered or offer(seats_dir=gate.seats_dir, fake_driver=run_dir / "driver.sock")
    node = NodeSeats(offered, gate, Probation(frozenset(gpu.uuid for gpu in GPUS)), lambda _: None)
    gate.prepare(offered.seats)
    plugin = Plugin(node, [Registration(node, resource, folder, refused) for resource in resources])
    tasks = [asyncio.create_task(registration.run()) for registration in plugin.registrations]
    try:
        yield plugin
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def plugin_at(kubelet: Kubelet, **changes: Any) -> AsyncIterator[Plugin]:
    async with running_plugin(kubelet.options.folder, kubelet.options.run_dir, **changes) as plugin:
        await until(plugin.registered, what="every resource is registered")
        await until_ready(kubelet)
        yield plugin


async def until_ready(kubelet: Kubelet, timeout: float = 30.0) -> None:
    """Wait until kubelet counts every seat of the default offer as healthy."""
    await until_capacity(kubelet, {ONE: (4, 4), TWO: (2, 2)}, timeout=timeout)


async def until_unmet(plugin: Plugin, text: str) -> None:
    """Wait until the first resource is not registered for this reason."""
    registration = plugin.registrations[0]
    await until(
        lambda: text in (registration.unmet or ""), what=f"not registered: {text}", saw=lambda: registration.unmet
    )


def ready(kubelet: Kubelet) -> bool:
    return kubelet.devices.capacity() == {ONE: (4, 4), TWO: (2, 2)}
