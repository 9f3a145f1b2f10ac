"""What survives a restart of the checkpointer: jobs and epochs, but no helper."""

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import structlog

from kybernate.messages import JobStatus, SeatTarget, SwitchJob
from services.checkpointer import journal as journal_module
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.journal import Journal
from services.checkpointer.processes import ProcessIdentity, alive, ended, identify, send
from services.checkpointer.records import REMEMBERED_SECONDS, JobFile, Record
from tests.cuda.echo_driver import echo_command
from tests.until import until


def job(epoch: int) -> JobFile:
    target = SeatTarget(seat="s00", pod_uid="u", container_id="process://1", gpus=("GPU-a",))
    switch = SwitchJob(cause="test", node="n", epoch=epoch, op=f"op-{epoch}", group="G0", park=(target,))
    return JobFile([Record(kind="switch", switch=switch)])


def opened(folder: Path, witness: Path | None = None) -> Journal:
    journal = Journal(folder, witness)
    journal.load()
    return journal


async def begun(folder: Path) -> tuple[Journal, JobFile]:
    """A journal with a job that is on disk."""
    journal, one = opened(folder), job(1)
    await journal.begin(one)
    await journal._synced(one)
    return journal, one


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")  # the kernel names no file


def end_of(one: JobFile) -> Record:
    return Record(kind="done", status=JobStatus(op=one.op, epoch=one.epoch, group="G0", done=True))


async def test_old_jobs_are_removed_and_their_epochs_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEPT_JOBS", 3)
    monkeypatch.setattr(journal_module, "REMOVED_JOBS", 2)
    journal = opened(tmp_path)
    for epoch in range(1, 8):
        one = job(epoch)
        await journal.begin(one)
        await journal.finish(one, end_of(one))
    journal.close()
    again = opened(tmp_path)
    assert list(again.jobs) == ["op-5", "op-6", "op-7"]
    assert all(one.done for one in again.jobs.values())
    for file in (tmp_path / "journal").iterdir():
        file.unlink()
    assert opened(tmp_path).seen_epoch(("GPU-a",)) == 7
    assert opened(tmp_path).seen_epoch(("GPU-b",)) == 0


async def test_a_job_in_which_a_call_hung_is_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEPT_JOBS", 1)
    monkeypatch.setattr(journal_module, "REMOVED_JOBS", 1)
    journal, now = opened(tmp_path), time.time()
    for epoch, hung_at in ((1, now - 2 * REMEMBERED_SECONDS), (2, now - 60), (3, None), (4, None)):
        one = job(epoch)
        await journal.begin(one)
        if hung_at is not None:
            await journal.add(one, Record(kind="step", half="park", seat="s00", step="hung", at=hung_at))
        await journal.finish(one, end_of(one))
    journal.close()
    assert list(opened(tmp_path).jobs) == ["op-2", "op-4"]


async def test_a_torn_line_is_cut_off_before_the_next_is_written(tmp_path: Path) -> None:
    journal, one = await begun(tmp_path)
    journal.close()
    with one.path.open("ab") as file:
        file.write(b'{"kind":"st')
    again = opened(tmp_path)
    await again.add(again.jobs["op-1"], Record(kind="step", step="lock"))
    again.close()
    assert [record.kind for record in opened(tmp_path).jobs["op-1"].records] == ["switch", "step"]


@pytest.mark.parametrize("left", [b"", b'{"kind":"sw', bytes(4096)], ids=["empty", "torn", "zeros"])
def test_a_job_that_was_never_on_disk_is_removed_after_a_crash_of_the_machine(tmp_path: Path, left: bytes) -> None:
    opened(tmp_path).close()
    (tmp_path / "journal" / "00000000000000000007-x.jsonl").write_bytes(left)
    with structlog.testing.capture_logs() as logs:
        journal = opened(tmp_path)
    journal.close()
    assert [(line["event"], line["log_level"]) for line in logs] == [("journal.never_on_disk", "info")]
    assert not list((tmp_path / "journal").iterdir())
    assert not journal.jobs


def test_files_that_cannot_be_read_are_set_aside(tmp_path: Path) -> None:
    opened(tmp_path).close()
    for file in (tmp_path / "epochs.json", tmp_path / "parked" / "s.json", tmp_path / "journal" / "9-x.jsonl"):
        file.write_text("{\n")
    opened(tmp_path).close()
    left = [file.name.partition(".unreadable-")[0] for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(left) == ["9-x.jsonl", "epochs.json", "s.json"]
    assert not [file for file in tmp_path.rglob("*.json*") if file.name in left]


async def test_helpers_of_a_killed_checkpointer_are_ended_first(tmp_path: Path) -> None:
    left = await asyncio.create_subprocess_exec("sleep", "60")
    who = identify(left.pid)
    (tmp_path / f"{who.pid}-{who.start}").touch()
    (tmp_path / f"{who.pid}-1").touch()  # the same pid with another start time: another process
    async with HelperPool(echo_command(), tmp_path):
        gone = not alive(who)
        send(who, signal.SIGKILL)
        await left.wait()
    assert gone


async def test_a_signal_is_never_sent_to_another_process_with_the_same_pid() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    who = identify(process.pid)
    stranger = ProcessIdentity(pid=who.pid, start=who.start - 1)
    assert not alive(stranger)
    assert not send(stranger, signal.SIGKILL)
    assert alive(who)
    assert send(who, signal.SIGKILL)
    await process.wait()
    assert not send(who, signal.SIGKILL)


async def test_a_process_whose_pid_is_a_thread_now_is_gone(tmp_path: Path) -> None:
    thread, done = asyncio.Event(), threading.Event()
    loop, ids = asyncio.get_running_loop(), list[int]()

    def live() -> None:
        ids.append(threading.get_native_id())
        loop.call_soon_threadsafe(thread.set)
        done.wait(60)

    living = loop.run_in_executor(None, live)
    await thread.wait()
    try:
        who = ProcessIdentity(pid=ids[0], start=1)
        assert not send(who, signal.SIGKILL)
        await ended(who)
        (tmp_path / f"{who.pid}-{who.start}").touch()  # of a helper before the machine started again
        async with HelperPool(echo_command(), tmp_path) as pool:
            assert (await pool.call("G0", "state", deadline=60))["code"] == 0
        assert not list(tmp_path.iterdir())
    finally:
        done.set()
    await living


async def test_a_record_cut_off_by_a_full_disk_is_an_error_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes what fits and returns the count; the rest must not count as written."""
    journal, one = await begun(tmp_path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        await journal.add(one, Record(kind="step", step="lock"))
    monkeypatch.setattr(os, "write", write)
    await journal.add(one, Record(kind="step", step="checkpoint"))
    journal.close()
    assert [record.step for record in opened(tmp_path).jobs["op-1"].records] == [None, "checkpoint"]


@pytest.mark.parametrize("broken", ["write", "fdatasync"])
async def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    journal, one = await begun(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        with pytest.raises(OSError, match="No space left") as error:
            await journal.finish(one, Record(kind="done"))
    assert error.value.filename == str(one.path)
    journal.close()


async def test_a_parked_seat_is_on_record_before_the_end_of_its_park(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    await journal.begin(job(1))
    target = journal.jobs["op-1"].targets[0]
    journal.remember(SeatProcesses(target=target, group="G0", epoch=1, members=()))

    def crash(*_: object) -> None:
        raise OSError(errno.EIO, "the end of this checkpointer")

    monkeypatch.setattr(journal_module.files, "append", crash)
    with pytest.raises(OSError, match="the end of this"):
        await journal.add(journal.jobs["op-1"], Record(kind="end", half="park", seat="s00"))
    assert list(opened(tmp_path).parked) == ["s00"]
    journal.forget("s00")
    await journal.write_parked()
    assert not opened(tmp_path).parked
    journal.close()


async def test_files_that_were_put_back_are_set_aside_and_their_epochs_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished job of the copy was replayed: a running engine was killed."""
    state, copy, witness = tmp_path / "state", tmp_path / "copy", tmp_path / "epochs.json"
    journal = opened(state, witness)
    await journal.begin(job(1))
    await journal.begin(job(2))
    shutil.copytree(state, copy)
    journal.close()
    journal = opened(state, witness)
    assert list(journal.jobs) == ["op-1", "op-2"], "a restart replays them"
    await journal.finish(journal.jobs["op-2"], end_of(journal.jobs["op-2"]))
    await journal.begin(job(3))
    journal.close()
    shutil.rmtree(state)
    shutil.copytree(copy, state)

    journal = opened(state, witness)
    assert (journal.jobs, journal.seen_epoch(("GPU-a",))) == ({}, 3)
    assert [path.name.partition("-")[0] for path in state.glob("*rolled-back*")] == ["journal.rolled"]
    journal.close()
    shutil.rmtree(state)
    assert opened(state, witness).seen_epoch(("GPU-a",)) == 3, "a fence survives the loss of the folder, too"
    shutil.rmtree(state)
    shutil.copytree(copy, state)
    monkeypatch.setattr("services.checkpointer.journal.boot_id", lambda: "the next boot")
    assert list(opened(state, witness).jobs) == ["op-1", "op-2"], "no process outlives a boot"


async def test_an_unreadable_job_does_not_make_the_files_look_older_than_they_are(tmp_path: Path) -> None:
    """All parked seats of the node were forgotten with it."""
    state, witness = tmp_path / "state", tmp_path / "epochs.json"
    for number in (1, 2):
        journal = opened(state, witness)
        one = job(number)
        await journal.begin(one)
        journal.remember(SeatProcesses(target=one.targets[0], group="G0", epoch=1, members=()))
        await journal.write_parked()
        journal.close()
    for path in (state / "journal").glob("*2-op-2.jsonl"):
        path.write_text("no json\n")
    for _ in range(2):
        journal = opened(state, witness)
        journal.close()
        assert (list(journal.jobs), list(journal.parked), journal.seen_epoch(("GPU-a",))) == (["op-1"], ["s00"], 2)
    witness.write_text(witness.read_text().replace(": 2}", ": 3}"))
    journal = opened(state, witness)
    journal.close()
    assert (journal.jobs, journal.parked, journal.seen_epoch(("GPU-a",))) == ({}, {}, 3)


async def test_the_epoch_of_a_job_that_could_not_be_written_does_not_make_the_files_look_older_than_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the exploration: all jobs and parked seats were set aside after the disk had been full for a moment."""
    state, witness = tmp_path / "state", tmp_path / "epochs.json"
    journal = opened(state, witness)
    await journal.begin(job(1))
    with monkeypatch.context() as patch:
        patch.setattr(journal_module.files, "append", full)
        with pytest.raises(OSError, match="No space left"):
            await journal.begin(job(2))
    target = SeatTarget(seat="s01", pod_uid="u", container_id="process://2", gpus=("GPU-b",))
    switch = SwitchJob(cause="test", node="n", epoch=3, op="op-3", group="G1", park=(target,))
    await journal.begin(JobFile([Record(kind="switch", switch=switch)]))  # it was asked for in the same moment
    journal.close()
    assert list(opened(state, witness).jobs) == ["op-1", "op-3"]


async def test_only_its_owner_reads_its_files(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    target = SeatTarget(seat="s00", pod_uid="u", container_id="process://1", gpus=("GPU-a",))
    journal.remember(SeatProcesses(target=target, group="G0", epoch=1, members=()))
    await journal.begin(job(1))
    await journal.write_parked()
    await journal.fence(("GPU-a",), 2)
    journal.close()
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
    assert {"epochs.json", "s00.json"} < modes.keys()
    assert set(modes.values()) == {0o600}, modes


async def test_no_record_is_written_before_the_processes_of_a_parked_seat_that_another_job_failed_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpointer that ends because of the other job's error gives this one a second to end."""
    journal = opened(tmp_path)
    one, other = job(1), job(2)
    await journal.begin(one)
    await journal.begin(other)
    journal.remember(SeatProcesses(target=one.targets[0], group="G0", epoch=1, members=()))

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.files, "replace", full)
        for failing in (other, one):
            with pytest.raises(OSError, match="No space left"):
                await journal.add(failing, Record(kind="end", half="park", seat="s00"))
    assert [len(opened(tmp_path).jobs[op].records) for op in ("op-1", "op-2")] == [1, 1]
    await journal.write_parked()
    assert list(opened(tmp_path).parked) == ["s00"]
    journal.close()


async def test_a_record_is_written_at_once_and_fsynced_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, one = await begun(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(os.fstat(handle).st_size))
    await journal.add(one, Record(kind="half", half="park", seat="s00"))
    assert [record.kind for record in opened(tmp_path).jobs["op-1"].records] == ["switch", "half"], (
        "a kill loses nothing"
    )
    assert synced == []
    await journal.add_step(one, Record(kind="step", step="lock"))
    await journal._synced(one)
    assert synced == [one.path.stat().st_size]
    journal.close()


async def test_a_step_is_written_at_once_and_on_disk_before_its_half_has_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, one = await begun(tmp_path)
    disk = threading.Event()
    synced: list[int] = []

    def sync(handle: int) -> None:
        disk.wait(60)
        synced.append(os.fstat(handle).st_size)

    monkeypatch.setattr(os, "fdatasync", sync)
    await journal.add_step(one, Record(kind="step", step="lock"))
    await until(lambda: journal._syncing_since is not None, what="the fsync has begun")
    await journal.add_step(one, Record(kind="step", step="checkpoint"))
    await journal.add_step(one, Record(kind="step", step="evidence"))
    steps = [record.step for record in opened(tmp_path).jobs["op-1"].records]
    assert steps == [None, "lock", "checkpoint", "evidence"], "a kill loses nothing, though the disk is slow"
    written = one.path.stat().st_size
    end = asyncio.create_task(journal.add(one, Record(kind="end", half="park", seat="s00")))
    await asyncio.sleep(0.05)
    assert one.path.stat().st_size == written, "the outcome waits for the disk"
    disk.set()
    await end
    assert synced == [written, written], "one fsync for all that was written during another one"
    journal.close()


async def test_a_step_that_could_not_be_synced_ends_the_job_at_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    journal, one = await begun(tmp_path)
    monkeypatch.setattr(os, "fdatasync", broken)
    await journal.add_step(one, Record(kind="step", step="lock"))
    await until(lambda: journal._open[one.op].error is not None, what="the disk has answered")
    with pytest.raises(OSError, match="Input/output error"):
        await journal.add_step(one, Record(kind="step", step="checkpoint"))
    with pytest.raises(OSError, match="Input/output error"):
        await journal.add(one, Record(kind="end", half="park", seat="s00"))
    journal.close()


async def test_a_job_is_accepted_without_its_witness(tmp_path: Path) -> None:
    """The witness only tells that files were put back; it was written before the job was accepted, and delayed it."""
    journal = opened(tmp_path / "state", tmp_path / "no-folder" / "epochs.json")
    await journal.begin(job(1))
    journal.close()
    assert list(opened(tmp_path / "state").jobs) == ["op-1"]
