"""kyb-run, plugin and checkpointer stand still for 5 to 300 s, at the steps of starts and moves, as under a debugger.

On a stack with fake GPUs under load each of the three gets SIGSTOP, and SIGCONT after a time that is uniform in its
logarithm, again and again, side by side. Each stop waits for a drawn step at which this process did not stand still
yet: an event of a seat, or a record of the checkpointer's journal; kyb-run is that of the seat. Containers of parked
models are ended meanwhile, so that kubelet starts them again. A request counts as with ``kyb demo --chaos``: an answer
that asks for a repeat is repeated. Afterwards every model answers, and nobody has done anything.

Times are wall seconds, as the deadlines of the start gate and of jobs are. Each run takes about six minutes. The table
has how often each process stood still at each step, over the runs of a scenario.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kybernate.dev.demo import workload
from kybernate.dev.demo.chaos import keep_logs
from kybernate.dev.demo.client import Verdict
from kybernate.dev.demo.replay import Player, again_and_again, client_session
from kybernate.dev.demo.scenario import KYB_RUN, DemoScenario, build_options, own_arrivals
from kybernate.dev.demo.session import Demo, violations_of
from kybernate.dev.demo.watch import Watch
from kybernate.dev.fakes.engine.protocol import expected_text
from kybernate.dev.stack import Stack, StackOptions
from kybernate.lab.traces import Arrival
from kybernate.messages import SeatEvent
from kybernate.seat import COMING, SeatState
from tests.stack.pods import pod, small_node

OVERLAPPING = "overlapping"
SCENARIOS = ("hot-pair", "hot-quad", "hot-mig", OVERLAPPING)
SEEDS = (1, 2, 3)
BACKENDS = {"hot-mig": ("restart", "vllm", "sglang")}
BY_SEED = (None, "restart", "vllm,sglang,unload,fake")
"""Backends of the pods, seed after seed, where ``BACKENDS`` has none."""
RUN = "kyb-run"
VICTIMS = (RUN, "plugin", "checkpointer")
STOPS = 3
"""Of each of them in a run."""
SHORTEST, LONGEST = 5.0, 300.0
PATIENCE = 10.0
"""So many seconds after its first step a stop takes any that is new, and after twice as many any."""
RESTART_SECONDS = 20.0
SPEED = 4.0
READY_SECONDS = 180.0
CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}
  - {name: two, resource: kyb.ai/gpu-2x-seat, groupSize: 2, seatsPerGroup: 2}
  - {name: four, resource: kyb.ai/gpu-4x-seat, groupSize: 4, seatsPerGroup: 1}
gpuTopology: {overlap: timeshare}
policy: {name: kyb-balanced}
"""
SIZES = {"one-a": 1, "one-b": 1, "one-c": 1, "two-a": 2, "two-b": 2, "four": 4}
"""GPUs of each model of the groups that overlap; no two models fit on one GPU."""


@dataclass
class Steps(Watch):
    """Tells each step to all that listen, with its seat."""

    pods: dict[str, str] = field(default_factory=dict)
    """Name of the pod that has each seat."""
    seen: Counter[str] = field(default_factory=Counter)
    listeners: list[asyncio.Queue[tuple[str, str]]] = field(default_factory=list)

    def take(self, event: SeatEvent) -> None:
        """Add one event."""
        new = event.id not in self._seen
        super().take(event)
        if new and event.pod:
            self.pods[event.seat] = event.pod.partition("/")[2]
            self.tell(_step(event), event.seat)
        if new and event.state in (SeatState.LOST, SeatState.QUARANTINED):
            print(f"{event.seat} is {event.state}: {event.reason}", flush=True)

    def tell(self, step: str, seat: str) -> None:
        """A seat has come to this step."""
        self.seen[step] += 1
        for each in self.listeners:
            each.put_nowait((step, seat))

    async def read(self, journal: Path) -> None:
        """Tell what the checkpointer writes down, until cancelled."""
        done: dict[str, int] = {}
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._look(journal, done)
            await asyncio.sleep(0.02)

    def _look(self, journal: Path, done: dict[str, int]) -> None:
        for entry in os.scandir(journal):
            before = done.get(entry.name, 0)
            if entry.name.endswith(".jsonl") and entry.stat().st_size > before:
                whole, end, _ = Path(entry).read_bytes().rpartition(b"\n")
                for line in whole[before:].splitlines():
                    self._tell_record(json.loads(line))
                done[entry.name] = len(whole) + len(end)

    def _tell_record(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind in ("switch", "kill"):
            job = record[kind]
            target = job["target"] if kind == "kill" else job.get("activate") or job["park"][0]
            self.tell(f"job: {kind}", target["seat"])
        elif kind in ("half", "step") and "seat" in record:
            self.tell(f"job: {record.get('step') or record['half']}", record["seat"])


def _step(event: SeatEvent) -> str:
    both = {event.state, event.previous}
    if event.way and both & {SeatState.STARTING, *COMING}:
        return f"move by {event.way}: {event.state}"
    return f"{'start' if both & {SeatState.WAITING, SeatState.STARTING} else 'switch'}: {event.state}"


@dataclass
class Stops:
    """One run."""

    stack: Stack
    player: Player
    steps: Steps
    hits: Counter[tuple[str, str]]
    """Victim and step, also of the runs before."""
    random_: random.Random
    began: float = field(default_factory=time.monotonic)
    stopped: int = 0

    async def again_and_again(self, victim: str) -> None:
        """Each time in its part of the range, so that each run has short and long ones."""
        parts = [(number + self.random_.random()) / STOPS for number in range(STOPS)]
        self.random_.shuffle(parts)
        for part in parts:
            await self._stop(victim, SHORTEST * (LONGEST / SHORTEST) ** part)

    async def _stop(self, victim: str, seconds: float) -> None:
        await asyncio.sleep(self.random_.uniform(0.5, 3.0))
        while True:
            step, seat = await self._aim(victim)
            await asyncio.sleep(self.random_.uniform(0.0, 0.05))
            pid = await self._keeper(seat) if victim == RUN else self.stack.pids.get(victim)
            if pid is not None and _sent(pid, signal.SIGSTOP):
                break
        self.hits[victim, step] += 1
        self.stopped += 1
        at = time.monotonic() - self.began
        print(f"{at:6.1f} s: {victim} stands still for {seconds:.0f} s at {step} of {seat}", flush=True)
        number = self.player.outages.begin(time.monotonic())
        try:
            await asyncio.sleep(seconds)
        finally:
            _sent(pid, signal.SIGCONT)
            self.player.outages.end(number, time.monotonic())

    async def _aim(self, victim: str) -> tuple[str, str]:
        listener: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.steps.listeners.append(listener)
        new = [step for step in self.steps.seen if not self.hits[victim, step]]
        wanted, began = self.random_.choice(new or [""]), 0.0
        try:
            while True:
                step, seat = await listener.get()
                began = began or time.monotonic()
                waited = (time.monotonic() - began) / PATIENCE
                will_do = step == wanted or waited > 2.0 or (waited > 1.0 and not self.hits[victim, step])
                if will_do and (victim != RUN or seat in self.steps.pods):
                    return step, seat
        finally:
            self.steps.listeners.remove(listener)

    async def _keeper(self, seat: str) -> int | None:
        """The kyb-run of this seat; None while its container does not run."""
        async with self.player.session.get(f"{self.stack.layout.kubelet_url}/pods") as answer:
            pods = {one["metadata"]["name"]: one["status"] for one in (await answer.json())["items"]}
        for status in pods.get(self.steps.pods[seat], {}).get("containerStatuses", ()):
            name = status.get("containerID", "").removeprefix("process://")
            if name and _is_run(name):
                return int(name)
        return None

    async def restart(self) -> None:
        """End the container of a parked model now and then; kubelet starts it again."""
        while True:
            await asyncio.sleep(RESTART_SECONDS)
            parked = [seat["pod"] for seat in await self.seats() if seat["state"] == "parked"]
            for pod_ in self.random_.sample(parked, min(1, len(parked))):
                body = dict(zip(("namespace", "name"), pod_.split("/"), strict=True))
                url = f"{self.stack.layout.kubelet_url}/control/restart-container"
                async with self.player.session.post(url, json=body) as answer:
                    await answer.read()

    async def seats(self) -> list[dict[str, Any]]:
        """Rows of the roster."""
        async with self.player.session.get(f"{self.stack.console}/v1/seats") as answer:
            return [row for row in (await answer.json())["seats"] if row["state"] != "free"]


async def run(scenarios: Sequence[str] = SCENARIOS, seeds: Iterable[int] = SEEDS) -> dict[str, float]:
    """Prints a table of each scenario; returns figures by scenario and seed."""
    figures: dict[str, float] = {}
    for scenario in scenarios:
        hits: Counter[tuple[str, str]] = Counter()
        seen: Counter[str] = Counter()
        for seed in seeds:
            found = await _played(scenario, seed, hits, seen)
            print(f"{scenario} {seed}: {found}", flush=True)
            figures |= {f"{scenario} {seed}: {what}": value for what, value in found.items()}
        table = Table("step", *VICTIMS, "times seen", title=f"{scenario}: stood still at")
        for step in sorted({*seen, *(step for _, step in hits)}):
            table.add_row(step, *(str(hits[victim, step]) for victim in VICTIMS), str(seen[step]))
        Console(width=100).print(table)
    return figures


async def _played(scenario: str, seed: int, hits: Counter[tuple[str, str]], seen: Counter[str]) -> dict[str, float]:
    backends = BACKENDS.get(scenario, BY_SEED)
    demo = Demo(seed=seed, backend=backends[(seed - 1) % len(backends)])
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(_options(scenario, demo, Path(folder)))
    models = stack.models
    arrivals = tuple(workload.generate(models, seed=seed, requests=480, duration=600.0))
    if scenario != OVERLAPPING:
        arrivals = own_arrivals(demo, DemoScenario(scenario))
    async with stack, client_session() as session:
        player = Player([stack.url], SPEED, expected_text, session, repeat=True)
        steps, done = Steps(seen=seen), asyncio.Event()
        stops = Stops(stack, player, steps, hits, random.Random(f"{scenario}/{seed}"))
        before = await violations_of(str(stack.layout.driver_socket))
        async with _beside(steps.follow(session, stack.console, asyncio.Event()), steps.read(_journal(stack))):
            await stack.ready(READY_SECONDS)
            async with asyncio.TaskGroup() as group:
                group.create_task(player.play(again_and_again(lambda: arrivals), done))
                async with _beside(stops.restart()):
                    await asyncio.gather(*map(stops.again_and_again, VICTIMS))
                ended = time.monotonic()
                done.set()
            await player.play([Arrival(0.0, model, 16, 16) for model in models])
            again = time.monotonic() - ended
        samples = player.tally.samples
        figures = {
            "stops": float(stops.stopped),
            "requests": float(player.tally.sent),
            "lost": float(player.tally.sent - player.tally.count(Verdict.OK)),
            "violations": float((await violations_of(str(stack.layout.driver_socket)) or 0) - (before or 0)),
            "seats that wait for a person": float(sum(row["state"] == "quarantined" for row in await stops.seats())),
            "repeats": float(player.tally.repeats),
            "moves": float(sum(one.moved for one in steps.switches)),
            "starts of containers or engines": float(steps.cold_starts),
            "longest wait s": max((one.wait_seconds or 0.0 for one in samples), default=0.0) / SPEED,
            "everything answered after s": again,
        }
        for reason, count in player.tally.reasons.most_common():
            print(f"{count} × {reason}")
        if figures["lost"] or figures["violations"] or figures["seats that wait for a person"]:
            keep_logs(stack, logs := Path(tempfile.mkdtemp(prefix=f"kyb-stops-{scenario}-{seed}-")))
            print(f"logs: {logs}")
    return figures


def _options(scenario: str, demo: Demo, folder: Path) -> StackOptions:
    if scenario != OVERLAPPING:
        return replace(build_options(DemoScenario(scenario), demo, folder, SPEED), announce=False)
    front = f"command: [{', '.join(KYB_RUN)}, python,"
    pods = (pod(model, vram=f"{48 * size}GiB", size=size) for model, size in SIZES.items())
    pods = (one.replace("command: [python,", front) for one in pods)
    settings = {"router": {"KYB_HOLD_SECONDS": "1800"}, "checkpointer": {"KYB_PARK_ALLOW": "several-gpus"}}
    more: dict[str, Any] = {"gpus": 4, "speed": SPEED, "port": 0, "backend": demo.backend, "settings": settings}
    return small_node(folder, CONFIG, pods, **more)


def _journal(stack: Stack) -> Path:
    return stack.folder / "state" / "journal"


def _is_run(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return RUN in Path(f"/proc/{pid}/cmdline").read_text()
    return False


def _sent(pid: int, signum: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
        return True
    return False


@asynccontextmanager
async def _beside(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
