"""How long the device plugin takes to be registered again after kubelet restarted: real plugin process, real gRPC.

The fake kubelet restarts 50 times in a row at random moments (seeded), sometimes in the middle of a registration. Each
time the three resources must come back with the same seats, and running pods must keep theirs; anything else ends the
benchmark. Times count from the moment at which kubelet serves again to the first complete list of each resource.
"""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field

from bench.node import FOUR, ONE, SEATS, TWO, Doorkeeper, running_node, short_folder
from kybernate.dev.fakes.kubelet.kubelet import Kubelet, Options
from kybernate.dev.fakes.kubelet.manifest import parse_pod
from tests.until import until

RESTARTS = 50
SEED = 4
DOWN_SECONDS = 0.2
"""Kubelet is away for at most so long."""
PAUSE_SECONDS = 0.2
"""Longest time between a registration and the next restart."""
EARLY = 0.2
"""Share of restarts that do not wait for the registration after the one before."""


@dataclass
class Storm:
    """What came of the restarts."""

    seconds: list[float] = field(default_factory=list)
    """From kubelet's return to each resource's first list, for restarts that were waited for."""
    restarts: int = 0
    refused: int = 0
    """Registrations that kubelet refused; a plugin may try too early."""


async def storm(kubelet: Kubelet, restarts: int, seed: int) -> Storm:
    """Restart kubelet so often while tickets are granted. Raises RuntimeError when the state differs afterwards."""
    rng = random.Random(seed)
    seen = Storm()
    for number, resource in enumerate((ONE, TWO, FOUR)):
        kubelet.create(parse_pod(_pod(f"storm-{number}", resource), "bench"))
    await until(lambda: all(_started(kubelet)), what="running pods")
    before, owners, processes = _seats(kubelet), _owners(kubelet), _started(kubelet)
    while seen.restarts < restarts:
        await asyncio.sleep(rng.uniform(0, PAUSE_SECONDS))
        await kubelet.restart(rng.uniform(0, DOWN_SECONDS))
        seen.restarts += 1
        if seen.restarts < restarts and rng.random() < EARLY:
            continue
        seen.seconds += await _back(kubelet, time.monotonic())
        if _seats(kubelet) != before:
            raise RuntimeError(f"after {seen.restarts} restarts the seats are others: {_seats(kubelet)}, not {before}")
        if (_owners(kubelet), _started(kubelet)) != (owners, processes):
            raise RuntimeError(f"after {seen.restarts} restarts pods run elsewhere: {_owners(kubelet)}, not {owners}")
    seen.refused = sum(1 for call in kubelet.calls if call.name == "Register" and call.refusal)
    return seen


async def run() -> dict[str, float]:
    """The figures of 50 restarts."""
    with short_folder() as folder:
        (folder / "device-plugins").mkdir()
        options = Options(folder=folder / "device-plugins", run_dir=folder / "run", seed=SEED)
        async with Kubelet(options) as kubelet, running_node(folder / "device-plugins", folder) as node:
            await until(node.ready, what="the first registration")
            gate = asyncio.create_task(Doorkeeper(node.seats_dir).watch())
            try:
                seen = await storm(kubelet, RESTARTS, SEED)
            finally:
                gate.cancel()
                await asyncio.gather(gate, return_exceptions=True)
    return {
        "kubelet restarts": seen.restarts,
        "seats that changed": 0,
        "pods that moved": 0,
        "registrations refused": seen.refused,
        "registered after, median s": statistics.median(seen.seconds),
        "registered after, worst s": max(seen.seconds),
    }


async def _back(kubelet: Kubelet, since: float) -> list[float]:
    """Wait for each resource; seconds until it was complete."""
    found: dict[str, float] = {}

    def complete() -> bool:
        for resource, (_, healthy) in kubelet.devices.capacity().items():
            if healthy == SEATS.get(resource):
                found.setdefault(resource, time.monotonic() - since)
        return found.keys() == SEATS.keys()

    await until(complete, what="the registration of every resource", timeout=90.0)
    return list(found.values())


def _seats(kubelet: Kubelet) -> dict[str, list[str]]:
    return {resource: sorted(kubelet.devices.endpoints[resource].devices) for resource in SEATS}


def _owners(kubelet: Kubelet) -> dict[str, tuple[str, ...]]:
    return {pod.spec.name: entry.device_ids for pod in kubelet.pods for entry in kubelet.devices.of(pod.uid, "engine")}


def _started(kubelet: Kubelet) -> list[str]:
    return [pod.containers[0].container_id for pod in kubelet.pods]


def _pod(name: str, resource: str) -> dict[str, object]:
    engine = {"name": "engine", "command": ["sleep", "1000"], "resources": {"limits": {resource: "1"}}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [engine]}}
