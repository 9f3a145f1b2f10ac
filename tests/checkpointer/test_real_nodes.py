"""What would have stopped or endangered a node with real GPUs: B1 to B9 of docs/dev/checkpointer.md."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kybernate.messages import ReleaseJob
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.backends.host import Inspection, open_host
from services.checkpointer.core.refusals import DriverInfo, kill_hangs
from services.checkpointer.helper.serving import UNREACHABLE, answer
from services.checkpointer.helper_pool import HelperPool
from tests.checkpointer.test_hazards import NOTHING, activate, park, stand, steps
from tests.checkpointer.world import GIB, NODE, checkpointer, node
from tests.until import until


def test_b2_the_backend_that_allows_everything_exists_only_with_the_fake_driver(tmp_path: Path) -> None:
    pool = HelperPool(("nothing",), tmp_path)
    http: Any = None
    real, fake = (open_backends(pool, Timeouts(), open_host(None, 1.0), http=http, fake=fake) for fake in (False, True))
    assert ({"cuda", "restart"} <= real.keys(), fake.keys() - real.keys()) == (True, {"fake"})


def test_b3_a_helper_answers_whatever_its_driver_raises() -> None:
    class Driver:
        def call(self, verb: str, arguments: dict[str, object]) -> dict[str, object]:
            raise AttributeError("CUcheckpointRestoreArgs")

    reply = answer(Driver().call, {"id": 7, "verb": "restore"})
    assert (reply["id"], reply["code"]) == (7, UNREACHABLE)
    assert "restore raised AttributeError: CUcheckpointRestoreArgs" in reply["text"]


async def test_b1_an_engine_with_103_attached_processes_is_parked_and_activated_as_one() -> None:
    """An API server, tools that looked at the devices, forked workers: half of them called cuInit only, which a lock
    answers with NOT_INITIALIZED. Each verb about them is one record."""
    async with stand(allowed=NOTHING) as (here, it):
        engine = await here.engine("s00", gib=40, attached=103)
        end = await park(it, engine)
        assert (end.outcome, end.vram_bytes) == ("parked", 40 * GIB), end
        assert sorted(steps(it)) == sorted(["lock", "lock", "checkpoint", "checkpoint", "freeze"]), steps(it)
        end = await activate(it, engine)
        assert (end.outcome, end.reason) == ("active", ""), end
        assert sorted(steps(it)) == sorted(["thaw", "restore", "restore", "unlock", "unlock"]), steps(it)
        assert await it.outcome(engine) == "active"
        assert (await here.violations())["count"] == 0


async def test_b1_an_attached_process_may_end_between_park_and_activation() -> None:
    async with stand(allowed=NOTHING) as (here, it):
        engine = await here.engine("s00", gib=20, attached=2)
        assert (await park(it, engine)).outcome == "parked"
        attached = next(m for m in it.journal.parked["s00"].members if not m.holds)
        os.kill(attached.who.pid, signal.SIGKILL)
        assert (await activate(it, engine)).outcome == "active"
        assert await it.outcome(engine) == "active"


async def test_b1_a_forked_child_that_is_never_restored_is_a_cold_start_the_second_time() -> None:
    async with stand(allowed=NOTHING) as (here, it):
        engine = await here.engine("s00", gib=20, attached=2)
        assert (await park(it, engine)).outcome == "parked"
        child = [m.who.pid for m in it.journal.parked["s00"].members if not m.holds][-1]
        await here.inject("mark", pid=child, marks={"stale": True})
        first, second = await activate(it, engine), await activate(it, engine)
        assert (first.outcome, second.outcome) == ("parked", "lost"), (first, second)
        assert "INVALID_VALUE" in second.reason
        assert set((await here.used()).values()) == {0}


class Machine(Inspection):
    """The kernel driver of another machine."""

    def kernel_module(self) -> str:
        return "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build"


async def test_b8_where_the_end_of_a_restored_process_hangs_the_machine_a_deleted_seat_is_checkpointed_first() -> None:
    async with node("ctypes") as here:
        here.cuda_version = "13020"  # driver 595
        async with checkpointer(here, floor_wall_seconds=1.0) as it:
            it.host.inspection = Machine()
            engine = await here.engine("s00")
            assert (await park(it, engine)).outcome == "parked"
            assert (await activate(it, engine)).outcome == "active"
            await here.inject("wedge-on-kill")
            release = ReleaseJob(cause="test", node=NODE, epoch=it.epoch + 1, target=engine.target)
            assert (await it.ask(release)).ends, "so kubelet's preStop hook waits"
            assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGKILL
            await until(lambda: not it.worker._tasks, what="released")
            assert set((await here.used()).values()) == {0}
            assert (await here.violations())["count"] == 0


@pytest.mark.parametrize(
    ("version", "module", "hangs"),
    [
        ("595.71.05", "NVIDIA UNIX Open Kernel Module", True),
        ("595.71.05", "", True),
        ("595.71.05", "NVIDIA UNIX x86_64 Kernel Module", False),
        ("580.95.05", "NVIDIA UNIX Open Kernel Module", False),
    ],
)
def test_b8_it_is_driver_595_with_the_open_kernel_module(version: str, module: str, hangs: bool) -> None:
    assert kill_hangs(DriverInfo(version=version), module) is hangs


async def test_b9_a_parked_seat_whose_pod_is_deleted_is_killed_and_never_thawed() -> None:
    """A SIGTERM handler of a checkpointed process blocks in the driver until the grace period is over."""
    async with stand() as (here, it):
        engine, running = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        assert (await park(it, engine)).outcome == "parked"
        engine.process.terminate()
        assert here.frozen(engine)
        for one in (engine, running):
            it.epoch += 1
            assert (await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch, target=one.target))).accepted
        assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGKILL
        parked = here.folder / "state" / "parked"
        await until(lambda: not list(parked.iterdir()), what="its record is removed")
        assert await it.outcome(engine) == "gone"
        assert await it.outcome(running) == "active", "kubelet ends it, with its grace period"
