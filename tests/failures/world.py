"""A small stack of real processes on which one failure after another is tried, and what a person sees of it.

Group G0 has one GPU and the models ``a`` and ``b``, of which one is active and one parked; G1 has ``c``, the
neighbour that no failure of the others may disturb.

Moves have a stack whose two groups are one pool: the incoming seat comes from the one group to that of the victim.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.dev.stack import Stack
from kybernate.dev.stack.stack import unready
from tests.stack.client import Client, running
from tests.stack.pods import pod, small_node
from tests.until import until

CONFIG = """
profiles:
  - {name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2, rebalance: false}
drainSeconds: 3600
policy: {name: kyb-balanced, settings: {capSlos: 0, keepRatio: 0}}
"""
"""A busy victim drains as soon as a request waits, and for as long as the case keeps its answer going. An idle one
stays: on a slow machine parks take long, and both models would be parked before each case."""
MIG_RESTART = "restart between two MIG instances of a GPU"
"""A way to move."""
MIG_PRESET = "2xA100-mig-3g"
INSTANCES = [one.uuid for one in hardware(MIG_PRESET).instances][:2]
MIG_CONFIG = f"""
migStrategy: single
gpuTopology:
  groups: [{{name: G0, gpus: [{INSTANCES[0]}]}}, {{name: G1, gpus: [{INSTANCES[1]}]}}]
"""
KYB_RUN = "command: [/kyb/kyb-run, --, python,"
"""In front of engines that move by a restart."""
LATER = ("waiting", "starting", "active")
"""States of a seat that moves by a restart, in order; waiting: it has no engine."""
MODELS = ("a", "b", "c")
SPEED = 4.0
SETTLED_SECONDS = 90.0
CALM_TIMES = 5
"""Looks at the roster, 0.1 s apart, that must all find it in order."""
ATTEMPTS = 60
HELD_TOKENS = 100_000
"""Length of an answer that ends only with its client: seven minutes."""


@dataclass
class Asked:
    """What a client saw that repeats a request as the clients of OpenAI's API do: after a lost connection, a 429 or a
    5xx."""

    status: int = 0
    repeats: int = 0
    error: str = ""
    note: str = ""
    """What else the case saw."""


@dataclass
class Failures:
    """One running stack."""

    client: Client
    way: str = ""
    """How seats move; empty: they do not."""
    target: str = "G0"
    """The group of the victim."""
    victim: str = "a"
    """The model of that group that is active at the beginning of the case."""
    incoming: str = "b"
    """The one that is parked."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Container restarts by model, at the beginning of the case."""
    violations: int = 0
    """What the fake driver had counted at the beginning of the case."""

    @property
    def stack(self) -> Stack:
        """Its processes."""
        return self.client.stack

    @property
    def session(self) -> aiohttp.ClientSession:
        """Of its clients."""
        return self.client.session

    # --- the stack seen from outside --------------------------------------------------------------------------------

    async def seats(self) -> list[dict[str, Any]]:
        """Rows of the roster; none while the router is away."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            async with asyncio.timeout(2), self.session.get(f"{self.stack.console}/v1/seats") as answer:
                return list((await answer.json())["seats"])
        return []

    async def settled(self) -> None:
        """Wait until every model is active or parked and no request waits, twice in a row: the roster may be a moment
        behind. Raises AssertionError."""
        seen: list[Any] = []
        times = 0

        async def holds() -> bool:
            nonlocal times
            rows = await self.seats()
            seen[:] = [(row["model"], row["state"], row["reason"] or row["blocked"]) for row in rows]
            calm = bool(rows) and unready(rows, len(MODELS)) is None and not any(row["waiting"] for row in rows)
            times = times + 1 if calm else 0
            return times == CALM_TIMES

        await until(
            holds, what="every model is active or parked", saw=lambda: seen, timeout=SETTLED_SECONDS, interval=0.1
        )

    async def cold_starts(self) -> list[str]:
        """Seats whose engine was started again since the beginning of the case, by their part in it."""
        parts = {self.victim: "victim", self.incoming: "incoming"}
        again = [
            model
            for model, status in (await self.client.containers()).items()
            if status["restartCount"] > self.restarts[model]
        ]
        return sorted(parts.get(model, "neighbour") for model in again)

    async def counted_violations(self) -> int:
        """Two engines on one GPU, and whatever else the fake driver counts."""
        return int((await self.client.driver("stats"))["violations"]["count"])

    async def begin(self) -> None:
        """Find who is active and who is parked, and remember the counts. The router may have been killed just now."""
        await self.settled()
        await until(self.routed, what="the router is ready")
        rows = [seat for seat in await self.seats() if seat["model"]]
        if self.way:
            self.incoming, away = next((row["model"], row["group"]) for row in rows if row["state"] != "active")
            self.target = "G1" if away == "G0" else "G0"
        found = {row["model"]: row["state"] for row in rows if row["group"] == self.target}
        if "active" not in found.values():
            await (self.move() if self.way else self.ask("a"))
            await self.ask(self.incoming)
            return await self.begin()
        self.victim = next(model for model, state in found.items() if state == "active")
        if not self.way:
            self.incoming = "b" if self.victim == "a" else "a"
        self.restarts = {model: status["restartCount"] for model, status in (await self.client.containers()).items()}
        self.violations = await self.counted_violations()
        return None

    async def routed(self) -> bool:
        """The router takes requests."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self.session.get(f"{self.stack.url}/readyz") as answer:
                return answer.status == 200
        return False

    async def check_places(self, *, moved: bool) -> None:
        """Each active seat has memory on the GPUs of its group only, others have none; the incoming one has moved."""
        rows = {row["model"]: row for row in await self.seats() if row["model"]}
        gpus = [one["uuid"] for one in (await self.client.driver("devices"))["gpus"]]
        held = [one for one in (await self.client.driver("processes"))["processes"] if one["bytes"]]
        groups = {uuid: f"G{n}" for n, uuid in enumerate(INSTANCES if self.way == MIG_RESTART else gpus)}
        for row in rows.values():
            places = {groups[one["gpu"]] for one in held if one["seat"] == row["seat"]}
            assert places == ({row["group"]} if row["state"] == "active" else set()), (row, places)
        if moved:
            assert rows[self.incoming]["group"] == self.target

    async def fixed(self) -> list[str]:
        """Why seats will not move again with their pods."""
        return [row["fixed"] for row in await self.seats() if self.way and row["fixed"]]

    # --- requests ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def answering(self, model: str) -> AsyncIterator[None]:
        """The model streams an answer while the block runs; then the client closes the connection."""
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": model, "messages": messages, "max_tokens": HELD_TOKENS, "stream": True}
        async with self.session.post(f"{self.stack.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            yield

    async def ask(self, model: str) -> Asked:
        """Complete a prompt; repeated as clients do."""
        asked = Asked()
        body = {"model": model, "prompt": "hi", "max_tokens": 4}
        for _ in range(ATTEMPTS):
            try:
                async with self.session.post(f"{self.stack.url}/v1/completions", json=body) as answer:
                    asked.status, text = answer.status, await answer.text()
            except (aiohttp.ClientError, ConnectionError) as error:
                asked.status, text = 0, repr(error)
            if asked.status == 200:
                return asked
            asked.error = text
            if 400 <= asked.status < 500 and asked.status != 429:
                return asked
            asked.repeats += 1
            await asyncio.sleep(0.5)
        return asked

    async def move(self) -> None:
        """Order the incoming seat to the victim's group. A manager that was killed in the case before may not listen
        yet: the order is given again."""
        seat = next(row["seat"] for row in await self.seats() if row["model"] == self.incoming)
        url, answered = f"{self.stack.console}/v1/seats/{seat}/migrate", [""]

        async def accepted() -> bool:
            async with self.session.post(url, json={"to": self.target}) as answer:
                answered[:] = [await answer.text()]
                assert answer.status in (202, 503, 504), answered
                return answer.status == 202

        await until(accepted, what="the move is accepted", saw=lambda: answered, timeout=20, interval=0.2)

    # --- moments of a switch ----------------------------------------------------------------------------------------

    def journaled(self) -> set[str]:
        """Names of the journal's files."""
        return {path.name for path in (self.stack.folder / "state" / "journal").glob("*.jsonl")}

    async def until_recorded(self, mark: str, before: set[str]) -> None:
        """Until the journal of a new switch has this text."""

        def recorded() -> bool:
            for path in (self.stack.folder / "state" / "journal").glob("*.jsonl"):
                if path.name not in before:
                    with contextlib.suppress(OSError):
                        if mark in path.read_text():
                            return True
            return False

        await until(recorded, what=f"the journal has {mark}", interval=0.002)

    async def until_state(self, model: str, state: str) -> None:
        """Until the roster shows a model in this state, or in one after it."""
        reached = LATER[LATER.index(state) :] if state in LATER else (state,)

        async def holds() -> bool:
            rows = [row for row in await self.seats() if row["model"] == model]
            return any(("waiting" if row["cold"] else row["state"]) in reached for row in rows)

        await until(holds, what=f"{model} is {state}", timeout=60, interval=0.005)

    # --- breaking it ------------------------------------------------------------------------------------------------

    async def kill(self, name: str) -> None:
        """SIGKILL to a model's engine, or to a service, which the supervisor starts again; kubelet restarts itself."""
        if name in MODELS:
            os.kill(
                int((await self.client.containers())[name]["containerID"].removeprefix("process://")), signal.SIGKILL
            )
            return
        if name == "kubelet":
            await self.client.kubelet("restart-kubelet", {"down_seconds": 0.5})
            return
        starts = self.stack.starts[name]
        self.stack.kill(name)
        await until(lambda: self.stack.starts[name] > starts, what=f"{name} is started again")

    async def until_restarted(self, name: str) -> None:
        """Until kubelet has started the container of a model again; it needs a ticket, so other seats may go first."""
        if name in MODELS:

            async def again() -> bool:
                return bool((await self.client.containers())[name]["restartCount"] > self.restarts[name])

            await until(again, what=f"the container of {name} is started again", timeout=60)

    @asynccontextmanager
    async def without(self, *names: str) -> AsyncIterator[Path]:
        """These services are ended while the block runs; the value is the stack's folder."""
        for name in names:
            await self.stack.pause(name)
        try:
            yield self.stack.folder
        finally:
            for name in names:
                await self.stack.resume(name)


@asynccontextmanager
async def failures(folder: Path, way: str) -> AsyncIterator[Failures]:
    """A stack that is ready, and whose seats move in this way."""
    restarts, mig = way in ("restart", MIG_RESTART), way == MIG_RESTART
    pods = (pod(model, vram="30GiB" if mig else "60GiB") for model in MODELS)
    if restarts:
        pods = (one.replace("command: [python,", KYB_RUN) for one in pods)
    config = CONFIG.replace("rebalance: false", "rebalance: true") + MIG_CONFIG * mig if way else CONFIG
    backend, preset = "unload" if restarts else None, MIG_PRESET if mig else "default"
    options = small_node(folder, config, pods, gpus=2, speed=SPEED, backend=backend, preset=preset)
    async with running(options, 60, strict=False) as client:
        yield Failures(client, way)
