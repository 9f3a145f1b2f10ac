"""The worker with the real fake driver, real processes and a bus in memory."""

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kybernate.bus.node_socket import listening
from kybernate.bus.port import NoAnswerError
from kybernate.clock import within
from kybernate.messages import (
    AskJobs,
    JobProgress,
    JobReply,
    JobStatus,
    KillJob,
    ReleaseJob,
    SeatProgress,
    SwitchJob,
)
from services.checkpointer.backends.driver_calls import Timeouts
from services.checkpointer.helper_pool import HelperCall, sigkill
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record
from services.checkpointer.worker import Reporter
from tests.checkpointer.world import GIB, NODE, SPEED, Checkpointer, Kind, checkpointer, node
from tests.until import until


def steps(it: Checkpointer, op: str) -> list[str]:
    return [record.step or record.kind for record in it.journal.jobs[op].records]


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


async def slowly(it: Checkpointer, factor: float = 20.0) -> None:
    """Transfers take about half a second or more."""
    await it.node.inject("slow", factor=factor)


def parking(it: Checkpointer, op: str) -> bool:
    return op in it.journal.jobs and "checkpoint" in steps(it, op)


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
        assert status.activate is not None
        assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active"), status
        assert status.activate.last_call_at is not None
        assert status.park[0].last_call_at is not None
        assert status.journaled_at < status.park[0].last_call_at < status.activate.last_call_at
        assert set(status.activate.seconds) >= {"thaw", "restore", "unlock", "verify"}
        assert await here.state(first) == "RUNNING"
        assert [await it.outcome(engine) for engine in (first, second)] == ["active", "parked"]
        assert (await here.violations())["count"] == 0
        reported = [(s.park[0].outcome, s.activate and s.activate.outcome) for s in it.reports if s.op == status.op]
        assert reported == [("parked", "pending"), ("parked", "active"), ("parked", "active")]


async def test_a_seat_of_several_processes_and_gpus_is_parked_and_activated_as_one() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("2x.s00", gpus=(0, 1), gib=80, processes=3)
        status = await it.do(park=(engine.target,))
        assert status.park[0].outcome == "parked", status
        assert steps(it, status.op) == (
            [
                "switch",
                "half",
                "lock",
                "lock",
                "lock",
                "checkpoint",
                "checkpoint",
                "checkpoint",
                "freeze",
                "end",
                "done",
            ]
        )
        assert set((await here.used()).values()) == {0}
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert status.activate.outcome == "active", status
        assert await it.outcome(engine) == "active"
        assert (await here.violations())["count"] == 0


async def test_a_stale_epoch_is_refused_also_after_a_restart() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            await it.do(park=(engine.target,), epoch=50)
            reply = await it.ask(it.switch(activate=engine.target, epoch=49))
            assert (reply.accepted, reply.code, reply.highest_epoch) == (False, "stale-epoch", 50)
            kill = KillJob(cause="test", node=NODE, epoch=49, target=engine.target)
            assert (await it.ask(kill)).code == "stale-epoch"
            release = ReleaseJob(cause="test", node=NODE, epoch=60, target=engine.target)
            assert (await it.ask(release)).accepted
        async with checkpointer(here) as it:
            reply = await it.ask(it.switch(activate=engine.target, epoch=59))
            assert (reply.code, reply.highest_epoch) == ("stale-epoch", 60)
            status = await it.do(activate=engine.target, epoch=60)
            assert status.done


async def test_ask_jobs_with_an_epoch_fences_off_jobs_of_an_earlier_manager() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            await it.ask(AskJobs(cause="test", node=NODE, epoch=70, targets=(engine.target,)))
            assert (await it.ask(it.switch(park=(engine.target,), epoch=69))).code == "stale-epoch"
        async with checkpointer(here) as it:
            assert (await it.ask(it.switch(park=(engine.target,), epoch=69))).code == "stale-epoch"
            assert (await it.do(park=(engine.target,), epoch=71)).done


async def test_one_job_at_a_time_on_a_gpu_and_several_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = asyncio.Event(), Journal._record

    async def wait_at_the_freeze(self: Journal, job: JobFile, record: Record, **rest: Any) -> None:
        if record.step == "freeze":
            await go_on.wait()
        await write(self, job, record, **rest)

    monkeypatch.setattr(Journal, "_record", wait_at_the_freeze)
    async with node() as here, checkpointer(here) as it:
        first, other = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        op = await it.begin(park=(first.target,))
        reply = await it.ask(it.switch(activate=first.target))
        assert (reply.accepted, reply.code) == (False, "busy")
        second = await it.begin(park=(other.target,), group="G1")
        await until(lambda: parking(it, op) and parking(it, second), what="both under way")
        assert not any(status.done for status in it.reports)
        (seat,) = await it.look(first)
        assert seat.outcome == "started"
        go_on.set()
        assert [(await it.done(one)).park[0].outcome for one in (op, second)] == ["parked", "parked"]


async def test_the_same_op_again_is_the_same_job_also_after_a_restart() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            job = it.switch(park=(engine.target,))
            assert (await it.ask(job)).accepted
            assert (await it.ask(job)).accepted
            await it.done(job.op)
            await it.do(activate=engine.target)
            late = await it.ask(job)
            assert late.accepted
            assert late.jobs[0].done
            assert await it.outcome(engine) == "active"
        async with checkpointer(here) as it:
            reply = await it.ask(AskJobs(cause="test", node=NODE, epoch=0, ops=(job.op, "unheard-of")))
            assert [(one.op, one.done, one.park[0].outcome) for one in reply.jobs] == [(job.op, True, "parked")]
            assert (await it.ask(job)).jobs[0].done
            assert await it.outcome(engine) == "active"


async def test_work_that_does_not_end_leaves_the_seat_active_and_the_other_parked() -> None:
    async with node() as here, checkpointer(here, floor_wall_seconds=1.0) as it:
        other = await here.engine("s01")
        await it.do(park=(other.target,))
        engine = await here.engine("s00")
        await here.inject("busy", seconds=10_000)
        status = await it.do(park=(engine.target,), activate=other.target)
        assert status.activate is not None
        assert status.park[0].outcome == "active"
        assert "NOT_READY" in status.park[0].reason
        assert status.activate.outcome == "pending"
        assert status.activate.reason.startswith("not begun: the park before it ended active: ")
        assert [await it.outcome(one) for one in (engine, other)] == ["active", "parked"]
        assert (await here.violations())["count"] == 0


async def test_a_hang_costs_its_own_group_only_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of the call that hangs passes when the test says so, however slow the machine is."""
    floor, locks = 20.0, list[asyncio.Event]()

    @asynccontextmanager
    async def ours(seconds: float) -> AsyncIterator[None]:
        if seconds != Timeouts(speed=SPEED, floor_wall_seconds=floor).lock():
            async with within(seconds):
                yield
            return

        async def passes() -> None:
            await locks[-1].wait()
            limit.reschedule(0.0)

        locks.append(asyncio.Event())
        async with asyncio.timeout(None) as limit:
            passing = asyncio.create_task(passes())
            try:
                yield
            finally:
                passing.cancel()

    monkeypatch.setattr("services.checkpointer.helper_pool.within", ours)
    async with node() as here, checkpointer(here, floor_wall_seconds=floor) as it:
        stuck, other = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        await here.inject("hang", verb="lock", seat="s00")
        op = await it.begin(park=(stuck.target,))
        await until(lambda: locks, what="the lock is called")
        for _ in range(3):
            assert (await it.do(park=(other.target,), group="G1")).park[0].outcome == "parked"
            status = await it.do(activate=other.target, group="G1")
            assert status.activate is not None
            assert status.activate.outcome == "active"
        assert not any(one.op == op and one.done for one in it.reports), "it hung all the while"
        locks[0].set()
        status = await it.done(op)
        assert (status.park[0].outcome, await here.state(stuck)) == ("active", "RUNNING")
        assert "helper was killed" in status.park[0].reason
        assert (await it.do(park=(stuck.target,))).park[0].outcome == "parked", "a new helper does it"


async def test_a_second_hang_is_quarantine() -> None:
    async with (
        node() as here,
        checkpointer(
            here, floor_wall_seconds=0.5, base_seconds=10, seconds_per_gib=0, settle_floor_wall_seconds=2.0
        ) as it,
    ):
        engine = await here.engine("s00")
        await here.inject("hang", verb="checkpoint", times=9)
        status = await it.do(park=(engine.target,))
        assert status.park[0].outcome == "quarantined"
        assert (await here.used())[here.gpus[0]] == 40 * GIB


async def test_a_restore_that_runs_out_of_memory_kills_the_seat_and_proves_its_memory_free() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00", processes=2)
        await it.do(park=(engine.target,))
        await here.inject("oom")
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert status.activate.outcome == "lost", status
        assert "OUT_OF_MEMORY" in status.activate.reason
        assert (await here.used())[here.gpus[0]] == 0
        assert await engine.process.wait() == -signal.SIGKILL
        assert await it.outcome(engine) == "gone"
        assert (await here.violations())["count"] == 0


async def test_nothing_is_restored_without_room() -> None:
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00")
        await it.do(park=(engine.target,))
        await here.engine("stranger", gib=60)
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert status.activate.outcome == "parked"
        assert "free" in status.activate.reason
        assert "killed" not in status.activate.reason, "no call is made about a frozen process"
        assert here.frozen(engine)
        assert await it.outcome(engine) == "parked"
        assert "restore" not in "".join((await here.violations())["by_kind"])


async def test_a_job_goes_on_while_the_bus_is_down_and_is_reported_after() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await slowly(it)
        op = await it.begin(park=(engine.target,))
        here.server.stop()
        await until(lambda: not it.worker.running, what="the job ended without a bus")
        assert not any(one.done for one in it.reports)
        here.server.start()
        assert (await it.done(op)).park[0].outcome == "parked"


async def test_a_released_parked_seat_is_killed_though_a_sigterm_waits_in_it() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await it.do(park=(engine.target,))
        engine.process.terminate()
        assert here.frozen(engine)
        reply = await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch + 1, target=engine.target))
        assert reply.accepted
        assert await asyncio.wait_for(engine.process.wait(), 10) == -signal.SIGKILL
        assert await it.outcome(engine) == "gone"
        parked = here.folder / "state" / "parked"
        await until(lambda: not list(parked.iterdir()), what="the release removes the record of the parked processes")


async def test_a_release_in_the_middle_of_a_park_waits_for_its_end() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await slowly(it)
        op = await it.begin(park=(engine.target,))
        await until(lambda: parking(it, op), what="it parks")
        engine.process.terminate()
        assert (await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch, target=engine.target))).accepted
        assert (await it.done(op)).park[0].outcome == "gone"
        await until(lambda: not it.journal.parked, what="forgotten")
        assert await engine.process.wait() == -signal.SIGTERM


async def test_a_kill_ends_a_seat_in_any_state_and_proves_its_memory_free() -> None:
    async with node() as here, checkpointer(here) as it:
        runs, parked = await here.engine("s00", gib=10, processes=2), await here.engine("s01", gpus=(1,))
        await it.do(park=(parked.target,), group="G1")
        for engine in (runs, parked):
            it.epoch += 1
            job = KillJob(cause="test", node=NODE, epoch=it.epoch, target=engine.target)
            assert (await it.ask(job)).accepted
            status = await it.done(f"kill-{engine.target.seat}-{it.epoch}")
            assert status.park[0].outcome == "gone", status
            assert await engine.process.wait() == -signal.SIGKILL
            assert await it.outcome(engine) == "gone"
            assert (await it.ask(job)).accepted, "again is the same"
        assert set((await here.used()).values()) == {0}


async def test_engines_that_die_are_gone_whenever_it_happens() -> None:
    async with node() as here, checkpointer(here) as it:
        parked, parking_one = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        await it.do(park=(parked.target,))
        await parked.end()
        assert await it.outcome(parked) == "gone"
        status = await it.do(activate=parked.target)
        assert status.activate is not None
        assert status.activate.outcome == "gone"
        await here.inject("die-mid-checkpoint", seat="t00")
        status = await it.do(park=(parking_one.target,), group="G1")
        assert status.park[0].outcome == "gone", status
        status = await it.do(park=(parking_one.target,), activate=parked.target, group="G1")
        assert status.park[0].outcome == "gone"
        assert set((await here.used()).values()) == {0}


async def test_all_seats_of_a_job_are_parked_before_the_incoming_seat_is_activated() -> None:
    async with node() as here, checkpointer(here, floor_wall_seconds=1.0) as it:
        big = await here.engine("2x.s00", gpus=(0, 1), gib=100)
        await it.do(park=(big.target,), group="G2")
        one, two = await here.engine("s00"), await here.engine("t00", gpus=(1,))
        status = await it.do(park=(one.target, two.target), activate=big.target, group="G2")
        assert status.activate is not None
        assert [seat.outcome for seat in (*status.park, status.activate)] == ["parked", "parked", "active"]
        await it.do(park=(big.target,), group="G2")
        await it.do(activate=one.target)
        await it.do(activate=two.target, group="G1")
        await here.inject("hang", verb="lock", seat="t00")
        status = await it.do(park=(one.target, two.target), activate=big.target, group="G2")
        assert status.activate is not None
        assert [seat.outcome for seat in (*status.park, status.activate)] == ["parked", "active", "pending"]
        assert await it.outcome(big) == "parked"
        assert (await here.violations())["count"] == 0


async def test_a_helper_killed_in_a_transfer_does_not_stop_it() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        await slowly(it)
        for half in ("park", "activate"):
            it.reports.clear()
            target = engine.target
            op = await (it.begin(park=(target,)) if half == "park" else it.begin(activate=target))
            verb = "checkpoint" if half == "park" else "restore"
            await until(lambda op=op, verb=verb: verb in steps(it, op), what=verb)  # type: ignore[misc]
            helper = it.pool._lines["G0"].helper
            assert helper is not None
            sigkill(helper.who)
            status = await it.done(op)
            seat = status.park[0] if half == "park" else status.activate
            assert seat is not None
            assert seat.outcome == ("parked" if half == "park" else "active")
            assert "helper ended" in seat.reason
        assert (await here.violations())["count"] == 0


async def test_refusals_say_what_to_do() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00")
        odd = engine.target.model_copy(update={"backend": "magic"})
        reply = await it.ask(it.switch(park=(odd,)))
        assert (reply.code, "magic" in reply.reason) == ("unsupported", True)
        assert (await it.ask(it.switch())).code == "empty"
        job = it.switch(park=(engine.target,)).model_copy(update={"node": "elsewhere"})
        with pytest.raises(NoAnswerError):
            await it.bus.request(job, JobReply, timeout=1)


async def test_files_damaged_by_a_kill_are_set_aside(tmp_path: Path) -> None:
    """A torn line, an unreadable file: logged and set aside, never fatal."""
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            op = (await it.do(park=(engine.target,))).op
        state = here.folder / "state"
        (file,) = (state / "journal").glob("*.jsonl")
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
        (state / "journal" / "00000000000000000009-x.jsonl").write_text("no json\n")
        (state / "epochs.json").write_text("{")
        async with checkpointer(here) as it:
            assert (await it.done(op)).park[0].outcome == "parked"
            reply = await it.ask(AskJobs(cause="test", node=NODE, epoch=0, ops=(op,)))
            assert reply.jobs[0].done
            assert await it.outcome(engine) == "parked"
        assert len(list((state / "journal").glob("*.unreadable-*"))) == 1


async def test_a_release_of_a_gone_container_keeps_the_record_of_its_successor() -> None:
    async with node() as here, checkpointer(here) as it:
        before, engine = await here.engine("s00", gib=1), await here.engine("s00")
        await before.end()
        await it.do(park=(engine.target,))
        late = before.target.model_copy(update={"pod_uid": "uid-before"})
        assert (await it.ask(ReleaseJob(cause="test", node=NODE, epoch=it.epoch, target=late))).accepted
        await until(lambda: not it.worker._tasks, what="released")
        assert here.frozen(engine)
        assert list(it.journal.parked) == ["s00"]
        status = await it.do(activate=engine.target)
        assert status.activate is not None
        assert (status.activate.outcome, status.activate.vram_bytes) == ("active", 40 * GIB)


async def test_a_parked_seat_can_be_parked_again_while_other_memory_is_in_use() -> None:
    """Memory of the driver itself or of an unlisted process need not fall a second time."""
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00", gib=10)
        assert (await it.do(park=(engine.target,))).park[0].outcome == "parked"
        make = it.pool.calls

        async def more(key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
            replies = await make(key, calls)
            for reply in replies:
                for gpu in reply.get("memory", ()):
                    reply["memory"][gpu][0] += 20 * GIB
            return replies

        it.pool.calls = more  # type: ignore[method-assign]
        op = await it.begin(park=(engine.target,))
        end = (await it.done(op)).park[0]
        assert (end.outcome, end.reason) == ("parked", "")
        assert "thaw" not in steps(it, op)


async def test_a_driver_that_does_not_answer_leaves_a_parked_seat_frozen() -> None:
    async with node() as here, checkpointer(here, settle_floor_wall_seconds=0.3) as it:
        engine = await here.engine("s00")
        await it.do(park=(engine.target,))
        make = it.pool.calls

        async def silent(_: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
            return [{"code": -1, "name": "UNREACHABLE", "text": "the GPU driver does not answer"} for _ in calls]

        it.pool.calls = silent  # type: ignore[method-assign]
        op = await it.begin(activate=engine.target)
        end = (await it.done(op)).activate
        assert end is not None
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
            assert (await it.do(park=(parked.target,))).park[0].outcome == "parked"
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
            assert status.activate is not None
            assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active"), status
            assert (await here.used())[here.gpus[0]] == 40 * GIB
            assert (await here.violations())["count"] == 0


async def test_a_seat_parked_elsewhere_is_restored_with_a_map_although_its_record_is_lost() -> None:
    async with node() as here:
        engine = await here.engine("s00")
        async with checkpointer(here) as it:
            await it.do(park=(engine.target,))
        shutil.rmtree(here.folder / "state" / "parked")
        there = engine.target.model_copy(update={"gpus": (here.gpus[1],), "parked_on": (here.gpus[0],)})
        async with checkpointer(here) as it:
            status = await it.do(activate=there, group="G1")
            assert status.activate is not None
            assert (status.activate.outcome, status.activate.gpus) == ("active", (here.gpus[1],))
            assert await here.used() == {here.gpus[0]: 0, here.gpus[1]: 40 * GIB}


async def test_a_seat_of_a_backend_that_the_node_lacks_is_gone_once_its_container_has_ended() -> None:
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00", backend="sleep")
        (seat,) = await it.look(engine)
        assert (seat.outcome, "'sleep'" in seat.reason) == ("quarantined", True)
        await engine.end()
        assert await it.outcome(engine) == "gone"


async def test_a_seat_of_a_backend_that_the_node_lacks_is_killed() -> None:
    """The kill was refused, never sent again, and the seat waited for ever for the end of its engine."""
    async with node() as here, checkpointer(here) as it:
        engine = await here.engine("s00", backend="acme")
        reply = await it.ask(KillJob(cause="test", node=NODE, epoch=1, target=engine.target))
        assert reply.accepted, reply.reason
        status = await it.done(f"kill-{engine.target.seat}-1")
        assert [progress.outcome for progress in status.park] == ["gone"]


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
