"""Absence is no evidence: a seat is gone only if the driver's list has no process that is, or may be, in its container.

With control groups of the real kernel where the container is one; a test that cannot make one is skipped.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kybernate.run import install
from services.checkpointer.backends.job_half import JobHalf
from services.checkpointer.containers import Containers
from services.checkpointer.processes import identify
from tests.checkpointer.test_hazards import kill, park, stand
from tests.checkpointer.test_run import engine_by
from tests.checkpointer.world import ENGINE, GIB, Engine, Kind, Node
from tests.control_groups import any_control_group
from tests.until import until

POD = "0a1b2c3d-1111-2222-3333-444455556666"
CONTAINER = "3f" * 32


@contextlib.contextmanager
def container(engine: Engine, *parents: str, identity: str = CONTAINER) -> Iterator[Path]:
    """Put the engine into a control group of that id, below ``parents``; and let its target name the container."""
    with any_control_group() as base:
        folder = base
        made = []
        for name in (*parents, identity):
            folder /= name
            folder.mkdir()
            made.append(folder)
        for pid in (engine.pid, *_children(engine.pid)):
            (folder / "cgroup.procs").write_text(str(pid))
        update = {"pod_uid": POD, "container_id": f"containerd://{CONTAINER}"}
        engine.target = engine.target.model_copy(update=update)
        try:
            yield folder
        finally:
            for one in reversed(made):
                for pid in (one / "cgroup.procs").read_text().split():
                    (base / "cgroup.procs").write_text(pid)
                one.rmdir()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def executed(here: Node, folder: Path, *, gib: int = 0) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ``kubectl exec`` starts in a container: in its control group, and no child of what leads it."""
    command = (
        (ENGINE, str(here.socket), "s00", "1", here.gpus[0], str(gib * GIB)) if gib else ("print('ready')\ninput()",)
    )
    inside = ("sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(folder))
    process = await asyncio.create_subprocess_exec(
        *(*inside, sys.executable, "-c", *command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    "parents", [("kubepods", f"pod{'ab' * 16}"), ("k8s.io",)], ids=["static-pod", "cgroups-per-qos-false"]
)
@pytest.mark.parametrize("kind", ["ctypes", "fake"])
async def test_a_seat_whose_control_group_does_not_name_its_pod_is_parked(kind: Kind, parents: tuple[str, ...]) -> None:
    async with stand(kind) as (here, it):
        engine = await here.engine("s00", gib=60)
        with container(engine, *parents):
            assert await it.outcome(engine) == "active"
            assert (await park(it, engine)).outcome == "parked"
            assert set((await here.used()).values()) == {0}
            assert await it.outcome(engine) == "parked"
            assert (await kill(it, engine)).outcome == "gone"


@pytest.mark.parametrize("backend", ["", "restart"])
async def test_a_process_that_only_the_driver_shows_in_the_container_is_the_seat_and_is_ended(backend: str) -> None:
    """The first process has ended, and the one that holds the memory has another parent now."""
    async with stand("fake") as (here, it):
        engine = await here.engine("s00", gib=40, processes=2, backend=backend)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: identify(engine.pid) is None, what="its first process is gone")

        async def alone() -> bool:  # the driver sees an end when the connection of the process breaks off
            return sum((await here.used()).values()) == 20 * GIB

        await until(alone, what="the driver shows the other process alone")
        assert await it.outcome(engine) == "active", "not gone"
        assert (await kill(it, engine)).outcome == "gone"
        assert set((await here.used()).values()) == {0}
        assert await it.outcome(engine) == "gone"


@pytest.mark.parametrize("backend", ["", "restart"])
async def test_a_process_of_its_pod_that_is_not_in_its_container_keeps_it_from_being_gone(backend: str) -> None:
    """gVisor runs all containers of a pod in one process, in the sandbox's control group."""
    async with stand("fake", base_seconds=10.0, floor_wall_seconds=0.3, settle_floor_wall_seconds=0.3) as (here, it):
        engine = await here.engine("s00", gib=40, backend=backend)
        with container(engine, "kubepods", f"pod{POD}", identity="5f" * 32):
            for seen in (*await it.look(engine), await park(it, engine), await kill(it, engine)):
                assert seen.outcome == "quarantined", seen
                assert f"pid {engine.pid} is in its pod, and not in its container" in seen.reason
            assert sum((await here.used()).values()) == 40 * GIB, "and it is left alone"


async def test_a_program_that_begins_to_compute_during_a_kill_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stand("fake") as (here, it), contextlib.AsyncExitStack() as stack:
        engine = await engine_by(here, str(install(tmp_path)), gib=40, backend="restart")
        folder, unaccounted, begun = stack.enter_context(container(engine, "k8s.io")), JobHalf._unaccounted, []

        async def late(self: JobHalf) -> dict[str, int]:
            if not begun:
                begun.append(await stack.enter_async_context(executed(here, folder, gib=10)))
            return await unaccounted(self)

        monkeypatch.setattr(JobHalf, "_unaccounted", late)
        assert (await park(it, engine)).outcome == "parked"
        assert await begun[0].wait() == -signal.SIGKILL
        assert set((await here.used()).values()) == {0}
        assert engine.process.returncode is None, "kyb-run stays"


async def test_a_process_whose_place_cannot_be_read_keeps_a_seat_from_being_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """hidepid, or another pid namespace."""
    async with stand("fake", base_seconds=10.0, floor_wall_seconds=0.3, settle_floor_wall_seconds=0.3) as (here, it):
        engine = await here.engine("s00", gib=40, backend="restart")
        with container(engine, "k8s.io"):
            monkeypatch.setattr(Containers, "_container", lambda *_: None)
            monkeypatch.setattr(Containers, "own", lambda *_: [])
            read = "services.checkpointer.containers.read"
            monkeypatch.setattr(read, lambda file: (_ for _ in ()).throw(PermissionError(1, "not permitted")))
            for seen in (*await it.look(engine), await park(it, engine), await kill(it, engine)):
                assert seen.outcome == "quarantined", seen
                assert f"/proc/{engine.pid}/cgroup cannot be read (not permitted)" in seen.reason


async def test_a_process_that_has_just_ended_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver lists it for a moment longer."""
    async with stand("fake") as (here, it):
        engine = await here.engine("s00", backend="restart")
        os.kill(engine.pid, signal.SIGKILL)
        await engine.process.wait()
        unclear, asked = Containers.unclear, []

        def late(self: Containers, *arguments: object) -> str:
            asked.append(arguments)
            return "it is listed" if len(asked) < 3 else unclear(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(Containers, "unclear", late)
        assert await it.outcome(engine) == "gone"
        assert len(asked) == 3


async def test_a_shell_beside_kyb_run_is_no_engine_and_what_it_computes_is(tmp_path: Path) -> None:
    async with stand("fake") as (here, it):
        engine = await engine_by(here, str(install(tmp_path)), gib=40, backend="restart")
        with container(engine, "k8s.io") as folder:
            (seen,) = await it.look(engine)
            assert (seen.outcome, seen.keeper) == ("active", True)
            assert (await park(it, engine)).outcome == "parked"
            (seen,) = await it.look(engine)
            assert (seen.outcome, seen.keeper) == ("gone", True), "kyb-run is alone"
            async with executed(here, folder) as shell:
                (seen,) = await it.look(engine)
                assert (seen.outcome, seen.keeper) == ("gone", True), "a shell is no engine"
                async with executed(here, folder, gib=10) as program_of_it:
                    assert await it.outcome(engine) == "active", "its memory is held"
                    assert (await kill(it, engine)).outcome == "gone"
                    assert await program_of_it.wait() == -signal.SIGKILL
                    assert set((await here.used()).values()) == {0}
                assert shell.returncode is None, "it holds nothing"
            assert engine.process.returncode is None, "kyb-run stays"
        os.kill(engine.pid, signal.SIGKILL)
        await engine.process.wait()
        (seen,) = await it.look(engine)
        assert (seen.outcome, seen.keeper) == ("gone", False)
