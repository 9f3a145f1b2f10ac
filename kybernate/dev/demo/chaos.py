"""Breaking the stack on purpose while it serves: SIGKILL for each service again and again, the bus taken away.

The plan follows from its seed. Most kills wait for a seat to enter a chosen state of a switch, so that they fall into
the middle of it; whether they did is decided afterwards by the times in the events. The supervisor restarts killed
processes; nothing else repairs anything.
"""

import asyncio
import contextlib
import random
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from kybernate.dev.demo.client import Outages
from kybernate.dev.demo.watch import Watch
from kybernate.dev.stack import Stack
from kybernate.dev.stack.layout import kind
from kybernate.dev.stack.stack import SERVICES
from kybernate.seat import SeatState

NATS_OUTAGE_SECONDS = 5.0

SWITCH_WAIT_SECONDS = 15.0
"""How long to wait for a switch before killing anyway."""
RECOVERY_SECONDS = 180.0
"""A service that is not back after this does not come back: programs begin slowly on a machine with much to do."""
SERVES = {
    "plugin": "plugin.serving",
    "gpu_manager": "manager.recovered",
    "checkpointer": "checkpointer.serving",
    "router": "router.listening",
}
"""The event by which a service says that it serves."""
_MOST_EXTRA = 20
_PHASES = (SeatState.DRAINING, SeatState.PARKING, SeatState.ACTIVATING)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a run of chaos must have done."""

    services: Sequence[str] = SERVICES
    """Processes that are killed."""
    kills: int = 5
    """Of each."""
    outages: int = 2
    """Times that all nats-servers are away."""


ONE_OF_EACH = Promise()


class ChaosTarget(Protocol):
    """What can be broken, and how to see that it is whole again."""

    async def kill(self, service: str) -> None:
        """SIGKILL to one service."""
        ...

    async def back(self, service: str) -> bool:
        """Whether it has been started again since it was last killed, and answers."""
        ...

    async def pause_nats(self) -> None:
        """Take the nats-servers away."""
        ...

    async def resume_nats(self) -> None:
        """Give them back, with what they had stored."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One SIGKILL. ``on``: when a seat enters this state; None: at any time."""

    service: str
    on: SeatState | None
    pause_seconds: float
    """Wall seconds to wait before it is armed."""
    delay_seconds: float = 0.0
    """Wall seconds after the state was entered."""


@dataclass(frozen=True, slots=True)
class NatsOutage:
    """The bus is away for a while."""

    seconds: float
    pause_seconds: float


def plan(seed: int, promised: Promise = ONE_OF_EACH) -> tuple[PlannedKill | NatsOutage, ...]:
    """What will be done, in order. Four of five kills of each service aim at a switch."""
    random_ = random.Random(seed)
    numbers = range(promised.kills)
    kills = [_kill(random_, service, aimed=number % 5 != 4) for service in promised.services for number in numbers]
    random_.shuffle(kills)
    acts: list[PlannedKill | NatsOutage] = list(kills)
    for number in range(promised.outages):
        place = (number + 1) * len(kills) // (promised.outages + 1) + number
        acts.insert(place, NatsOutage(NATS_OUTAGE_SECONDS, random_.uniform(0.5, 1.5)))
    return tuple(acts)


def _kill(random_: random.Random, service: str, *, aimed: bool) -> PlannedKill:
    pause = random_.uniform(0.2, 1.2)
    return PlannedKill(service, random_.choice(_PHASES) if aimed else None, pause, random_.uniform(0.0, 0.02))


@dataclass(frozen=True, slots=True)
class Killed:
    """A kill that was done."""

    service: str
    at: float
    """Unix seconds."""
    back_seconds: float | None
    """Wall seconds until it answered again; None: it did not."""


@dataclass
class Chaos:
    """Carries out a plan and keeps the record."""

    seed: int
    target: ChaosTarget
    watch: Watch
    outages: Outages
    say: Callable[[str], None]
    promised: Promise = ONE_OF_EACH
    kills: list[Killed] = field(default_factory=list)
    nats_outages: list[float] = field(default_factory=list)
    """Wall seconds for which the nats-server was really away."""
    recovered: bool = False
    recovery_seconds: float | None = None

    async def run(self, acts: Iterable[PlannedKill | NatsOutage]) -> None:
        """Do it all, then go on killing during switches until half of the kills fell into one."""
        for act in acts:
            await self._do(act)
        for extra in self._extra():
            if 2 * sum(self.during_switch().values()) >= len(self.kills):
                return
            await self._do(extra)

    def during_switch(self) -> Counter[str]:
        """Kills that fell into a switch, by service."""
        return Counter(kill.service for kill in self.kills if self.watch.was_switching(kill.at))

    async def settle(self, in_order: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Wait until the stack is in order by itself."""
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _until(in_order, every=0.2)
                self.recovered = True
                self.recovery_seconds = time.monotonic() - began

    def report(self) -> dict[str, Any]:
        """The record, and what is missing from the promise."""
        kills, during = Counter(kill.service for kill in self.kills), self.during_switch()
        services = self.promised.services
        failures = [
            f"{service} was killed {kills[service]} times, not {self.promised.kills}"
            for service in services
            if kills[service] < self.promised.kills
        ]
        failures += [f"{kill.service} did not come back" for kill in self.kills if kill.back_seconds is None]
        if 2 * sum(during.values()) < len(self.kills):
            failures.append(f"only {sum(during.values())} of {len(self.kills)} kills fell into a switch")
        if len(self.nats_outages) < self.promised.outages:
            failures.append(f"the bus was away {len(self.nats_outages)} times, not {self.promised.outages}")
        if not self.recovered:
            failures.append("the stack was not in order again at the end")
        return {
            "seed": self.seed,
            "kills": {service: kills[service] for service in services},
            "kills_during_switch": {service: during[service] for service in services},
            "nats_outages_s": [round(seconds, 3) for seconds in self.nats_outages],
            "recovered": self.recovered,
            "recovery_s": None if self.recovery_seconds is None else round(self.recovery_seconds, 3),
            "failures": failures,
        }

    async def _do(self, act: PlannedKill | NatsOutage) -> None:
        await asyncio.sleep(act.pause_seconds)
        if isinstance(act, NatsOutage):
            await self._take_nats_away(act.seconds)
            return
        if act.on is not None:
            await self._aim(act.on)
            await asyncio.sleep(act.delay_seconds)
        number = self.outages.begin(time.monotonic())
        await self.target.kill(act.service)
        at = time.time()
        self.say(f"killed {act.service}{f' when a seat was {act.on}' if act.on else ''}")
        back = await self._back(act.service)
        self.outages.end(number, time.monotonic())
        self.kills.append(Killed(act.service, at, back))

    async def _aim(self, state: SeatState) -> None:
        """Until a seat is in this state of a switch; any state of a switch will do in the second half of the wait."""
        if not await self.watch.entered(state, SWITCH_WAIT_SECONDS / 2):
            await self.watch.switch_under_way(SWITCH_WAIT_SECONDS / 2)

    async def _back(self, service: str) -> float | None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                await _until(lambda: self.target.back(service), every=0.05)
        except TimeoutError:
            self.say(f"{service} did not come back within {RECOVERY_SECONDS:.0f} s")
            return None
        return time.monotonic() - began

    async def _take_nats_away(self, seconds: float) -> None:
        number = self.outages.begin(time.monotonic())
        began = time.monotonic()
        self.say(f"take the bus away for {seconds:g} s")
        await self.target.pause_nats()
        try:
            await asyncio.sleep(seconds)
        finally:
            await self.target.resume_nats()
            self.outages.end(number, time.monotonic())
        self.nats_outages.append(time.monotonic() - began)

    def _extra(self) -> Iterator[PlannedKill]:
        random_ = random.Random(f"{self.seed}/extra")
        for number in range(_MOST_EXTRA):
            service = self.promised.services[number % len(self.promised.services)]
            yield replace(_kill(random_, service, aimed=True), delay_seconds=0.0)


async def _until(holds: Callable[[], Awaitable[bool]], *, every: float) -> None:
    """Ask again and again until it holds; the caller sets the deadline."""
    while True:
        if await holds():
            return
        await asyncio.sleep(every)


class StackTarget:
    """A stack as something to break."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self._stack = stack
        self._session = session
        self._starts: dict[str, int] = {}
        self._served: dict[str, int] = {}

    async def kill(self, service: str) -> None:
        """SIGKILL; a service that is just being restarted is killed as soon as it is there."""
        while True:
            starts, served = self._stack.starts[service], self._times_served(service)
            if self._stack.kill(service) is not None:
                self._starts[service], self._served[service] = starts, served
                return
            await asyncio.sleep(0.02)

    async def back(self, service: str) -> bool:
        """Started again since the kill and serving, and every router answers."""
        stack = self._stack
        again = stack.starts[service] > self._starts.get(service, 0) and service in stack.pids
        again = again and (kind(service) not in SERVES or self._times_served(service) > self._served.get(service, 0))
        return again and all([await answers(self._session, router.url) for router in stack.layout.routers])

    def _times_served(self, service: str) -> int:
        return self._stack.logs(service).count(f'"{SERVES[kind(service)]}"') if kind(service) in SERVES else 0

    async def pause_nats(self) -> None:
        """End the nats-servers of all."""
        await self._stack.pause_nats()

    async def resume_nats(self) -> None:
        """Start them where they were."""
        await self._stack.resume_nats()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the router is there at all."""
    try:
        async with asyncio.timeout(2), session.get(f"{url}/healthz") as response:
            return response.status == 200
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return False


async def seats_in_order(session: aiohttp.ClientSession, url: str, stack: Stack) -> bool:
    """Whether every model has been started, and is active or parked."""
    try:
        async with asyncio.timeout(2), session.get(f"{url}/v1/seats") as response:
            body = await response.json()
    except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
        return False
    return isinstance(body.get("seats"), list) and stack.missing(body["seats"]) is None


def keep_logs(stack: Stack, folder: Path) -> None:
    """Copy the logs of all processes there."""
    shutil.copytree(stack.folder / "logs", folder, dirs_exist_ok=True)
