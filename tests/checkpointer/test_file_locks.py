"""A seat is not frozen while it holds what another engine needs: the lock of a shared cache, or a compiler's work."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.checkpointer.backends.host import Inspection
from services.checkpointer.file_locks import held, why_not_frozen
from services.checkpointer.processes import ProcessIdentity, identify
from tests.checkpointer.test_hazards import NOTHING, park, stand
from tests.until import until

WAITS = "-> FLOCK  ADVISORY  WRITE 1"
HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX if sys.argv[2] == "write" else fcntl.LOCK_SH)
print(flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holder(file: Path, mode: str = "write") -> Iterator[ProcessIdentity]:
    """A process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file), mode], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            who = identify(process.pid)
            yield who
        finally:
            process.kill()


async def test_a_process_that_holds_a_lock_for_which_another_one_waits_is_not_frozen(tmp_path: Path) -> None:
    file = tmp_path / "x.lock"
    with holder(file) as who:
        assert [(one.pid, one.exclusive, one.awaited) for one in held([who.pid])] == [(who.pid, True, False)]
        assert why_not_frozen([who], shared=False) == ""
        with subprocess.Popen([sys.executable, "-c", HOLD, str(file), "write"]) as waiting:
            await until(lambda: held([who.pid])[0].awaited, what="it waits")
            assert why_not_frozen([who], shared=False) == (
                f"pid {who.pid} holds a lock of {file}, for which another engine waits"
            )
            both = [who, ProcessIdentity(pid=waiting.pid, start=0)]
            assert why_not_frozen(both, shared=False) == "", "they are frozen together"
            waiting.kill()


def test_an_exclusive_lock_of_a_file_that_others_may_open_counts_as_well(tmp_path: Path) -> None:
    file = tmp_path / "x.lock"
    with holder(file) as who:
        assert (
            why_not_frozen([who], shared=True) == f"pid {who.pid} holds a lock of {file}, which other engines may share"
        )
    with holder(file, "read") as who:
        assert why_not_frozen([who], shared=True) == ""


@pytest.mark.parametrize(
    ("mount", "free"),
    [
        ("1 0 8:1 / / rw - overlay overlay rw", True),
        ("1 0 8:1 / {folder} rw - tmpfs tmpfs rw", True),
        ("1 0 8:1 /var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/cache {folder} rw - ext4 /dev/x rw", True),
        ("1 0 8:1 /srv/cache {folder} rw - ext4 /dev/x rw", False),
    ],
)
def test_a_file_of_the_container_alone_is_not_shared(tmp_path: Path, mount: str, free: bool) -> None:
    """In another mount namespace, as /proc would show it."""
    file, proc = tmp_path / "x.lock", tmp_path / "proc"
    with open(file, "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        (one,) = [one for one in held([os.getpid()]) if one.file.endswith(f":{os.stat(file).st_ino}")]
        own = proc / "7"
        (own / "ns").mkdir(parents=True)
        (own / "ns" / "mnt").symlink_to("mnt:[1]")
        (proc / "self" / "ns").mkdir(parents=True)
        (proc / "self" / "ns" / "mnt").symlink_to("mnt:[2]")
        (own / "fd").mkdir()
        (own / "fd" / "3").symlink_to(file)
        (proc / "locks").write_text(f"1: FLOCK  ADVISORY  WRITE 7 {one.file} 0 EOF\n")
        root = "1 0 8:1 / / rw - overlay overlay rw\n" if "{folder}" in mount else ""
        (own / "mountinfo").write_text(root + mount.format(folder=tmp_path) + "\n")
        why = why_not_frozen([ProcessIdentity(pid=7, start=1)], shared=True, proc=proc)
    assert (why == "") is free


def test_the_list_of_all_locks_is_read_only_where_a_descriptor_has_one(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("1: FLOCK  ADVISORY  WRITE 7 08:01:7 0 EOF\n")
    (tmp_path / "7" / "fdinfo").mkdir(parents=True)
    descriptor = tmp_path / "7" / "fdinfo" / "3"
    descriptor.write_text("pos:\t0\nflags:\t0100002\n")
    assert held([7], tmp_path) == []
    descriptor.write_text("pos:\t0\nlock:\t1: FLOCK  ADVISORY  WRITE 7 08:01:7 0 EOF\n")
    assert [one.file for one in held([7], tmp_path)] == ["08:01:7"]


def test_a_process_that_compiles_is_waited_for(tmp_path: Path) -> None:
    compiler = tmp_path / "cc1plus"
    shutil.copy(shutil.which("sleep") or "", compiler)
    with subprocess.Popen([compiler, "60"]) as process:
        who = identify(process.pid)
        assert why_not_frozen([who], shared=False) == f"pid {process.pid} compiles for it (cc1plus)"
        process.kill()


async def test_a_park_waits_for_a_lock_and_is_then_no_failure(tmp_path: Path) -> None:
    async with stand(allowed=NOTHING, floor_wall_seconds=0.2) as (here, it):
        engine = await here.engine("s00")
        lines = [f"1: {one} 08:01:7 0 EOF\n" for one in (f"FLOCK  ADVISORY  WRITE {engine.process.pid}", WAITS)]
        (tmp_path / "locks").write_text("".join(lines))
        it.host.inspection = Inspection(tmp_path)
        end = await park(it, engine)
        assert (end.outcome, end.refused, end.failed) == ("active", False, False)
        assert f"checks: pid {engine.process.pid} holds a lock of 08:01:7, for which another engine waits" in end.reason
        (tmp_path / "locks").write_text("")
        assert (await park(it, engine)).outcome == "parked"
