"""A container whose first process is kyb-run: the engine is ended, kyb-run stays, and is never believed."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kybernate.run import install
from services.checkpointer.backends import job_half
from services.checkpointer.processes import identify, tree
from tests.checkpointer.test_hazards import NOTHING, activate, kill, park, stand
from tests.checkpointer.world import GIB, Engine, Kind, Node
from tests.until import until


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(install(tmp_path_factory.mktemp("bin")))


def seat_folder(here: Node, seat: str = "s00") -> Path:
    folder = here.folder / "seats" / seat
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def engine_by(here: Node, program: str, **engine: object) -> Engine:
    folder = seat_folder(here)
    environment = {"KYB_SEAT_DIR": str(folder)}
    return await here.engine("s00", by=(program, "--"), environment=environment, **engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ctypes", "fake"])
async def test_a_park_ends_the_engine_and_all_it_started_and_not_kyb_run(kind: Kind, program: str) -> None:
    async with stand(kind, allowed=NOTHING) as (here, it):
        engine = await engine_by(here, program, gib=40, processes=2, backend="restart")
        keeper = identify(engine.pid)
        assert len(tree(keeper)) == 3
        assert await it.outcome(engine) == "active"
        end = await park(it, engine)
        assert (end.outcome, end.vram_bytes) == ("parked", 40 * GIB)
        await until(lambda: tree(keeper) == [keeper], what="kyb-run alone is left")
        assert set((await here.used()).values()) == {0}
        assert await it.outcome(engine) == "gone", "kyb-run is no process of the seat"
        assert (await park(it, engine)).outcome == "gone"
        assert (await here.violations())["count"] == 0


async def test_a_lost_engine_is_killed_and_kyb_run_reads_of_it(program: str) -> None:
    async with stand() as (here, it):
        engine = await engine_by(here, program, backend="cuda")
        assert (await kill(it, engine)).outcome == "gone"
        epoch, _ = (seat_folder(here) / "ends").read_text().split()
        assert int(epoch) == it.epoch
        assert (seat_folder(here) / "ends").stat().st_mode & 0o777 == 0o644, "engines of any user read it"
        assert engine.process.returncode is None


async def test_an_engine_that_crashed_ends_its_container(program: str) -> None:
    async with stand() as (here, it):
        engine = await engine_by(here, program, backend="restart")
        (child,) = {one.pid for one in tree(identify(engine.pid))} - {engine.pid}  # type: ignore[arg-type]
        os.kill(child, signal.SIGKILL)
        assert await asyncio.wait_for(engine.process.wait(), 30) == 128 + signal.SIGKILL
        assert await it.outcome(engine) == "gone"


async def test_an_end_that_cannot_be_announced_ends_the_container(program: str) -> None:
    async with stand() as (here, it):
        engine = await engine_by(here, program, backend="restart")
        seat_folder(here).rmdir()
        assert (await park(it, engine)).outcome == "parked"
        assert await asyncio.wait_for(engine.process.wait(), 30) == 128 + signal.SIGKILL


async def test_an_end_that_was_announced_and_failed_hides_no_crash(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lives on: what it ends by later is its own, and its container's end."""
    async with stand() as (here, it):
        engine = await engine_by(here, program, backend="restart")
        (child,) = {one.pid for one in tree(identify(engine.pid))} - {engine.pid}  # type: ignore[arg-type]

        def refused(*_: object) -> bool:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(job_half, "send", refused)
            end = await park(it, engine)
        assert end.outcome != "parked", end
        assert "SIGKILL refused" in end.reason
        assert not (seat_folder(here) / "ends").exists()
        os.kill(child, signal.SIGKILL)
        assert await asyncio.wait_for(engine.process.wait(), 30) == 128 + signal.SIGKILL


async def test_a_container_without_kyb_run_gets_no_announcement() -> None:
    async with stand() as (here, it):
        folder, engine = seat_folder(here), await here.engine("s00", backend="restart")
        assert (await park(it, engine)).outcome == "parked"
        assert list(folder.iterdir()) == []


@pytest.fixture
def liar(tmp_path: Path) -> tuple[str, ...]:
    """An engine that is named kyb-run: a copy of Python."""
    copy = tmp_path / "kyb-run"
    shutil.copy(os.path.realpath(sys.executable), copy)
    env = {"PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join((os.getcwd(), sysconfig.get_path("purelib")))}
    setting = [f"{name}={value}" for name, value in env.items()]
    launch = "import os, sys; os.execv(sys.argv[1], ['python', *sys.argv[3:]])"
    done = subprocess.run([copy, "-c", ""], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ("/usr/bin/env", *setting, sys.executable, "-c", launch, str(copy))


@pytest.mark.parametrize("backend", ["restart", "cuda"])
async def test_an_engine_that_is_named_kyb_run_is_never_gone_while_it_holds_memory(
    liar: tuple[str, ...], backend: str
) -> None:
    async with stand(allowed=NOTHING) as (here, it):
        engine = await here.engine("s00", by=liar, backend=backend)
        assert await it.outcome(engine) == "quarantined"
        assert (await park(it, engine)).outcome == "quarantined"
        assert (await kill(it, engine)).outcome == "gone"
        assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGKILL
        assert set((await here.used()).values()) == {0}
        assert (await here.violations())["count"] == 0


async def test_memory_that_nothing_accounts_for_ends_kyb_run_too(program: str) -> None:
    """What is left of the container is ended before the seat is given up."""
    async with stand("fake", base_seconds=1.0, seconds_per_gib=0.0, floor_wall_seconds=1.0) as (here, it):
        engine = await engine_by(here, program)
        assert (await park(it, engine)).outcome == "parked"
        assert (await activate(it, engine)).outcome == "active"
        await here.inject("wedge-on-kill")
        await here.inject("fail", verb="lock", code=304, times=9)
        end = await kill(it, engine)
        assert (end.outcome, "no process accounts for" in end.reason) == ("quarantined", True), end
        assert await asyncio.wait_for(engine.process.wait(), 30) == -signal.SIGKILL
