"""The checkpointer as a process: it and its helpers killed at every step, alone on its node, ending on SIGTERM.

The kills run on the stub driver: helpers and engines call ``libcuda.so.1``.
"""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from kybernate.bus.node_socket import connecting
from kybernate.bus.port import BusError, NodeBus
from kybernate.messages import AskJobs, Job, JobReply, JobStatus, SeatTarget, SwitchJob
from services.checkpointer.helper_pool import HelperCall, sigkill
from services.checkpointer.processes import ProcessIdentity, alive, ended
from tests.checkpointer.world import NODE, Checkpointer, Engine, Kind, Node, checkpointer, environment, node
from tests.plugin import processes
from tests.thorough import part
from tests.until import until

ASK_SECONDS = 30.0
IMPATIENT = """
from kybernate import lifecycle
from services.checkpointer.__main__ import main
lifecycle.PREDECESSOR_SECONDS = 0.1
main()
"""
"""A checkpointer that does not wait for its predecessor."""


@asynccontextmanager
async def stack(kind: Kind = "fake") -> AsyncIterator[tuple[Node, NodeBus]]:
    """A node and the manager's end of its bus."""
    async with node(kind) as here, connecting(here.folder / "run" / "checkpointer.sock") as bus:
        yield here, bus


def process(
    here: Node, *program: str, log: str = "checkpointer.log"
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A checkpointer process; killed at the end if it still runs."""
    command = program or ("-m", "services.checkpointer")
    return processes.process(*command, log=here.folder / log, **environment(here))


async def ask(bus: NodeBus, job: Job) -> JobReply:
    """Request as the manager does: repeat until there is a reply."""
    async with asyncio.timeout(ASK_SECONDS):
        while True:
            try:
                return await bus.request(job, JobReply, timeout=2)
            except BusError:
                await asyncio.sleep(0.02)


async def status_of(bus: NodeBus, op: str) -> JobStatus:
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


def helpers(here: Node) -> list[ProcessIdentity]:
    """Helpers whose notes still exist."""
    notes = [path.name.partition("-") for path in (here.folder / "state" / "helpers").iterdir()]
    return [ProcessIdentity(pid=int(pid), start=int(start)) for pid, _, start in notes]


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


async def replayed(it: Checkpointer, engines: tuple[Engine, ...]) -> tuple[str, ...]:
    """Outcomes of the interrupted job and the states of the seats, after a start of the checkpointer."""
    await until(lambda: it.journal.jobs["op-2"].done, what="replayed")
    status = it.journal.jobs["op-2"].status
    ends = (status.park[0].outcome, status.activate.outcome if status.activate else "")
    return (*ends, *[(await it.outcome(engine)) for engine in engines])


@pytest.mark.parametrize("step", part(STEPS, 4))
async def test_killed_at_any_step_it_converges_without_an_operator_and_twice_gives_the_same(step: str) -> None:
    async with stack("ctypes") as (here, bus):
        old = await here.engine("s00")
        async with process(here):
            await ask(bus, switch(1, (old.target,)))
            assert (await status_of(bus, "op-1")).park[0].outcome == "parked"
            new = await here.engine("s01", gib=60)
            await here.inject("slow", factor=5)
            await ask(bus, switch(2, (new.target,), old.target))
            await until(lambda: step in journaled(here, 2), what=step)
        left = helpers(here)
        shutil.copytree(here.folder / "state" / "journal", here.folder / "as it was")
        async with checkpointer(here) as it:
            parked, activated, *now = first = await replayed(it, (new, old))
        assert (parked, activated) in (("parked", "active"), ("parked", "parked"), ("active", "pending")), first
        assert now == [parked, "parked" if activated in ("pending", "parked") else activated]
        for engine, outcome in zip((new, old), now, strict=True):
            assert here.frozen(engine) == (outcome == "parked")
        shutil.rmtree(here.folder / "state" / "journal")
        (here.folder / "as it was").rename(here.folder / "state" / "journal")
        async with checkpointer(here) as it:
            assert await replayed(it, (new, old)) == first
            last = await it.do(park=(new.target,) if parked == "active" else (old.target,))
            assert last.park[0].outcome == "parked", "and it goes on from there"
        assert (await here.violations())["count"] == 0
        await until(lambda: not any(alive(helper) for helper in left), what="no helper is left")


PARK_CALLS = ["describe", "restore_tid", "usage", "state", "lock", "checkpoint"]
ACTIVATE_CALLS = ["usage", "state", "restore", "unlock", "processes"]


async def test_a_helper_killed_before_any_call_is_replaced_and_the_half_goes_on() -> None:
    async with node("ctypes") as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        make, doomed = it.pool.calls, [""]

        async def killing(key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
            if doomed[0] in [call.verb for call in calls]:
                doomed[0] = ""
                await kill_helper(it, key)
            return await make(key, calls)

        it.pool.calls = killing  # type: ignore[method-assign]
        for park, activate in itertools.zip_longest(PARK_CALLS, ACTIVATE_CALLS, fillvalue=""):
            doomed[0] = park
            end = (await it.do(park=(engine.target,))).park[0]
            assert (end.outcome, doomed[0]) == ("parked", ""), (park, end)
            doomed[0] = activate
            done = (await it.do(activate=engine.target)).activate
            assert (done.outcome, doomed[0] in ("", "processes")) == ("active", True), (activate, done)
        assert (await here.violations())["count"] == 0


@pytest.mark.parametrize("verb", ["lock", "checkpoint", "restore"])
async def test_a_helper_killed_in_the_middle_of_a_call_leaves_a_driver_that_finishes_it(verb: str) -> None:
    async with node("ctypes") as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        if verb == "restore":
            await it.do(park=(engine.target,))
        await here.inject("busy", seconds=20) if verb == "lock" else await here.inject("slow", factor=20)
        op = await (it.begin(activate=engine.target) if verb == "restore" else it.begin(park=(engine.target,)))
        await until(lambda: verb in [r.step for r in it.journal.jobs[op].records], what=verb)
        await kill_helper(it, "G0")
        status = await it.done(op)
        seat, wanted = (status.activate, "active") if verb == "restore" else (status.park[0], "parked")
        assert (seat.outcome, "helper ended" in seat.reason) == (wanted, True), seat
        assert (await here.violations())["count"] == 0


async def kill_helper(it: Checkpointer, key: str) -> None:
    """SIGKILL to the helper of a group; it is gone when this returns."""
    line = it.pool._lines.get(key)
    if line is not None and line.helper is not None:
        sigkill(line.helper.who)
        await ended(line.helper.who)


async def test_sigterm_in_the_middle_of_a_transfer_ends_it_at_once_and_the_next_one_finishes() -> None:
    async with stack() as (here, bus):
        engine = await here.engine("s00")
        await here.inject("hang", verb="checkpoint", times=9)
        async with process(here) as one:
            await ask(bus, switch(1, (engine.target,)))
            await until(lambda: '"step":"checkpoint"' in journaled(here, 1), what="checkpoint")
            one.terminate()
            assert await asyncio.wait_for(one.wait(), ASK_SECONDS) == 0, "it waits for no transfer, which may never end"
        await here.inject("clear")
        async with process(here):
            assert (await status_of(bus, "op-1")).park[0].outcome in ("parked", "active")


async def test_a_second_checkpointer_of_the_node_names_the_first() -> None:
    async with stack() as (here, bus), process(here) as first:
        await ask(bus, AskJobs(cause="test", node=NODE, epoch=0))
        async with process(here, "-c", IMPATIENT, log="second.log") as second:
            assert await asyncio.wait_for(second.wait(), 20) == 1
        log = (here.folder / "second.log").read_text()
        assert f"process {first.pid} holds" in log
        assert "Traceback" not in log
