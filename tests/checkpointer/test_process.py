"""The checkpointer as a process: killed at every step, alone on its node, ending on SIGTERM."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kybernate.bus import BusError, open_bus
from kybernate.bus.port import Bus
from kybernate.bus.server import NatsServer
from kybernate.messages import AskJobs, Job, JobReply, JobStatus, SeatTarget, SwitchJob
from tests.checkpointer.world import NODE, Node, environment, node, until

ASK_SECONDS = 30.0


@asynccontextmanager
async def stack() -> AsyncIterator[tuple[Node, NatsServer, Bus]]:
    """A node, a nats-server and the manager's end of the bus."""
    async with (
        node() as here,
        NatsServer(here.folder / "nats") as server,
        open_bus(server.url, source="kyb/test", name="test") as bus,
    ):
        await until(lambda: bus.connected, what="on the bus")
        yield here, server, bus


@asynccontextmanager
async def process(here: Node, server: NatsServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """A checkpointer process; killed at the end if it still runs."""
    log = (here.folder / "checkpointer.log").open("ab")
    env = environment(here, server.url)
    one = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.checkpointer", env=env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
    )
    log.close()
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            one.kill()
        await one.wait()


async def ask(bus: Bus, job: Job) -> JobReply:
    """Ask as the manager does: again until there is an answer."""
    async with asyncio.timeout(ASK_SECONDS):
        while True:
            try:
                return await bus.request(job, JobReply, timeout=2)
            except BusError:
                await asyncio.sleep(0.02)


async def status_of(bus: Bus, op: str) -> JobStatus:
    """The status of an op once it is done."""
    async with asyncio.timeout(ASK_SECONDS):
        while True:
            reply = await ask(bus, AskJobs(cause="test", node=NODE, epoch=0, ops=(op,)))
            if reply.jobs and reply.jobs[0].done:
                return reply.jobs[0]
            await asyncio.sleep(0.01)


def switch(epoch: int, park: tuple[SeatTarget, ...], activate: SeatTarget | None = None) -> SwitchJob:
    return SwitchJob(cause="test", node=NODE, epoch=epoch, op=f"op-{epoch}", group="G0", park=park, activate=activate)


def journaled(here: Node, epoch: int) -> str:
    files = list((here.folder / "state" / "journal").glob(f"{epoch:020d}-*.jsonl"))
    return files[0].read_text() if files else ""


def orphans(here: Node) -> list[str]:
    """Helpers that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if str(here.socket) in command and "services.checkpointer.helper" in command:
                found.append(entry.name)
    return found


STEPS = [
    '"kind":"switch"',
    '"half":"park"',
    '"step":"lock"',
    '"step":"checkpoint"',
    '"step":"freeze"',
    '"kind":"end"',
    '"half":"activate"',
    '"step":"thaw"',
    '"step":"restore"',
    '"step":"unlock"',
    '"kind":"done"',
]


@pytest.mark.parametrize("step", STEPS)
async def test_killed_at_any_step_it_converges_without_an_operator(step: str) -> None:
    """SIGKILL at the step, again right after its start, then a third one brings everything to an end."""
    async with stack() as (here, server, bus):
        old, new = await here.engine("s00"), None
        async with process(here, server):
            await ask(bus, switch(1, (old.target,)))
            assert (await status_of(bus, "op-1")).park[0].outcome == "parked"
            new = await here.engine("s01", gib=60)
            await here.inject("slow", factor=8)
            await ask(bus, switch(2, (new.target,), old.target))
            await until(lambda: step in journaled(here, 2), what=step)
        async with process(here, server) as second:
            pid_file = here.folder / "run" / "checkpointer.lock"
            await until(lambda: pid_file.read_text() == str(second.pid), what="the second runs")
        async with process(here, server):
            status = await status_of(bus, "op-2")
            parked, activated = status.park[0].outcome, status.activate.outcome if status.activate else None
            assert (parked, activated) in (("parked", "active"), ("parked", "parked"), ("active", "pending")), status
            targets = (new.target, old.target)
            reply = await ask(bus, AskJobs(cause="test", node=NODE, epoch=0, targets=targets))
            expected = [parked, "parked" if activated in ("pending", "parked") else activated]
            assert [seat.outcome for seat in reply.seats] == expected
            for engine, outcome in zip((new, old), expected, strict=True):
                assert here.frozen(engine) == (outcome == "parked")
            last = await ask(
                bus, switch(3, (new.target,), old.target) if parked == "active" else switch(3, (old.target,))
            )
            assert last.accepted, "and it goes on from there"
            assert (await status_of(bus, "op-3")).done
        assert (await here.violations())["count"] == 0
        await until(lambda: not orphans(here), what="no helper is left")


async def test_sigterm_in_the_middle_of_a_transfer_ends_it_at_once_and_the_next_one_finishes() -> None:
    async with stack() as (here, server, bus):
        engine = await here.engine("s00")
        await here.inject("slow", factor=300)
        async with process(here, server) as one:
            await ask(bus, switch(1, (engine.target,)))
            await until(lambda: '"step":"checkpoint"' in journaled(here, 1), what="checkpoint")
            began = asyncio.get_running_loop().time()
            one.terminate()
            assert await one.wait() == 0
            assert asyncio.get_running_loop().time() - began < 3
        await here.inject("clear")
        async with process(here, server):
            assert (await status_of(bus, "op-1")).park[0].outcome in ("parked", "active")


async def test_a_second_checkpointer_of_the_node_says_who_is_there() -> None:
    async with stack() as (here, server, bus), process(here, server) as first:
        await ask(bus, AskJobs(cause="test", node=NODE, epoch=0))
        async with process(here, server) as second:
            assert await asyncio.wait_for(second.wait(), 20) == 1
        log = (here.folder / "checkpointer.log").read_text()
        assert f"process {first.pid} holds" in log
        assert "Traceback" not in log


async def test_it_waits_for_a_bus_that_is_not_there_yet_and_replays_meanwhile() -> None:
    async with stack() as (here, server, bus):
        engine = await here.engine("s00")
        await here.inject("slow", factor=8)
        async with process(here, server):
            await ask(bus, switch(1, (engine.target,)))
            await until(lambda: '"step":"checkpoint"' in journaled(here, 1), what="checkpoint")
        await server.kill()
        async with process(here, server) as one:
            await until(lambda: '"kind":"done"' in journaled(here, 1), what="replayed without a bus")
            await server.start()
            assert (await status_of(bus, "op-1")).park[0].outcome == "parked"
            one.terminate()
            assert await one.wait() == 0


async def test_without_a_driver_socket_it_says_what_is_missing() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    one = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.checkpointer", env=env, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await one.communicate()
    assert one.returncode == 2
    assert b"KYB_FAKE_DRIVER" in stderr
