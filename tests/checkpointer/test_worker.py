"""The worker with the real fake driver, real processes and a bus in memory."""

import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kybernate.bus.node_socket import listening
from kybernate.messages import JobProgress, JobStatus, ReleaseJob, SeatProgress, SwitchJob
from services.checkpointer.helper_pool import HelperCall
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record
from services.checkpointer.worker import Reporter
from tests.checkpointer.test_hazards import activate, kill, park, steps
from tests.checkpointer.world import GIB, NODE, Kind, checkpointer, node
from tests.until import until


async def test_a_report_is_sent_in_the_turn_that_makes_it_and_the_last_of_each_job_follows_an_outage(
    tmp_path: Path,
) -> None:
    def sent(manager: socket.socket) -> list[tuple[str, int]]:
        bodies = [line.split(b" ", 2)[2] for line in manager.recv(1 << 16, socket.MSG_DONTWAIT).splitlines()]
        statuses = [JobProgress.model_validate_json(body).status for body in bodies]
        return [(status.op, len(status.park)) for status in statuses]

    def report(op: str, park: int) -> None:
        seats = (SeatProgress(seat="s", pod_uid="p", container_id="c", outcome="parked"),) * park
        reporter.report(JobStatus(op=op, epoch=1, group="g", park=seats), "test")

    async with listening(tmp_path / "bus") as bus:
        reporter = Reporter(bus, NODE)
        with socket.socket(socket.AF_UNIX) as manager:
            manager.connect(str(tmp_path / "bus"))
            await until(lambda: bus.connected, what="the manager is connected")
            report("a", 1)
            report("b", 1)
            assert sent(manager) == [("a", 1), ("b", 1)], "no other turn of the loop"
        await until(lambda: not bus.connected, what="the manager is gone")
        for park in (2, 3):
            report("a", park)
        with socket.socket(socket.AF_UNIX) as manager:
            manager.connect(str(tmp_path / "bus"))
            await until(lambda: bus.connected, what="the next manager is connected")
            report("b", 2)
            assert sent(manager) == [("b", 1), ("a", 3), ("b", 2)]


async def test_a_switch_parks_one_seat_and_activates_the_other() -> None:
    async with node() as here, checkpointer(here) as it:
        first = await here.engine("s00")
        parked = await it.do(park=(first.target,))
        assert parked.park[0].outcome == "parked", parked
        assert parked.park[0].vram_bytes == 40 * GIB
        assert here.frozen(first)
        assert (await here.used())[here.gpus[0]] == 0
        second = await here.engine("s01", gib=60)
        status = await it.do(park=(second.target,), activate=first.target)
        assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active"), status
        assert status.journaled_at < status.park[0].last_call_at < status.activate.last_call_at
        assert set(status.activate.seconds) >= {"thaw", "restore", "unlock", "verify"}
        assert await here.state(first) == "RUNNING"
        assert [await it.outcome(engine) for engine in (first, second)] == ["active", "parked"]
        assert (await here.violations())["count"] == 0
        reported = [(s.park[0].outcome, s.activate and s.activate.outcome) for s in it.reports if s.op == status.op]
        assert reported == [("parked", "pending"), ("parked", "active"), ("parked", "active")]


async def test_work_that_does_not_end_leaves_the_seat_active() -> None:
    async with node() as here, checkpointer(here, floor_wall_seconds=1.0) as it:
        engine = await here.engine("s00")
        await here.inject("busy", seconds=10_000)
        end = await park(it, engine)
        assert (end.outcome, "NOT_READY" in end.reason) == ("active", True), end
        assert await it.outcome(engine) == "active"


async def test_a_release_in_the_middle_of_a_park_waits_for_its_end() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await here.inject("slow", factor=20.0)
        op = await it.begin(park=(engine.target,))
        await until(lambda: "checkpoint" in steps(it), what="it parks")
        engine.process.terminate()
        assert (await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch, target=engine.target))).accepted
        assert (await it.done(op)).park[0].outcome == "gone"
        await until(lambda: not it.journal.parked, what="forgotten")
        assert await engine.process.wait() == -signal.SIGTERM


async def test_a_kill_ends_a_seat_in_any_state_and_proves_its_memory_free() -> None:
    async with node() as here, checkpointer(here) as it:
        runs, parked = await here.engine("s00", gib=10, processes=2), await here.engine("s01", gpus=(1,))
        restarts = await here.engine("s02", gib=10, backend="restart")
        await park(it, parked, "G1")
        for engine in (runs, parked, restarts):
            assert (await kill(it, engine)).outcome == "gone"
            assert await engine.process.wait() == -signal.SIGKILL
            assert await it.outcome(engine) == "gone"
        assert set((await here.used()).values()) == {0}


async def test_engines_that_die_are_gone_whenever_it_happens() -> None:
    async with node() as here, checkpointer(here) as it:
        parked, parking_one = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        await park(it, parked)
        await parked.end()
        assert await it.outcome(parked) == "gone"
        assert (await activate(it, parked)).outcome == "gone"
        await here.inject("die-mid-checkpoint", seat="t00")
        for _ in range(2):
            assert (await park(it, parking_one, "G1")).outcome == "gone"
        assert set((await here.used()).values()) == {0}


async def test_all_seats_of_a_job_are_parked_before_the_incoming_seat_is_activated() -> None:
    async with node() as here, checkpointer(here, floor_wall_seconds=1.0) as it:
        big = await here.engine("2x.s00", gpus=(0, 1), gib=100)
        await park(it, big, "G2")
        one, two = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        status = await it.do(park=(one.target, two.target), activate=big.target, group="G2")
        assert [seat.outcome for seat in (*status.park, status.activate)] == ["parked", "parked", "active"]
        await park(it, big, "G2")
        await activate(it, one)
        await activate(it, two)
        await here.inject("hang", verb="lock", seat="t00")
        status = await it.do(park=(one.target, two.target), activate=big.target, group="G2")
        assert [seat.outcome for seat in (*status.park, status.activate)] == ["parked", "active", "pending"]
        assert await it.outcome(big) == "parked"
        assert (await here.violations())["count"] == 0


async def test_a_release_of_a_gone_container_keeps_the_record_of_its_successor() -> None:
    async with node() as here, checkpointer(here) as it:
        before, engine = await here.engine("s00", gib=1), await here.engine("s00")
        await before.end()
        await park(it, engine)
        late = before.target.model_copy(update={"pod_uid": "uid-before"})
        assert (await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch, target=late))).accepted
        await until(lambda: not it.worker._tasks, what="released")
        assert here.frozen(engine)
        assert list(it.journal.parked) == ["s00"]
        end = await activate(it, engine)
        assert (end.outcome, end.vram_bytes) == ("active", 40 * GIB)


async def test_a_driver_that_does_not_answer_leaves_a_parked_seat_frozen() -> None:
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00")
        await park(it, engine)
        make = it.pool.calls

        async def silent(_: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
            return [{"code": -1, "name": "UNREACHABLE", "text": "the GPU driver does not answer"} for _ in calls]

        it.pool.calls = silent  # type: ignore[method-assign]
        end = await activate(it, engine)
        assert end.outcome == "quarantined"
        assert end.reason == (
            "the GPU driver does not answer; given up after 4 calls: see the checkpointer's log and nvidia-smi"
        )
        assert here.frozen(engine)
        it.pool.calls = make  # type: ignore[method-assign]
        assert await it.outcome(engine) == "parked"


@pytest.mark.parametrize("kind", ["fake", "ctypes"])
async def test_a_checkpointer_that_lost_its_state_folder_learns_its_parked_seats_again(kind: Kind) -> None:
    async with node(kind) as here:
        parked, other = await here.engine("s00", processes=1), await here.engine("t00", gib=30, gpus=(1,))
        async with checkpointer(here) as it:
            assert (await park(it, parked)).outcome == "parked"
            active = await here.engine("s01")
        shutil.rmtree(here.folder / "state")
        epoch = it.epoch
        async with checkpointer(here) as it:
            it.epoch = epoch
            seats = await it.look(parked, active, other)
            assert [(seat.outcome, seat.reason) for seat in seats] == [("parked", ""), ("active", ""), ("active", "")]
            assert seats[0].gpus == (), "only the manager may know where it was parked"
            assert here.frozen(parked)
            status = await it.do(park=(active.target,), activate=parked.target)
            assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active"), status
            assert (await here.used())[here.gpus[0]] == 40 * GIB
            assert (await here.violations())["count"] == 0


async def test_a_seat_parked_elsewhere_is_restored_with_a_map_although_its_record_is_lost() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            await park(it, engine)
        shutil.rmtree(here.folder / "state" / "parked")
        engine.target = engine.target.model_copy(update={"parked_on": (here.gpus[0],)})
        async with checkpointer(here) as it:
            end = await activate(it, engine, here.gpus[1:])
            assert (end.outcome, end.gpus) == ("active", here.gpus[1:])
            assert await here.used() == {here.gpus[0]: 0, here.gpus[1]: 40 * GIB}


async def test_a_seat_of_a_backend_that_the_node_lacks_is_killed_and_then_gone() -> None:
    """The kill was refused, never sent again, and the seat waited for ever for the end of its engine."""
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00", backend="acme")
        (seat,) = await it.look(engine)
        assert (seat.outcome, "'acme'" in seat.reason) == ("quarantined", True)
        assert (await kill(it, engine)).outcome == "gone"
        assert await it.outcome(engine) == "gone"


async def test_a_replay_with_a_backend_that_the_node_lacks_now_leaves_the_seat_active() -> None:
    """The package that registered it was uninstalled while its job was under way."""
    async with node() as here:
        engine = await here.engine("s00", backend="acme")
        journal = Journal(here.folder / "state")
        journal.load()
        job = SwitchJob(cause="test", node=NODE, epoch=1, op="op-1", group="G0", park=(engine.target,))
        await journal.begin(JobFile([Record(kind="switch", switch=job)]))
        journal.close()
        async with checkpointer(here) as it:
            (park,) = (await it.done("op-1")).park
            assert park.outcome == "active"
            refused = await it.ask(it.switch(park=(engine.target,)))
            known = "cuda, fake, restart, sglang, unload, vllm, vllm-2"
            reason = f"this node has no backend 'acme'; it has {known}"
            assert (refused.accepted, refused.code, refused.reason) == (False, "unsupported", reason)
