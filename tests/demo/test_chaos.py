import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from kybernate.dev.demo.chaos import (
    NATS_OUTAGE_SECONDS,
    ONE_OF_EACH,
    Chaos,
    Killed,
    NatsOutage,
    PlannedKill,
    Promise,
    StackTarget,
    plan,
    seats_in_order,
)
from kybernate.dev.demo.client import Outages
from kybernate.dev.demo.watch import Watch
from kybernate.dev.stack import SERVICES
from kybernate.dev.stack.options import StackOptions
from kybernate.dev.stack.stack import Stack
from kybernate.http.server import HttpServer
from kybernate.seat import SeatState as S
from tests.demo.router_fake import FakeRouter, event


@dataclass
class Breakable:
    outages: Outages
    killed: list[str] = field(default_factory=list)
    down_at_kill: list[bool] = field(default_factory=list)
    nats: list[str] = field(default_factory=list)
    comes_back: bool = True

    async def kill(self, service: str) -> None:
        self.killed.append(service)
        self.down_at_kill.append(self.outages.overlap(time.monotonic(), time.monotonic()))

    async def back(self, service: str) -> bool:
        return self.comes_back

    async def pause_nats(self) -> None:
        self.nats.append("pause")

    async def resume_nats(self) -> None:
        self.nats.append("resume")


@contextlib.asynccontextmanager
async def switching(watch: Watch) -> AsyncIterator[None]:
    """Seats that switch all the time, 10 ms per state."""

    async def turn() -> None:
        while True:
            for state, previous in (
                (S.DRAINING, S.ACTIVE),
                (S.PARKING, S.DRAINING),
                (S.PARKED, S.PARKING),
                (S.ACTIVATING, S.PARKED),
                (S.ACTIVE, S.ACTIVATING),
            ):
                watch.take(event("s0", state, previous))
                await asyncio.sleep(0.01)

    task = asyncio.create_task(turn())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def chaos_on(watch: Watch) -> tuple[Chaos, Breakable]:
    outages = Outages()
    target = Breakable(outages)
    return Chaos(1, target, watch, outages, lambda _: None), target


def quick(acts: tuple[PlannedKill | NatsOutage, ...]) -> list[PlannedKill | NatsOutage]:
    return [
        NatsOutage(0.05, 0.0)
        if isinstance(act, NatsOutage)
        else PlannedKill(act.service, act.on, 0.0, act.delay_seconds / 10)
        for act in acts
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_plan_follows_from_its_seed_and_keeps_the_promise(seed: int) -> None:
    acts = plan(seed)
    assert acts == plan(seed)
    assert acts != plan(seed + 1)
    kills = [act for act in acts if isinstance(act, PlannedKill)]
    assert Counter(kill.service for kill in kills) == dict.fromkeys(SERVICES, ONE_OF_EACH.kills)
    assert 2 * sum(kill.on is not None for kill in kills) > len(kills)
    outages = [act for act in acts if isinstance(act, NatsOutage)]
    assert [act.seconds for act in outages] == [NATS_OUTAGE_SECONDS] * 2
    assert isinstance(acts[0], PlannedKill)
    assert isinstance(acts[-1], PlannedKill)


def test_of_a_cluster_each_process_is_killed() -> None:
    promised = Promise(("router", "router-2", "nats", "nats-2", "nats-3"), kills=2, outages=1)
    acts = plan(1, promised)
    kills = Counter(act.service for act in acts if isinstance(act, PlannedKill))
    assert kills == dict.fromkeys(promised.services, 2)
    assert sum(isinstance(act, NatsOutage) for act in acts) == 1


async def test_all_of_the_plan_is_done_and_most_kills_fall_into_a_switch() -> None:
    watch = Watch()
    chaos, target = chaos_on(watch)
    async with switching(watch):
        await chaos.run(quick(plan(1)))
    assert Counter(target.killed) >= Counter(dict.fromkeys(SERVICES, ONE_OF_EACH.kills))
    assert all(target.down_at_kill)
    assert target.nats == ["pause", "resume"] * 2
    await chaos.settle(_yes, 1)
    report = chaos.report()
    assert report["failures"] == []
    assert sum(report["kills_during_switch"].values()) * 2 >= sum(report["kills"].values())


async def test_too_few_kills_in_a_switch_are_made_up_for() -> None:
    watch = Watch()
    chaos, target = chaos_on(watch)
    async with switching(watch):
        for service in SERVICES:
            chaos.kills += [Killed(service, 1.0, 0.1)] * 2
        await chaos.run([])
    assert 8 <= len(target.killed) <= 20
    assert 2 * chaos.during_switch().total() >= len(chaos.kills)


async def test_without_a_switch_kills_are_done_all_the_same_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kybernate.dev.demo.chaos.SWITCH_WAIT_SECONDS", 0.02)
    monkeypatch.setattr("kybernate.dev.demo.chaos._MOST_EXTRA", 0)
    chaos, target = chaos_on(Watch())
    await chaos.run([PlannedKill("router", S.PARKING, 0.0), PlannedKill("plugin", None, 0.0)])
    assert target.killed == ["router", "plugin"]
    failures = " ".join(chaos.report()["failures"])
    assert "only 0 of 2 kills fell into a switch" in failures
    assert "gpu_manager was killed 0 times" in failures
    assert "the bus was away 0 times" in failures
    assert "not in order again" in failures


async def test_a_service_that_does_not_come_back_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kybernate.dev.demo.chaos.RECOVERY_SECONDS", 0.1)
    monkeypatch.setattr("kybernate.dev.demo.chaos._MOST_EXTRA", 0)
    chaos, target = chaos_on(Watch())
    target.comes_back = False
    await chaos.run([PlannedKill("router", None, 0.0)])
    assert "router did not come back" in chaos.report()["failures"]


async def test_a_killed_service_is_back_once_it_serves_and_not_when_its_process_has_begun() -> None:
    """A manager that was killed again while it began never served at load 33: 65 s without one, and lost requests."""
    log = ['{"event": "manager.recovered"}']
    async with FakeRouter().serving() as router, aiohttp.ClientSession() as session:
        layout = SimpleNamespace(routers=[SimpleNamespace(url=router.url)])
        stack = SimpleNamespace(
            starts={"gpu_manager-2": 1},
            pids={"gpu_manager-2": 7},
            logs=lambda _: "\n".join(log),
            kill=lambda _: 7,
            layout=layout,
        )
        target = StackTarget(cast(Stack, stack), session)
        await target.kill("gpu_manager-2")
        assert not await target.back("gpu_manager-2")
        stack.starts["gpu_manager-2"] = 2
        assert not await target.back("gpu_manager-2"), "it begins"
        log.append(log[0])
        assert await target.back("gpu_manager-2")


async def test_settle_waits_for_order_and_reports_its_absence() -> None:
    chaos, _ = chaos_on(Watch())
    answers = iter([False, True])

    async def soon() -> bool:
        return next(answers)

    await chaos.settle(soon, 5)
    assert chaos.recovered
    assert chaos.recovery_seconds is not None
    late, _ = chaos_on(Watch())
    await late.settle(_no, 0.1)
    assert not late.recovered


async def _yes() -> bool:
    return True


async def _no() -> bool:
    return False


@pytest.mark.parametrize(("state", "ordered"), [("waiting", False), ("parked", True)])
async def test_a_seat_at_the_gate_is_in_order_where_it_is_parked(state: str, ordered: bool) -> None:
    stack = Stack(StackOptions())
    rows = [{"seat": f"s{n}", "model": model, "state": state, "started": True} for n, model in enumerate(stack.models)]

    async def seats(_: web.Request) -> web.Response:
        return web.json_response({"seats": rows})

    app = web.Application()
    app.router.add_get("/v1/seats", seats)
    async with HttpServer(app, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        assert await seats_in_order(session, server.url, stack) is ordered
