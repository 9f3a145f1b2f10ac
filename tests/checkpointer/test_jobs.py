"""Jobs in the journal: what is refused, what is on disk before what, what a restart repeats. A backend in memory."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kybernate.dev.memory_bus import MemoryBus, MemoryServer
from kybernate.messages import AskJobs, JobStatus, KillJob, Outcome, ReleaseJob, SeatProgress, SeatTarget, SwitchJob
from services.checkpointer.backends.port import Ending, NoMemberError, NoProcessError, Note, SeatProcesses
from services.checkpointer.core.answers import ModelAnswer
from services.checkpointer.core.failures import SPENT, JobGoal, StepFailedError
from services.checkpointer.job_run import JobRun
from services.checkpointer.journal import Journal
from services.checkpointer.records import JobFile, Record, read_records
from services.checkpointer.worker import CheckpointWorker
from tests.until import until

A, B = "GPU-a", "GPU-b"


def target(seat: str, gpu: str = A, container: str = "process://1") -> SeatTarget:
    return SeatTarget(seat=seat, pod_uid=f"uid-{seat}", container_id=container, gpus=(gpu,), backend="memory")


def switch(epoch: int, park: str = "", activate: str = "", *, gpu: str = A, at: SeatTarget | None = None) -> SwitchJob:
    """Park one seat and activate the other."""
    parked = (at or target(park, gpu),) if park or at else ()
    incoming = target(activate, gpu) if activate else None
    return SwitchJob(cause="c", node="n1", epoch=epoch, op=f"op-{epoch}", group="G0", park=parked, activate=incoming)


@dataclass
class MemoryBackend:
    """Seats without processes. ``held``: halves that wait, by "verb seat"; ``outcomes``: how halves end."""

    done: list[str] = field(default_factory=list)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    unknown: Exception | None = None
    """Why no process of a seat is found."""
    keeps_processes: bool = True
    keeps_bytes: int = 0
    """Measured at a park; 0: what is on record."""
    weighs: int | None = None
    """Host memory of the container."""

    def hold(self, what: str) -> asyncio.Event:
        self.held[what] = asyncio.Event()
        return self.held[what]

    async def probe(self) -> str | None:
        return None

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        self.done.append(f"discover {target.seat}")
        if self.unknown is not None:
            raise self.unknown
        return self.container(target, group, epoch)

    def container(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        return SeatProcesses(target=target, group=group, epoch=epoch, root=None, members=())

    async def prepare(self, seat: SeatProcesses) -> SeatProcesses:
        return seat

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        return await self._half("park", seat, note, "parked")

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        return await self._half("activate", seat, note, "active")

    async def replay(self, seat: SeatProcesses, intent: JobGoal, note: Note) -> Ending:
        return await self._half(f"replay-{intent}", seat, note, "parked" if intent is JobGoal.PARKED else "active")

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        return await self._half("kill", seat, note, "gone")

    async def state(self, seat: SeatProcesses) -> Ending:
        return Ending("active")

    def host_bytes(self, seat: SeatProcesses) -> int | None:
        return self.weighs

    def ends_released(self) -> bool:
        return False

    def keeps(self, _: SeatTarget) -> bool:
        return False

    async def thaw(self, seat: SeatProcesses) -> None:
        self.done.append(f"thaw {seat.target.seat}")

    async def _half(self, verb: str, seat: SeatProcesses, note: Note, outcome: Outcome) -> Ending:
        what = f"{verb} {seat.target.seat}"
        self.done.append(what)
        await note("lock", None)
        if what in self.held:
            await self.held[what].wait()
        kept = self.keeps_bytes or seat.residue_bytes
        return Ending(self.outcomes.get(what, outcome), vram_bytes=7, residue_bytes=kept)


@dataclass
class DiskBackend(MemoryBackend):
    """A disk tier: a parked seat is an image in a folder, and has no process."""

    images: Path = Path()
    living: set[str] = field(default_factory=set)

    async def discover(self, target: SeatTarget, group: str, epoch: int) -> SeatProcesses:
        if target.seat not in self.living:
            raise NoProcessError(f"{target.seat} has no process")
        return await super().discover(target, group, epoch)

    async def park(self, seat: SeatProcesses, note: Note) -> Ending:
        (self.images / seat.target.seat).touch()
        self.living.remove(seat.target.seat)
        return await super().park(seat, note)

    async def activate(self, seat: SeatProcesses, note: Note) -> Ending:
        (self.images / seat.target.seat).unlink()
        self.living.add(seat.target.seat)
        return await super().activate(seat, note)

    async def kill(self, seat: SeatProcesses, note: Note) -> Ending:
        (self.images / seat.target.seat).unlink(missing_ok=True)
        self.living.discard(seat.target.seat)
        return await super().kill(seat, note)

    async def state(self, seat: SeatProcesses) -> Ending:
        return Ending("active" if seat.target.seat in self.living else "parked")


@dataclass
class MemoryCheck:
    """Engines without a process: ``wrong`` is why they must not serve."""

    wrong_because: str = ""
    unanswered: str = ""
    health: int | None = None
    asked: list[str] = field(default_factory=list)

    async def recorded(self, seat: SeatProcesses, *, patient: bool = False) -> SeatProcesses:
        self.asked.append(f"record {seat.target.seat}")
        answers = (ModelAnswer(model="m", kind="text", tokens=("one",)),)
        unanswered = "" if patient else self.unanswered
        return seat.model_copy(update={"answers": answers, "unanswered": unanswered, "health": self.health})

    async def wrong(self, seat: SeatProcesses) -> str:
        self.asked.append(f"compare {seat.target.seat} with {len(seat.answers)}")
        return self.wrong_because


class NoHelpers:
    """No driver is called."""

    async def warm(self, key: str) -> None:
        pass

    async def close(self, key: str) -> None:
        pass


@dataclass
class Stand:
    worker: CheckpointWorker
    backend: MemoryBackend
    journal: Journal
    task: "asyncio.Task[None]"

    async def done(self, op: str) -> JobStatus:
        """The final status of a job."""
        await until(lambda: (job := self.journal.jobs.get(op)) is not None and job.done, what=f"{op} is done")
        return self.journal.jobs[op].status

    async def do(self, job: SwitchJob) -> JobStatus:
        """A switch from beginning to end."""
        await self.worker.switch(job)
        return await self.done(job.op)

    async def activate(self, epoch: int, seat: str) -> SeatProgress:
        """An activation from beginning to end."""
        return (await self.do(switch(epoch, activate=seat))).activate

    async def look(self, seat: str) -> SeatProgress:
        """Its state."""
        (seen,) = (await self.worker.ask(AskJobs(cause="c", node="n1", epoch=0, targets=(target(seat),)))).seats
        return seen

    async def begun(self, what: str) -> None:
        await until(lambda: what in self.backend.done, what=f"{what} has begun", saw=lambda: self.backend.done)


@asynccontextmanager
async def running(
    folder: Path, backend: MemoryBackend | None = None, check: MemoryCheck | None = None
) -> AsyncIterator[Stand]:
    """A checkpointer with this state folder."""
    journal, backend = Journal(folder), backend or MemoryBackend()
    journal.load()
    async with MemoryBus.connect(MemoryServer()) as bus:
        helpers, backends = NoHelpers(), {"memory": backend}
        worker = CheckpointWorker("n1", bus, journal, helpers, backends, check or MemoryCheck())  # type: ignore[arg-type]
        task = asyncio.create_task(worker.serve())
        await asyncio.sleep(0)
        try:
            yield Stand(worker, backend, journal, task)
        finally:
            await asyncio.sleep(0)  # a task that is cancelled before its first step warns
            for job in list(worker._tasks):  # a crash: no time to finish
                job.cancel()
            task.cancel()
            await asyncio.wait([task])
            journal.close()


async def test_epochs_below_the_highest_seen_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        assert (await stand.worker.ask(AskJobs(cause="c", node="n1", epoch=100, gpus=(A,)))).accepted
        for late in (50, 100):
            reply = await stand.worker.ask(AskJobs(cause="c", node="n1", epoch=late, gpus=(A,)))
            assert (reply.accepted, reply.code, reply.highest_epoch) == (False, "stale-epoch", 100), "it fences nothing"
        assert (await stand.worker.switch(switch(99, "v"))).code == "stale-epoch"
        kill = KillJob(cause="c", node="n1", epoch=99, target=target("v"))
        assert (await stand.worker.kill(kill)).code == "stale-epoch"
        assert (await stand.worker.switch(switch(99, "w", gpu=B))).accepted, "its GPU was not asked about"
        named = AskJobs(cause="c", node="n1", epoch=101, targets=(target("v"),))
        assert (await stand.worker.ask(named)).accepted
        assert (await stand.worker.switch(switch(100, "v"))).code == "stale-epoch", "those of its seats, too"
        assert (await stand.worker.release(ReleaseJob(cause="c", node="n1", epoch=101, target=target("v")))).accepted
    async with running(tmp_path) as again:
        reply = await again.worker.switch(switch(100, "v").model_copy(update={"op": "late"}))
        assert (reply.code, reply.highest_epoch) == ("stale-epoch", 101)
        assert "park v" not in again.backend.done
        assert (await again.worker.switch(switch(101, "v"))).accepted


async def test_a_job_that_goes_on_does_not_lower_the_fence(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        stand.backend.hold("park v")
        await stand.worker.switch(switch(5, "v"))
        await stand.begun("park v")
        await stand.worker.ask(AskJobs(cause="c", node="n1", epoch=100, gpus=(A,)))
        stand.backend.held["park v"].set()
        await stand.done("op-5")

        assert (await stand.worker.switch(switch(99, "v"))).code == "stale-epoch"
    async with running(tmp_path) as again:
        assert (await again.worker.switch(switch(99, "v"))).code == "stale-epoch", "its file is read after the fence's"


async def test_a_fence_and_the_first_job_are_on_disk_with_their_names_when_they_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))
    )
    async with running(tmp_path) as stand:
        await stand.worker.ask(AskJobs(cause="c", node="n1", epoch=4, gpus=(A,)))
        assert [name.startswith(".epochs.json") or name for name in synced] == [True, tmp_path.name]
        synced.clear()

        await stand.worker.switch(switch(5, "v"))

        assert synced == ["00000000000000000005-op-5.jsonl", "journal"]


async def test_a_job_is_accepted_when_it_survives_a_kill_and_has_an_outcome_when_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, disk, fdatasync = tmp_path / "journal" / "next", threading.Event(), os.fdatasync

    def slow(handle: int) -> None:
        disk.wait(15)
        fdatasync(handle)

    async with running(tmp_path) as stand:
        await stand.do(switch(5, "v"))
        await until(made.exists, what="the next job's file is made")
        monkeypatch.setattr(os, "fdatasync", slow)

        assert (await stand.worker.switch(switch(6, "w"))).accepted

        path = tmp_path / "journal" / "00000000000000000006-op-6.jsonl"
        assert read_records(path.read_text()).op == "op-6", "a kill loses nothing, though the disk is slow"
        assert not made.exists()
        await until(lambda: "discover w" in stand.backend.done, what="the job goes on beside the disk")
        await asyncio.sleep(0.05)
        written = [record.kind for record in stand.journal.jobs["op-6"].records]
        disk.set()
        assert written == ["switch"]
        await stand.done("op-6")
    path.rename(made)  # a crash of the machine undid the renaming

    async with running(tmp_path) as again:
        assert set(again.journal.jobs) == {"op-5", "op-6"}
        assert again.journal.highest_epoch == 6


async def test_a_disk_that_hangs_is_named_until_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = threading.Event()
    monkeypatch.setattr("services.checkpointer.journal.STALLED_SECONDS", 0.1)
    async with running(tmp_path) as stand:
        assert stand.journal.stalled() is None
        monkeypatch.setattr(os, "fdatasync", lambda _: disk.wait(60))
        assert (await stand.worker.switch(switch(5, "v"))).accepted
        await until(lambda: "waits for its disk" in (stand.journal.stalled() or ""), what="the disk is named")
        disk.set()
        await stand.done("op-5")
        await until(lambda: stand.journal.waiting_seconds == 0.0, what="the last record is on disk")
        assert stand.journal.stalled() is None


async def test_one_job_at_a_time_on_a_gpu_and_with_a_seat(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        stand.backend.hold("park v")
        assert (await stand.worker.switch(switch(5, "v", "w"))).accepted
        await stand.begun("park v")

        same_gpu = await stand.worker.switch(switch(6, "x", "y"))
        same_seat = await stand.worker.switch(switch(7, "w", gpu=B))

        assert (same_gpu.code, same_seat.code) == ("busy", "busy")
        assert (await stand.look("v")).outcome == "started"
        assert (await stand.do(switch(7, "z", gpu=B))).park[0].outcome == "parked", "it delays no other GPU"
        stand.backend.held["park v"].set()
        await stand.done("op-5")
        assert (await stand.worker.switch(switch(8, "x", "y"))).accepted


async def test_the_same_op_again_is_the_same_job_also_after_a_restart(tmp_path: Path) -> None:
    job = switch(5, "v")
    async with running(tmp_path) as stand:
        assert (await stand.worker.switch(job)).accepted
        await stand.do(job)
        await until(lambda: not stand.worker.running, what="its end is on disk")
        assert (await stand.worker.switch(job)).jobs[0].done
        assert stand.backend.done == ["discover v", "park v"]
    async with running(tmp_path) as again:
        reply = await again.worker.ask(AskJobs(cause="c", node="n1", epoch=0, ops=("op-5", "unheard-of")))
        assert [(one.op, one.done, one.park[0].outcome) for one in reply.jobs] == [("op-5", True, "parked")]
        assert (await again.worker.switch(job)).jobs[0].done
        assert again.backend.done == []


async def test_a_switch_that_names_no_seat_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        assert (await stand.worker.switch(switch(5))).code == "empty"


async def test_a_kill_begins_when_the_job_that_has_the_seat_is_done(tmp_path: Path) -> None:
    job = KillJob(cause="c", node="n1", epoch=6, target=target("v"))
    async with running(tmp_path) as stand:
        stand.backend.hold("park v")
        await stand.worker.switch(switch(5, "v"))
        await stand.begun("park v")
        assert (await stand.worker.kill(job)).accepted
        for epoch in range(6, 12):  # the journal writes in order: records of the kill would be among these
            await stand.journal.fence((B,), epoch)
            await asyncio.sleep(0.01)  # a write that is quick lets no other task run
        assert "kill v" not in stand.backend.done

        stand.backend.held["park v"].set()
        await stand.begun("kill v")

        assert stand.journal.jobs["op-5"].done
        await stand.done("kill-v-6")
        assert (await stand.worker.kill(job)).jobs[0].done, "again is the same"


async def test_a_release_that_is_asked_for_again_is_done_once(tmp_path: Path) -> None:
    """The manager repeats what was not answered in time: a busy checkpointer must not get busier by it."""

    def release(epoch: int) -> ReleaseJob:
        return ReleaseJob(cause="c", node="n1", epoch=epoch, target=target("v"))

    async with running(tmp_path) as stand:
        stand.journal.remember(stand.backend.container(target("v"), "G0", 5))
        held = stand.backend.hold("kill v")
        assert (await stand.worker.release(release(6))).accepted
        await stand.begun("kill v")
        fenced = (tmp_path / "epochs.json").stat().st_ino

        assert (await stand.worker.release(release(6))).accepted
        assert (await stand.worker.release(release(7))).accepted
        held.set()
        await until(lambda: "v" not in stand.journal.parked, what="the seat is forgotten")
        assert (await stand.worker.release(release(6))).accepted
        await stand.do(switch(8, "x"))

        assert [done for done in stand.backend.done if done.endswith(" v")] == ["kill v"]
        assert (tmp_path / "epochs.json").stat().st_ino == fenced


async def test_a_release_that_did_not_end_the_processes_is_done_again(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        stand.journal.remember(stand.backend.container(target("v"), "G0", 5))
        stand.backend.outcomes["kill v"] = "quarantined"
        job = ReleaseJob(cause="c", node="n1", epoch=6, target=target("v"))
        await stand.worker.release(job)
        await stand.begun("kill v")
        stand.backend.outcomes.clear()
        stand.backend.done.clear()

        async def again() -> bool:
            await stand.worker.release(job)
            return "kill v" in stand.backend.done

        await until(again, what="the kill is tried again")


async def test_nothing_is_touched_by_a_job_that_the_journal_could_not_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(_: JobFile) -> None:
        raise OSError(28, "No space left on device")

    async with running(tmp_path) as stand:
        monkeypatch.setattr(stand.journal, "begin", full)
        with pytest.raises(OSError, match="No space"):
            await stand.worker.switch(switch(5, "v"))
        with pytest.raises(OSError, match="No space"):
            await stand.task

        assert stand.backend.done == []


@pytest.mark.parametrize("outcome", ["active", "quarantined"])
async def test_the_second_half_is_not_begun_while_the_victim_serves(tmp_path: Path, outcome: Outcome) -> None:
    async with running(tmp_path) as stand:
        stand.backend.outcomes["park v"] = outcome
        status = await stand.do(switch(5, "v", "w"))

        assert (status.park[0].outcome, status.activate.outcome) == (outcome, "pending")
        assert status.activate.reason.startswith(f"not begun: the park before it ended {outcome}: ")
        assert "activate w" not in stand.backend.done


@pytest.mark.parametrize("error", [NoMemberError("no GPU process yet"), StepFailedError("no answer")])
async def test_a_container_whose_gpu_processes_are_not_found_is_not_gone(tmp_path: Path, error: Exception) -> None:
    async with running(tmp_path) as stand:
        stand.backend.unknown = error
        seen = await stand.look("v")
        status = await stand.do(switch(5, "v", "w"))

        expected = "active" if isinstance(error, NoMemberError) else "quarantined"
        assert (seen.outcome, status.park[0].outcome) == (expected, expected)
        assert seen.no_context == isinstance(error, NoMemberError)
        assert "activate w" not in stand.backend.done


@pytest.mark.parametrize(("health", "outcome"), [(200, "parked"), (503, "active"), (None, "active")])
async def test_an_engine_that_serves_and_has_nothing_on_the_gpu_is_parked_with_nothing_kept(
    tmp_path: Path, health: int | None, outcome: str
) -> None:
    """It fell back to the CPU: 31 parks were refused, and its neighbour was answered 503 for ever."""
    backend = MemoryBackend(unknown=NoMemberError("no process of container c uses a GPU"))
    async with running(tmp_path, backend, MemoryCheck(health=health)) as stand:
        (parked,) = (await stand.do(switch(5, "v"))).park
        assert (parked.outcome, parked.vram_bytes, parked.residue_bytes, parked.refused) == (outcome, 0, 0, False)
        assert (await stand.look("v")).outcome == outcome
    if outcome != "parked":
        return
    async with running(tmp_path, backend, MemoryCheck(health=health)) as stand:
        assert (await stand.look("v")).outcome == "parked", "the next one knows it"
        backend.unknown = None
        assert (await stand.look("v")).outcome == "active", "it has loaded since"
        backend.unknown = NoMemberError("no process of container c uses a GPU")
        assert (await stand.activate(6, "v")).outcome == "active", "there is nothing to bring back"
        assert stand.journal.parked == {}


async def test_a_park_is_in_the_journal_before_it_is_reported(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load()
    file = JobFile([Record(kind="switch", switch=switch(5, "v", "w"))])
    await journal.begin(file)
    known: list[tuple[bool, bool]] = []

    def report(status: JobStatus) -> None:
        if status.park[0].outcome == "parked":
            known.append((file.ended("park", "v") is not None, "v" in journal.parked))

    await JobRun(file, journal, {"memory": MemoryBackend()}, report).run()
    journal.close()

    assert set(known) == {(True, True)}, "the manager may name the seat in another job at once"


def test_the_last_retarget_of_a_job_counts() -> None:
    file = JobFile([Record(kind="switch", switch=switch(5, "v", "w"))])
    file.records += [
        Record(kind="retarget", activate=target(seat), epoch=epoch) for seat, epoch in (("x", 6), ("y", 7))
    ]

    assert file.activate == target("y")
    assert file.epoch == 7


@pytest.mark.parametrize(
    ("half", "done"),
    [("activate w", ["replay-active w"]), ("park v", ["replay-parked v", "discover w", "activate w"])],
)
async def test_a_restart_replays_the_half_under_way_and_repeats_none_that_ended(
    tmp_path: Path, half: str, done: list[str]
) -> None:
    async with running(tmp_path) as stand:
        stand.backend.hold(half)
        await stand.worker.switch(switch(5, "v", "w"))
        await stand.begun(half)

    async with running(tmp_path) as again:
        status = await again.done("op-5")

        assert again.backend.done == done
        assert (status.park[0].outcome, status.activate.outcome) == ("parked", "active")


async def test_a_seat_that_is_parked_again_keeps_its_proven_residue_also_after_a_restart(tmp_path: Path) -> None:
    """Its second park frees nothing, so nothing can be measured."""
    async with running(tmp_path) as stand:
        stand.backend.keeps_bytes = 2
        await stand.do(switch(1, park="v"))
    async with running(tmp_path) as again:
        await until(lambda: not again.worker.running, what="the end of a job whose last record was not on disk")
        assert (await again.do(switch(2, park="v"))).park[0].residue_bytes == 2


async def test_processes_on_record_count_for_the_container_that_was_parked(tmp_path: Path) -> None:
    async with running(tmp_path) as stand:
        await stand.do(switch(5, "v"))
        stand.backend.done.clear()

        await stand.do(switch(6, at=target("v", container="process://2")))

        assert stand.backend.done == ["discover v", "park v"]


async def test_a_kill_of_a_container_without_a_known_process_is_read_again(tmp_path: Path) -> None:
    """Its record has no first process. An unreadable file would lose the job, and the epoch that fences."""
    async with running(tmp_path) as stand:
        stand.backend.unknown = StepFailedError("no answer")
        stand.backend.hold("kill v")
        await stand.worker.kill(KillJob(cause="c", node="n1", epoch=6, target=target("v")))
        await stand.begun("kill v")

    async with running(tmp_path) as again:
        await again.done("kill-v-6")

        assert again.journal.seen_epoch((A,)) == 6


async def test_a_process_that_a_restore_has_spent_is_ended_by_the_replay(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.load()
    file = JobFile([Record(kind="switch", switch=switch(5, activate="w"))])
    await journal.begin(file)
    unit = MemoryBackend().container(target("w"), "G0", 5)
    await journal.add(file, Record(kind="half", half="activate", seat="w", unit=unit))
    await journal.add(file, Record(kind="step", half="activate", seat="w", step=SPENT))
    journal.close()

    async with running(tmp_path) as again:
        await again.begun("replay-dead w")


async def test_a_seat_is_activated_and_undone_only_with_the_answers_of_its_first_park(tmp_path: Path) -> None:
    check = MemoryCheck()
    async with running(tmp_path, check=check) as stand:
        await stand.do(switch(5, "w"))
        stand.backend.outcomes["park v"] = "active"
        assert (await stand.do(switch(6, "v"))).park[0].outcome == "active"
        status = await stand.activate(7, "w")

        assert check.asked == ["record w", "record v", "compare v with 1", "compare w with 1"]
        assert status.outcome == "active"
        assert status.seconds["verify"] >= 0


@pytest.mark.parametrize(("park", "activate", "kill"), [("", "w", "gone"), ("v", "", "gone"), ("", "w", "quarantined")])
async def test_a_seat_whose_engine_answers_wrongly_is_killed(
    tmp_path: Path, park: str, activate: str, kill: Outcome
) -> None:
    seat = park or activate
    backend = MemoryBackend(outcomes={f"park {seat}": "active", f"kill {seat}": kill})
    async with running(tmp_path, backend, MemoryCheck("token 1 is another one")) as stand:
        status = await stand.do(switch(5, park, activate))
        progress = status.park[0] if park else status.activate

        assert backend.done[-1] == f"kill {seat}"
        assert progress.outcome == ("lost" if kill == "gone" else "quarantined")
        assert progress.reason.startswith("verify: token 1 is another one")
        assert progress.failed


async def test_a_seat_that_cannot_be_asked_serves_and_says_so_after_each_half(tmp_path: Path) -> None:
    class Unreached(MemoryCheck):
        async def recorded(self, seat: SeatProcesses, *, patient: bool = False) -> SeatProcesses:
            return seat.model_copy(update={"unverified": "GET /health: refused"})

    async with running(tmp_path, check=Unreached()) as stand:
        parked = (await stand.do(switch(5, "w"))).park[0]
        active = await stand.activate(6, "w")

        assert (parked.outcome, active.outcome) == ("parked", "active")
        assert parked.unverified == active.unverified == "GET /health: refused"


async def test_a_seat_that_is_parked_by_restart_is_not_asked(tmp_path: Path) -> None:
    check = MemoryCheck()
    async with running(tmp_path, MemoryBackend(keeps_processes=False), check) as stand:
        assert (await stand.do(switch(5, "v"))).park[0].outcome == "parked"
        assert check.asked == []


async def test_a_crash_before_the_answers_are_compared_is_no_way_around_them(tmp_path: Path) -> None:
    class Stuck(MemoryCheck):
        async def wrong(self, seat: SeatProcesses) -> str:
            self.asked.append("stuck")
            await asyncio.Event().wait()
            return ""

    stuck = Stuck()
    async with running(tmp_path, check=stuck) as stand:
        await stand.worker.switch(switch(5, activate="w"))
        await until(lambda: "stuck" in stuck.asked, what="the engine is asked")

    async with running(tmp_path, check=MemoryCheck("another token")) as again:
        status = (await again.done("op-5")).activate

        assert again.backend.done == ["replay-active w", "kill w"]
        assert status.outcome == "lost"


@pytest.mark.parametrize(("weighs", "reported"), [(70, (70, 70)), (None, (0, 0))])
async def test_what_a_container_takes_is_read_after_each_half(
    tmp_path: Path, weighs: int | None, reported: tuple[int, int]
) -> None:
    async with running(tmp_path, MemoryBackend(weighs=weighs)) as stand:
        status = await stand.do(switch(5, "w", "v"))
        assert (status.park[0].host_bytes, status.activate.host_bytes) == reported


async def test_a_seat_that_no_step_touched_is_not_asked(tmp_path: Path) -> None:
    class Refusing(MemoryBackend):
        async def park(self, seat: SeatProcesses, note: Note) -> Ending:
            return Ending("active", "a rule forbids it")

    check = MemoryCheck("the engine was never right")
    async with running(tmp_path, Refusing(), check) as stand:
        assert (await stand.do(switch(5, "v"))).park[0].outcome == "active"
        assert check.asked == ["record v"]


async def test_a_seat_whose_test_request_is_unanswered_is_not_parked_and_its_rehearsal_waits(tmp_path: Path) -> None:
    async with running(tmp_path, check=MemoryCheck(unanswered="not yet")) as stand:
        status = await stand.do(switch(5, "v", "w"))
        assert (status.park[0].outcome, status.park[0].reason, status.park[0].failed) == ("active", "not yet", False)
        assert "park v" not in stand.backend.done
        assert (await stand.do(switch(6, "v", "v"))).park[0].outcome == "parked"


async def test_a_seat_may_be_parked_as_an_image_without_a_process(tmp_path: Path) -> None:
    """It comes back after a restart, and the image ends with its pod: a disk tier is a backend, its line and name."""
    images = tmp_path / "images"
    images.mkdir()
    async with running(tmp_path, DiskBackend(images=images, living={"v"})) as stand:
        assert (await stand.do(switch(5, "v"))).park[0].outcome == "parked"

    async with running(tmp_path, DiskBackend(images=images)) as again:
        backend, files = again.backend, lambda: [one.name for one in images.iterdir()]
        assert ((await again.look("v")).outcome, backend.living, files()) == ("parked", set(), ["v"])

        assert ((await again.activate(7, "v")).outcome, backend.living, files()) == ("active", {"v"}, [])

        await again.do(switch(8, "v"))
        await again.worker.release(ReleaseJob(cause="c", node="n1", epoch=9, target=target("v")))
        await until(lambda: backend.done[-1] == "kill v", what="the pod's seat is released")
        assert (backend.living, files()) == (set(), [])
