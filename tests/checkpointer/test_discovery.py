"""Which processes are members and what counts as evidence, with a driver that reports what real ones report."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kybernate.messages import SeatTarget
from services.checkpointer.backends import evidence, job_half
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.evidence import Discovery, Evidence, room_needed
from services.checkpointer.backends.host import open_host
from services.checkpointer.backends.job_half import check_park
from services.checkpointer.backends.port import Member, NoMemberError, SeatProcesses
from services.checkpointer.core.failures import ProcessState, StepFailedError, StepTrouble
from services.checkpointer.helper_pool import HelperCall, HelperHungError
from services.checkpointer.job_run import find_processes
from services.checkpointer.processes import ProcessIdentity, alive, identify
from tests.until import until

GPU = "GPU-a"
PATIENCE = Timeouts(settle_seconds=0.05, settle_floor_wall_seconds=0.05)


@dataclass
class Driver:
    """Replaces the helper pool."""

    cuda: set[int] = field(default_factory=set)
    uses: list[dict[str, Any]] = field(default_factory=list)
    used: int = 0
    state: str = "RUNNING"
    tid_code: int = 3
    asked: list[tuple[str, int]] = field(default_factory=list)
    drops_at_the_kill: bool = False
    """A process that has ended is not listed, and its memory stays in use."""
    pids: frozenset[int] = frozenset()
    hangs: str = ""
    """The verb that gets no answer."""
    exchanges: int = 0
    lost: str = ""
    """A GPU that does not answer: a reading of all GPUs leaves it out."""

    async def calls(self, _: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
        self.exchanges += 1
        if self.hangs in [call.verb for call in calls]:
            raise HelperHungError(f"{self.hangs} did not end", self.hangs)
        failed = {"code": 999, "name": "GPU_IS_LOST"}
        return [
            failed
            if self.lost and self.lost in arguments.get("gpus", ())
            else self.answer(verb, arguments.get("pid", 0))
            for verb, _, arguments in calls
        ]

    def answer(self, verb: str, pid: int) -> dict[str, Any]:
        self.asked.append((verb, pid))
        ok = {"code": 0, "name": "SUCCESS"}
        if self.drops_at_the_kill:
            self.uses = [use for use in self.uses if identify(use["pid"]) is not None]
        match verb:
            case "processes":
                return {**ok, "processes": self.uses}
            case "memory" | "usage":
                return {**ok, "memory": {GPU: (self.used, 1000)}, "processes": self.uses}
            case "state":
                return {**ok, "state": self.state}
            case "describe":
                return {**ok, "driver": "590.48.01", "capabilities": {"checkpoint": True}}
        return {**ok, "tid": pid} if pid in self.cuda else {"code": self.tid_code, "name": "NO"}

    def uses_gpu(self, pid: int, size: int | None) -> None:
        """``size``: None if the driver does not report it; the helper then returns all memory in use on the GPU."""
        exact = size is not None
        self.uses.append({"pid": pid, "gpu": GPU, "bytes": size if exact else self.used, "exact": exact})


@dataclass
class Stand:
    driver: Driver
    root: ProcessIdentity
    child: ProcessIdentity

    @property
    def target(self) -> SeatTarget:
        return SeatTarget(seat="s00", pod_uid="u", container_id=f"process://{self.root.pid}", gpus=(GPU,))

    def __post_init__(self) -> None:
        self.calls = DriverCalls(self.driver, PATIENCE)  # type: ignore[arg-type]
        self.host = open_host(Path("nowhere"), 1.0, fake_kubelet=True)
        self.evidence = Evidence(self.calls, self.host.freezer)

    @property
    def backend(self) -> DriverBackend:
        return DriverBackend(self.calls, self.host, self.evidence)

    async def find(self, *, whole: bool = False) -> SeatProcesses:
        return await Discovery(self.calls, self.host, whole).find(self.target, "G0", 1)


CUDA = """
import time
from kybernate.dev.fakes.gpu.sync_client import start_cuda_thread
start_cuda_thread()
print(flush=True)
time.sleep(60)
"""


@asynccontextmanager
async def stand(*, cuda: bool = False, holds: int | None = None) -> AsyncIterator[Stand]:
    """A container: a shell and its child. ``cuda``: the child has the thread of a process that uses CUDA; ``holds``:
    the driver knows the child, and lists it with so many bytes."""
    child = f"{sys.executable} -c '{CUDA}'" if cuda else "sleep 60"
    shell = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f"{child} & echo $!; wait",
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    child, root = identify(int(await shell.stdout.readline())), identify(shell.pid)
    if cuda:
        await shell.stdout.readline()
    try:
        made = Stand(Driver(), root, child)
        if holds is not None:
            made.driver.cuda = {child.pid}
            made.driver.uses_gpu(child.pid, holds)
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test has killed both
            os.killpg(shell.pid, signal.SIGKILL)
        await shell.communicate()


async def test_members_are_those_with_a_restore_thread_also_without_memory() -> None:
    async with stand(holds=0) as it:
        it.driver.uses_gpu(1, 500)
        unit = await it.find()
        assert [member.who for member in unit.members] == [it.child]
        assert unit.vram_bytes == 0


async def test_all_processes_of_a_container_that_a_restart_parks_are_members() -> None:
    async with stand() as it:
        unit = await it.find(whole=True)
        assert {member.who for member in unit.members} == {it.root, it.child}, "neither uses a GPU"


async def test_a_park_reads_the_driver_once_before_it_and_once_after_it() -> None:
    async with stand(holds=500) as it:
        it.driver.used = 800
        it.driver.uses_gpu(1, 200)
        unit = await it.find()
        assert it.driver.exchanges == 1
        assert SeatProcesses.model_validate_json(unit.model_dump_json()).reading is None, "of this moment only"
        unit = await it.backend.prepare(unit)
        await check_park(unit, it.calls, it.host)
        assert it.driver.exchanges == 2, "what the driver is"
        assert unit.baseline == {GPU: 600}, "its 500, and 100 that no process accounts for"
        it.driver.uses, it.driver.used, it.driver.state = it.driver.uses[1:], 310, "CHECKPOINTED"
        assert await it.evidence.prove(unit) == 10
        assert it.driver.exchanges == 3


async def test_a_park_is_refused_where_one_of_its_gpus_does_not_answer() -> None:
    """An MPS server on that GPU would not be seen."""
    async with stand() as it:
        it.driver.cuda, it.driver.used, it.driver.lost = {it.child.pid}, 500, "GPU-b"
        it.driver.uses_gpu(it.child.pid, 500)
        both = it.target.model_copy(update={"gpus": (GPU, "GPU-b")})
        unit = await Discovery(it.calls, it.host).find(both, "G0", 1)
        unit = await it.backend.prepare(unit)
        with pytest.raises(StepFailedError, match="GPU_IS_LOST"):
            await check_park(unit, it.calls, it.host)


async def test_a_seat_on_record_is_read_again_for_its_next_park() -> None:
    async with stand(holds=500) as it:
        parked = await it.find()
        journal = SimpleNamespace(on_record=lambda _: parked)
        found = await find_processes(journal, it.backend, it.target, "G0", 2)  # type: ignore[arg-type]
        assert found.reading is None


async def test_a_discovered_seat_that_is_not_to_be_parked_has_no_baseline() -> None:
    """Its memory was free before it was discovered (the state folder was lost): nothing is left to fall."""
    async with stand() as it:
        it.driver.cuda, it.driver.used, it.driver.state = {it.child.pid}, 300, "CHECKPOINTED"
        unit = await it.find()
        assert unit.vram_bytes == 300, "which no process accounts for"
        assert await it.evidence.prove(unit) == 0


@pytest.mark.parametrize(("verb", "trouble"), [("state", StepTrouble.HUNG), ("usage", StepTrouble.SLOW)])
async def test_only_a_call_about_a_process_counts_as_a_hang_of_its_seat(verb: str, trouble: StepTrouble) -> None:
    async with stand(holds=500) as it:
        unit = await it.find()
        it.driver.hangs = verb
        with pytest.raises(StepFailedError) as error:
            await it.evidence.prove(unit)
        assert error.value.trouble is trouble


async def test_a_process_without_memory_in_the_drivers_list_is_no_evidence_against_a_park() -> None:
    async with stand(holds=100) as it:
        it.driver.state = "CHECKPOINTED"
        unit = await it.find()
        it.driver.uses = []
        it.driver.uses_gpu(it.child.pid, 0)
        await it.evidence.prove(unit)
        it.driver.uses_gpu(it.child.pid, None)
        with pytest.raises(StepFailedError, match="still lists"):
            await it.evidence.prove(unit)


@pytest.mark.parametrize("listed", [True, False])
async def test_without_sizes_from_the_driver_a_seat_gets_all_memory_that_no_other_process_accounts_for(
    listed: bool,
) -> None:
    async with stand() as it:
        it.driver.cuda, it.driver.used = {it.child.pid}, 700
        it.driver.uses_gpu(1, 300)
        if listed:
            it.driver.uses_gpu(it.child.pid, None)
        unit = await it.find()
        assert unit.footprint == {GPU: 400}
        baseline = unit.model_copy(update={"baseline": await it.evidence.baseline(unit)})
        it.driver.state, it.driver.used = "CHECKPOINTED", 345
        it.driver.uses = it.driver.uses[:1]
        with pytest.raises(StepFailedError, match="fell by 355 of 400"):
            await it.evidence.prove(baseline)
        it.driver.used = 330
        await it.evidence.prove(baseline)


async def test_a_seat_without_gpu_processes_differs_from_one_that_the_driver_cannot_report() -> None:
    async with stand() as it:
        with pytest.raises(NoMemberError):
            await it.find()
        it.driver.uses_gpu(it.child.pid, 100)
        with pytest.raises(NoMemberError):
            await it.find()
        it.driver.tid_code = 304
        with pytest.raises(StepFailedError, match="restore_tid of pid"):
            await it.find()


async def test_no_driver_call_is_made_about_a_frozen_process_without_a_record() -> None:
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        living = lambda: [it.root, it.child]  # noqa: E731
        await it.host.freezer.freeze(None, living)
        with pytest.raises(StepFailedError, match="frozen and its GPU processes are not on record"):
            await it.find()
        assert not [call for call in it.driver.asked if call[1]]
        await it.host.freezer.thaw(None, living)
        assert len((await it.find()).members) == 1


async def test_a_process_that_goes_on_while_the_driver_is_asked_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody had paused the container; by the names of its threads alone it would hold no memory."""
    async with stand(holds=100) as it:
        assert not it.host.inspection.uses_cuda(it.child)
        monkeypatch.setattr(type(it.host.freezer), "stopped", lambda *_: not it.driver.exchanges)

        assert [member.who for member in (await it.find()).members] == [it.child]


async def test_a_process_that_ends_during_the_state_request_does_not_make_the_seat_lost() -> None:
    """Otherwise the start of a manager would kill a healthy engine."""
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        unit = await it.find()
        ended = Member(who=ProcessIdentity(pid=it.child.pid, start=it.child.start - 1))
        unit = unit.model_copy(update={"members": (*unit.members, ended)})
        assert (await it.backend.state(unit)).outcome == "active"
        parked = unit.model_copy(update={"parked_on": (GPU,)})
        assert (await it.backend.state(parked)).outcome == "lost"


async def test_the_residue_of_a_seat_that_was_parked_before_is_the_one_proven_then() -> None:
    async with stand(holds=100) as it:
        it.driver.used, it.driver.state = 100, "CHECKPOINTED"
        seat = await it.find()
        seat = seat.model_copy(update={"baseline": await it.evidence.baseline(seat)})
        it.driver.uses, it.driver.used = [], 7
        assert await it.evidence.prove(seat) == 7

        await it.host.freezer.freeze(None, lambda: [it.root, it.child])
        again = seat.model_copy(update={"baseline": {}, "residue_bytes": 5, "parked_on": (GPU,)})
        it.driver.used = 500
        again = await it.backend.prepare(again)
        assert await it.evidence.prove(again) == 5, "memory of the driver itself need not fall a second time"


async def test_a_process_that_the_driver_reports_under_another_seat_is_no_member() -> None:
    """A pid of the container was used again."""
    async with stand() as it:
        it.driver.cuda = {it.child.pid, it.root.pid}
        it.driver.uses_gpu(it.child.pid, 100)
        it.driver.uses_gpu(it.root.pid, 100)
        it.driver.uses[1]["seat"] = "s99"

        unit = await it.find()

        assert [member.who for member in unit.members] == [it.child]


async def test_a_seat_belongs_to_the_gpus_that_the_driver_lists_where_the_manager_names_others() -> None:
    async with stand(holds=100) as it:
        wrong = it.target.model_copy(update={"gpus": ("GPU-z",)})

        unit = await Discovery(it.calls, it.host).find(wrong, "G0", 1)

        assert unit.target.gpus == (GPU,)


async def test_a_stopped_process_counts_as_checkpointed_only_while_it_holds_no_memory() -> None:
    async with stand(holds=100) as it:
        unit = (await it.find()).model_copy(update={"parked_on": (GPU,)})
        living = lambda: [it.root, it.child]  # noqa: E731
        await it.host.freezer.freeze(None, living)

        assert (await Discovery(it.calls, it.host).observe(unit, "G0"))[0] == [ProcessState.UNKNOWN]
        it.driver.uses.clear()
        assert (await Discovery(it.calls, it.host).observe(unit, "G0"))[0] == [ProcessState.CHECKPOINTED]
        assert (await it.backend.state(unit)).outcome == "parked"
        await it.host.freezer.thaw(None, living)
        it.driver.state = "CHECKPOINTED"
        it.driver.uses_gpu(it.child.pid, 100)

        assert (await it.backend.state(unit)).outcome == "lost", "its memory is still there"


async def test_a_container_without_gpu_processes_is_gone_when_none_of_its_processes_lives() -> None:
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        unit = await it.find()
        ended = Member(who=ProcessIdentity(pid=it.child.pid, start=it.child.start - 1))

        unit = unit.model_copy(update={"members": (ended,)})
        assert (await it.backend.state(unit)).outcome == "lost", "the shell lives"
        os.killpg(it.root.pid, signal.SIGKILL)
        await until(lambda: not alive(it.root) and not alive(it.child), what="the container has ended")

        assert (await it.backend.state(unit)).outcome == "gone"


@pytest.mark.parametrize(("used", "beside", "room"), [(500, False, True), (501, False, False), (500, True, False)])
async def test_room_is_the_footprint_and_beside_other_processes_a_margin(used: int, beside: bool, room: bool) -> None:
    async with stand(holds=500) as it:
        unit = await it.find()
        it.driver.uses.clear()
        it.driver.used = used
        if beside:
            it.driver.uses_gpu(1, 500)
        evidence = Evidence(it.calls, it.host.freezer, margin_bytes=100)

        with contextlib.nullcontext() if room else pytest.raises(StepFailedError, match="bytes free"):
            await evidence.wait_for_room(unit, room_needed(unit, [ProcessState.CHECKPOINTED]))


async def test_memory_that_was_read_for_longer_than_it_may_take_to_become_free_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stand(holds=500) as it:
        unit, answer, passed = await it.find(), it.driver.answer, 0.0
        it.driver.used = 1000

        def slowly(verb: str, pid: int) -> dict[str, Any]:
            nonlocal passed
            reply = answer(verb, pid)
            passed, it.driver.used = 60.0, 0
            return reply

        monkeypatch.setattr(it.driver, "answer", slowly)
        monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))
        await it.evidence.wait_for_room(unit, room_needed(unit, [ProcessState.CHECKPOINTED]))
        assert [verb for verb, _ in it.driver.asked][-2:] == ["usage", "usage"]


async def test_a_seat_of_unknown_footprint_has_room_only_on_an_idle_gpu() -> None:
    async with stand() as it:
        it.driver.cuda = {it.child.pid}
        unit = await it.find()
        it.driver.used = 50
        await it.evidence.wait_for_room(unit, room_needed(unit, [ProcessState.CHECKPOINTED]))
        it.driver.used = 51

        with pytest.raises(StepFailedError, match="footprint is unknown"):
            await it.evidence.wait_for_room(unit, room_needed(unit, [ProcessState.CHECKPOINTED]))


async def test_room_is_needed_on_the_gpu_to_which_a_seat_moves() -> None:
    async with stand(holds=500) as it:
        unit = await it.find()
        there = unit.target.model_copy(update={"gpus": ("GPU-b",)})
        moving = unit.model_copy(update={"parked_on": (GPU,), "target": there})

        assert room_needed(moving, [ProcessState.CHECKPOINTED]) == {"GPU-b": 500}


@pytest.mark.parametrize("held", ["listed", "unaccounted"])
async def test_a_killed_seat_whose_memory_stays_held_is_quarantined(held: str) -> None:
    async with stand(holds=500) as it:
        it.driver.used = 500
        unit = await it.find()
        if held == "unaccounted":
            it.driver.drops_at_the_kill, it.driver.used = True, 2**30
            it.driver.uses[0]["bytes"] = 2**30
        it.calls = DriverCalls(it.driver, replace(PATIENCE, base_seconds=1.5, floor_wall_seconds=1.5))  # type: ignore[arg-type]

        end = await it.backend.kill(unit, no_journal)

        reason = "no process accounts for" if held == "unaccounted" else "still hold GPU memory"
        assert (end.outcome, reason in end.reason) == ("quarantined", True), end
        assert not alive(it.child)


@pytest.mark.parametrize("slow", ["usage", "processes"])
async def test_a_kill_has_its_time_from_the_signal_on_and_ends_with_no_look_that_began_before(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver hangs, or the checkpointer has no CPU: what is read before it, or after it, takes longer than that."""
    async with stand(holds=500) as it:
        it.driver.used = 500
        unit, answer, passed = await it.find(), it.driver.answer, 0.0

        def slowly(verb: str, pid: int) -> dict[str, Any]:
            nonlocal passed
            reply = answer(verb, pid)
            passed = 60.0 if verb == slow else passed
            if verb == "processes":
                it.driver.uses, it.driver.used = [], 0
            return reply

        monkeypatch.setattr(it.driver, "answer", slowly)
        monkeypatch.setattr(
            job_half, "time", SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + passed)
        )
        end = await it.backend.kill(unit, no_journal)
        assert (end.outcome, end.reason) == ("gone", "")


async def no_journal(step: str, pid: int | None, detail: str = "") -> None:
    pass


WITHOUT_RECORD = {
    "accounted-for": (300, (300, None), 0, 0, ""),
    "less-than-its-footprint": (340, (300, None), 100, 0, ""),
    "too-much": (360, (300, None), 0, 0, "60 bytes on GPU-a that no process accounts for"),
    "known-to-be-kept": (360, (300, None), 100, 20, ""),
    "as-much-as-its-footprint": (340, (300, None), 30, 0, "40 bytes on GPU-a that no process accounts for"),
    "although-more-is-kept": (340, (300, None), 30, 20, "40 bytes on GPU-a that no process accounts for"),
    "nothing-is-listed": (300, (), 0, 0, "300 bytes on GPU-a that no process accounts for"),
}


@pytest.mark.parametrize(("used", "listed", "size", "kept", "why"), WITHOUT_RECORD.values(), ids=WITHOUT_RECORD)
async def test_a_frozen_container_without_a_record_is_parked_if_other_processes_have_all_memory(
    used: int, listed: tuple[int | None, ...], size: int, kept: int, why: str
) -> None:
    """``listed``: memory of a stranger. The GPU has 1000 bytes."""
    async with stand(cuda=True) as it:
        await it.host.freezer.freeze(None, lambda: [it.root, it.child])
        it.driver.used = used
        for one in filter(None, listed):
            it.driver.uses_gpu(1, one)
        target = it.target.model_copy(update={"vram_bytes": size, "kept_bytes": kept})
        found = Discovery(it.calls, it.host).find(target, "G0", 1)
        if why:
            with pytest.raises(StepFailedError, match=why):
                await found
            return
        seat = await found
        assert ([member.who for member in seat.members], seat.parked_on) == ([it.child], (GPU,))
        assert seat.vram_bytes == size
        assert (await it.backend.state(seat)).outcome == "parked"
        assert not [call for call in it.driver.asked if call[1]], "a call about a frozen process hangs"


async def test_a_frozen_process_that_the_driver_lists_is_not_parked() -> None:
    async with stand(cuda=True) as it:
        await it.host.freezer.freeze(None, lambda: [it.root, it.child])
        it.driver.used = 300
        it.driver.uses_gpu(it.child.pid, 300)
        seat = await it.find()
        assert seat.parked_on == ()
        assert (await it.backend.state(seat)).outcome != "parked"
