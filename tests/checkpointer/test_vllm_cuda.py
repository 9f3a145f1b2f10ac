"""vLLM's sleep, then the driver's checkpoint of what it keeps: order, refusals, and what a driver that fails leaves.

With a played engine and driver; the self-test with processes, through the stub library and the fake driver.
"""

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kybernate import self_tests
from kybernate.dev.nats_server import free_port
from kybernate.self_tests import FILE, SelfTest, SelfTests, SelfTestsError
from services.checkpointer.backends.port import Member, SeatProcesses
from services.checkpointer.backends.reservations import Headroom
from services.checkpointer.backends.vllm_cuda import VllmCuda
from services.checkpointer.core.failures import JobGoal, ProcessState, StepTrouble, Verb
from services.checkpointer.processes import identify, send, stopped, tree
from services.checkpointer.self_test import UnfitError, self_test
from services.checkpointer.settings import CheckpointerSettings
from tests.checkpointer.engines import DRIVER, FULL, GIB, RESIDUE, PlayedEngine, Plenty, Stand, played
from tests.checkpointer.world import Node, environment, node, own_address, plain_environment
from tests.doctor.test_command import KYB
from tests.until import until

PARK, ACTIVATE = ["sleep", "lock", "checkpoint", "freeze"], ["thaw", "restore", "unlock", "wake"]


@asynccontextmanager
async def stand() -> AsyncIterator[tuple[Stand, VllmCuda]]:
    """A played vLLM in a seat with the backend."""
    async with played(PlayedEngine("vllm+cuda")) as it:
        assert isinstance(it.backend, VllmCuda)
        yield it, it.backend


def remembered(seat: SeatProcesses) -> SeatProcesses:
    """As the journal gives it to the activation."""
    return seat.model_copy(update={"parked_on": seat.at, "baseline": {}})


async def test_it_sleeps_before_its_checkpoint_and_wakes_after_its_restore_and_leaves_nothing() -> None:
    async with stand() as (it, backend):
        seat = await it.found()
        parked = await backend.park(seat, it.note)
        assert (parked.outcome, parked.residue_bytes, parked.reason) == ("parked", 0, "")
        assert parked.host_bytes == FULL, "weights and the driver's copy"
        assert (await backend.state(remembered(seat))).outcome == "parked"
        again = await backend.park(remembered(seat), it.note)
        assert again.outcome == "parked", "no call of an engine that stands still"
        assert it.notes == [*PARK, "freeze"]
        it.notes.clear()
        active = await backend.activate(remembered(seat), it.note)
        assert (active.outcome, active.vram_bytes, it.engine.held) == ("active", FULL, FULL)
        assert it.notes == ACTIVATE
        assert (await backend.state(seat)).outcome == "active"
        assert it.engine.calls == ["/sleep?level=1&mode=wait", "/wake_up"]


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ((), "kyb doctor gpu --self-test"),
        ((SelfTest(driver="570.1", engine="0.17.1", cycles=10, at=0.0),), "kyb doctor gpu --self-test"),
        ((SelfTest(driver=DRIVER, engine="0.17.0", cycles=10, at=0.0),), "kyb doctor gpu --self-test"),
        ((SelfTest(driver=DRIVER, engine="0.17.1", cycles=10, at=0.0, trouble="a restore hung"),), "a restore hung"),
    ],
    ids=["never tested", "another driver", "another vLLM", "failed"],
)
async def test_without_a_self_test_of_this_driver_and_this_engine_nothing_is_called(
    records: tuple[SelfTest, ...], says: str, tmp_path: Path
) -> None:
    async with stand() as (it, backend):
        backend.tests = SelfTests(tmp_path)
        for one in records:
            add(backend.tests, one)
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, it.notes, it.engine.calls) == ("active", True, [], [])
        assert says in ending.reason
        assert "backend vllm" in ending.reason


def add(tests: SelfTests, result: SelfTest) -> None:
    with tests.recording(result) as record:
        record(result)


PASSED = SelfTest(driver=DRIVER, engine="0.32.0", cycles=10, at=0.0)
FAILED = PASSED.model_copy(update={"trouble": "a restore hung"})


def test_a_record_is_replaced_and_a_file_that_cannot_be_read_permits_nothing_and_stays(tmp_path: Path) -> None:
    tests = SelfTests(tmp_path)
    for result in (FAILED, PASSED):
        add(tests, result)
    assert tests.read() == (PASSED,)
    assert tests.refusal(DRIVER, "0.32.0") == ""
    for damage in (b"[{", b"\xff"):
        (tmp_path / FILE).write_bytes(damage)
        assert "repair it, or remove it" in tests.refusal(DRIVER, "0.32.0")
        with pytest.raises(SelfTestsError, match="cannot be read"):
            add(tests, PASSED)
        assert (tmp_path / FILE).read_bytes() == damage
    assert SelfTests().refusal(DRIVER, "0.32.0")


@pytest.mark.parametrize("before", [None, PASSED, FAILED], ids=["never tested", "passed", "failed"])
def test_until_a_self_test_ends_the_result_before_counts(before: SelfTest | None, tmp_path: Path) -> None:
    tests, mark = SelfTests(tmp_path), PASSED.model_copy(update={"trouble": "it did not end"})
    if before is not None:
        add(tests, before)
    known = tests.refusal(DRIVER, "0.32.0")
    with tests.recording(mark) as record:
        assert tests.refusal(DRIVER, "0.32.0") == known
        with pytest.raises(SelfTestsError, match="another self-test runs"):
            add(tests, PASSED)
        assert FILE in {path.name for path in tmp_path.iterdir()}
        record(None)
    assert tests.refusal(DRIVER, "0.32.0") == known, "nothing was learned"
    with tests.recording(mark):
        pass
    assert "it did not end" in tests.refusal(DRIVER, "0.32.0"), "no process holds the lock any more"
    with tests.recording(mark) as record:
        record(None)
    assert "it did not end" in tests.refusal(DRIVER, "0.32.0"), "another one without a result does not repair that"
    add(tests, PASSED)
    assert tests.refusal(DRIVER, "0.32.0") == ""


def test_a_self_test_that_ends_while_it_is_read_counts_by_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, mark = SelfTests(tmp_path), PASSED.model_copy(update={"trouble": "it did not end"})
    running = tests.recording(mark)
    record, looks = running.__enter__(), []

    def free_by_now(_: SelfTests) -> bool:
        if not looks:
            record(PASSED)
            running.__exit__(None, None, None)
        looks.append(False)
        return False

    monkeypatch.setattr(SelfTests, "_under_way", free_by_now)
    assert tests.read() == (PASSED,)
    assert looks


def test_a_reader_does_not_keep_a_self_test_from_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = (tmp_path / f".{FILE}.lock").open("w")
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr(self_tests.time, "sleep", lambda _: reader.close())
    add(SelfTests(tmp_path), PASSED)
    assert reader.closed
    assert SelfTests(tmp_path).read() == (PASSED,)


async def test_what_the_driver_cannot_checkpoint_is_not_put_to_sleep() -> None:
    async with stand() as (it, backend):
        backend.host.machine = "aarch64"
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, it.engine.calls) == ("active", True, [])


async def test_where_the_end_of_a_restored_process_hangs_the_machine_none_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.checkpointer.engines.DRIVER", "595.71.05")
    async with stand() as (it, backend):
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.refused, it.engine.calls) == ("active", True, [])
        assert "can hang this machine" in ending.reason


@pytest.mark.parametrize("trouble", [StepTrouble.NOT_READY, StepTrouble.REFUSED])
async def test_a_park_that_the_driver_turns_back_wakes_the_engine(trouble: StepTrouble) -> None:
    async with stand() as (it, backend):
        it.readings.fails = {Verb.LOCK: trouble}
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome, ending.failed, it.engine.held) == ("active", True, FULL)
        assert ending.reason.startswith("lock:")
        assert it.notes == ["sleep", "lock", "wake"]


async def test_memory_that_no_process_accounts_for_is_neither_freed_nor_a_residue_nor_room() -> None:
    async with stand() as (it, backend):
        it.readings.unlisted = 3 * GIB
        seat = await it.found()
        parked = await backend.park(seat, it.note)
        assert (parked.outcome, parked.reason, parked.residue_bytes) == ("parked", "", 0)
        it.readings.others = 80 * GIB - FULL - 2 * GIB
        waits = await backend.activate(remembered(seat), it.note)
        assert (waits.outcome, waits.residue_bytes, it.notes) == ("parked", 0, PARK)
        assert waits.reason.startswith("room:")
        it.readings.others = 0
        assert (await backend.activate(remembered(seat), it.note)).outcome == "active"
        assert it.notes == PARK + ACTIVATE


async def test_a_checkpoint_after_a_sleep_that_frees_nothing_is_no_park(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand() as (it, backend):
        it.readings.unlisted = GIB
        move = it.readings.move

        async def vain(key: str, verb: Verb, member: Member, *rest: object) -> None:
            await move(key, verb, member, *rest)
            it.readings.unlisted += {Verb.CHECKPOINT: RESIDUE, Verb.RESTORE: -RESIDUE}.get(verb, 0)

        monkeypatch.setattr(it.readings, "move", vain)
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome != "parked", ending.failed) == (True, True)
        assert "memory in use on GPU-a fell by" in ending.reason


async def test_a_stopped_engine_is_parked_only_on_record() -> None:
    """By a debugger, say: it is awake, and no self-test and no rule was asked."""
    async with stand() as (it, backend):
        backend.tests = SelfTests()
        seat = await it.found()
        it.process.send_signal(signal.SIGSTOP)
        await until(lambda: backend.host.freezer.stopped(seat.members[0].who), what="it stands still")
        ending = await backend.park(seat, it.note)
        assert (ending.outcome, ending.refused, it.notes) == ("active", True, [])


async def test_a_checkpoint_that_fails_is_a_cold_start() -> None:
    async with stand() as (it, backend):
        it.readings.fails = {Verb.CHECKPOINT: StepTrouble.REFUSED}
        assert (await backend.park(await it.found(), it.note)).outcome == "lost"
        assert await it.process.wait() < 0


@pytest.mark.parametrize(("free_gib", "outcome"), [(5, "parked"), (4, "active")])
async def test_host_memory_is_reserved_for_what_a_sleep_leaves(free_gib: int, outcome: str) -> None:
    class Little(Plenty):
        async def free_bytes(self) -> int:
            return free_gib * GIB

    async with stand() as (it, backend):
        backend.host.headroom = Headroom(Little(), None)
        ending = await backend.park(await it.found(), it.note)
        assert (ending.outcome, it.engine.held) == (outcome, RESIDUE if outcome == "parked" else FULL)
        assert ending.failed == (outcome == "active"), "it slept in vain, and would at each switch"


async def test_nothing_is_restored_before_there_is_room_for_all_that_it_takes_awake() -> None:
    async with stand() as (it, backend):
        seat = await it.found()
        await backend.park(seat, it.note)
        it.notes.clear()
        it.readings.others = 60 * GIB
        ending = await backend.activate(remembered(seat), it.note)
        assert (ending.outcome, ending.failed, it.notes) == ("parked", False, [])
        assert ending.reason.startswith("room:")
        it.readings.others = 0
        assert not backend.host.reservations.holds(seat.owner, seat.at), "no reservation is left"
        assert (await backend.activate(remembered(seat), it.note)).outcome == "active"


async def test_a_seat_that_only_sleeps_is_activated_and_parked_as_any() -> None:
    async with stand() as (it, backend):
        seat = await it.found()
        it.engine.asleep, it.engine.held = True, RESIDUE
        assert (await backend.state(remembered(seat))).outcome == "parked"
        assert (await backend.replay(remembered(seat), JobGoal.PARKED, it.note)).residue_bytes == RESIDUE
        assert (await backend.park(remembered(seat), it.note)).residue_bytes == 0
        assert it.notes == ["lock", "checkpoint", "freeze"]
        it.readings.at, it.engine.asleep = ProcessState.RUNNING, True
        await backend.thaw(seat)
        it.notes.clear()
        assert (await backend.activate(remembered(seat), it.note)).outcome == "active"
        assert it.notes == ["wake"]


async def test_a_restore_that_is_refused_is_tried_again_once() -> None:
    async with stand() as (it, backend):
        seat = remembered(await it.found())
        await backend.park(seat.model_copy(update={"parked_on": ()}), it.note)
        it.readings.fails = {Verb.RESTORE: StepTrouble.REFUSED}
        first = await backend.activate(seat, it.note)
        assert (first.outcome, first.failed) == ("parked", True)
        again = await backend.activate(seat.model_copy(update={"refusals": 1}), it.note)
        assert again.outcome == "lost"


async def test_an_engine_that_the_driver_restored_is_checkpointed_before_it_is_killed() -> None:
    async with stand() as (it, backend):
        assert (await backend.kill(await it.found(), it.note)).outcome == "gone"
        assert it.notes == ["lock", "checkpoint", "kill"]


# --- the self-test ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def engine(here: Node, *options: str, seat: str = "") -> AsyncIterator[tuple[str, int]]:
    """(address, pid) of a vLLM that serves, outside of any seat unless one is named."""
    host, port = own_address(), free_port()
    variables = {"KYB_FAKE_DRIVER": str(here.socket), "VLLM_SERVER_DEV_MODE": "1", "KYB_SPEED": "50"}
    gpus = {"KYB_FAKE_GPU": here.gpus[0], "CUDA_VISIBLE_DEVICES": here.gpus[0]}
    words = [
        "--api",
        "vllm",
        "--enable-sleep-mode",
        "--model",
        "m",
        "--vram",
        "20GiB",
        "--host",
        host,
        "--port",
        str(port),
        *options,
    ]
    if here.stubs is not None:
        words.append("--cuda")
        gpus = {"NVIDIA_VISIBLE_DEVICES": here.gpus[0], "LD_LIBRARY_PATH": str(here.stubs)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kybernate.dev.fakes.engine", *words),
        env={**plain_environment(), **variables, **gpus, **({"KYB_GPU_SEAT": seat} if seat else {})},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://{host}:{port}"

    async def serves() -> bool:
        try:
            async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    try:
        await until(serves, what="the engine serves", timeout=60)
        yield url, process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def started_doctor(here: Node, *arguments: str) -> asyncio.subprocess.Process:
    variables = environment(here) | {"PYTHONPATH": ":".join(sys.path)}
    return await asyncio.create_subprocess_exec(
        *KYB, *arguments, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def doctor(here: Node, *arguments: str) -> tuple[int, str]:
    """Exit code and output of ``kyb doctor gpu``."""
    process = await started_doctor(here, *arguments)
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.timeout(180)
async def test_the_doctor_tests_an_engine_through_the_library_and_switches_the_backend_on() -> None:
    async with node("ctypes") as here, engine(here) as (url, pid):
        (here.folder / "state").mkdir()
        code, out = await doctor(here, "--self-test", url, "--pid", str(pid), "--cycles", "2", "-o", "json")
        assert code == 0, out
        (finding,) = json.loads(out)["findings"]
        assert (finding["level"], finding["check"]) == ("OK", "vllm+cuda")
        (record,) = SelfTests(here.folder / "state").read()
        assert (record.engine, record.cycles, record.trouble) == ("0.32.0", 2, "")
        assert SelfTests(here.folder / "state").refusal(record.driver, "0.32.0") == ""
        assert (await here.used())[here.gpus[0]] == 20 * GIB, "it serves on"
        assert (await here.violations())["count"] == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ({"fault": "hang", "verb": "restore", "times": 9}, (), "hang"),
        ({"fault": "fail", "verb": "checkpoint", "code": 801, "times": 9}, (), "NOT_SUPPORTED"),
        ({}, ("--lie", "wake-garbles@2"), "cycle 2 of 3"),
    ],
    ids=["H16", "a checkpoint that fails", "other answers"],
)
async def test_a_self_test_that_fails_is_on_record_and_ends_the_engine(
    fault: dict[str, object], options: tuple[str, ...], says: str
) -> None:
    async with node() as here, engine(here, *options) as (url, pid):
        (here.folder / "state").mkdir()
        if fault:
            await here.client.call("inject", **fault)
        settings = CheckpointerSettings.from_env(environment(here))
        result = await self_test(settings, url, pid, 3)
        assert says in result.trouble
        assert ("the engine was killed" in result.trouble) == (identify(pid) is None)
        assert SelfTests(here.folder / "state").read() == (result,)
        assert says in SelfTests(here.folder / "state").refusal("fake", "0.32.0")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_self_test_after_its_cycle_and_leaves_the_engine_serving(signum: signal.Signals) -> None:
    async with node() as here, engine(here) as (url, pid):
        tests = SelfTests(here.folder / "state")
        (here.folder / "state").mkdir()
        process = await started_doctor(here, "--self-test", url, "--pid", str(pid), "--cycles", "1000")
        root = identify(pid)
        assert root is not None
        await until(lambda: any(map(stopped, tree(root))), what="the engine is parked and stands still", timeout=60)
        process.send_signal(signum)
        out, _ = await process.communicate()
        assert (process.returncode, "a signal ended it after" in out.decode()) == (2, True), out.decode()
        assert (await here.used())[here.gpus[0]] == 20 * GIB
        async with aiohttp.ClientSession() as http, http.get(f"{url}/is_sleeping") as answer:
            assert await answer.json() == {"is_sleeping": False}
        assert "until a self-test has passed" in tests.refusal("fake", "0.32.0"), "nothing was learned"


@pytest.mark.timeout(180)
async def test_what_is_not_the_drivers_fault_is_no_result() -> None:
    async with node() as here, engine(here) as (url, pid):
        tests = SelfTests(here.folder / "state")
        (here.folder / "state").mkdir()
        add(tests, PASSED.model_copy(update={"driver": "fake"}))
        settings = CheckpointerSettings.from_env(environment(here))
        body = {"model": "m", "prompt": "hello", "max_tokens": 100_000}
        async with aiohttp.ClientSession() as http:
            busy = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
            try:
                with pytest.raises(UnfitError, match="still computes 1 requests; the engine serves"):
                    await self_test(settings, url, pid, 3)
                assert not busy.done()
            finally:
                busy.cancel()
                await asyncio.wait([busy])
        assert tests.refusal("fake", "0.32.0") == ""


@pytest.mark.timeout(180)
async def test_only_the_engine_at_the_address_is_tested_and_only_alone_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node() as here, engine(here) as (url, pid), engine(here) as (other, beside):
        (here.folder / "state").mkdir()
        settings = CheckpointerSettings.from_env(environment(here))
        with monkeypatch.context() as hurry:
            hurry.setattr("services.checkpointer.self_test.ACCEPT_SECONDS", 0.5)
            with pytest.raises(UnfitError, match=f"is not served by pid {pid} or a child of it"):
                await self_test(settings, other, pid, 1)
        with pytest.raises(UnfitError, match=rf"pid {beside} \(.*\) has memory on {here.gpus[0]}, too"):
            await self_test(settings, url, pid, 1)
        with pytest.raises(UnfitError, match="started this self-test"):
            await self_test(settings, url, os.getpid(), 1)
        assert (await here.used())[here.gpus[0]] == 40 * GIB, "both serve"
        assert not SelfTests(here.folder / "state").read()


@pytest.mark.timeout(120)
async def test_a_self_test_that_is_interrupted_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> str:
        raise asyncio.CancelledError

    monkeypatch.setattr("services.checkpointer.self_test._cycle", interrupted)
    async with node() as here, engine(here) as (url, pid):
        (here.folder / "state").mkdir()
        settings = CheckpointerSettings.from_env(environment(here))
        with pytest.raises(asyncio.CancelledError):
            await self_test(settings, url, pid, 1)
        assert identify(pid) is None
        assert "did not end" in SelfTests(here.folder / "state").refusal("fake", "0.32.0")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("variables", [{}, {"KYB_GPU_SEAT": "s00"}], ids=["not readable", "a seat below"])
async def test_a_process_that_may_have_a_seat_is_not_tested(variables: dict[str, str]) -> None:
    """``env -i`` empties the environment as one that cannot be read is empty."""
    words = [f"{name}={value}" for name, value in variables.items()]
    async with node() as here:
        settings = CheckpointerSettings.from_env(environment(here))
        process = await asyncio.create_subprocess_exec("sh", "-c", f"env -i {' '.join(words)} sleep 600 & wait")
        try:
            root = identify(process.pid)
            assert root is not None
            await until(lambda: [pid for pid in tree(root)[1:] if name_of(pid.pid) == "sleep"], what="it sleeps")
            with pytest.raises(UnfitError, match="a seat"):
                await self_test(settings, "http://127.0.0.1:1", process.pid, 1)
            with pytest.raises(ValueError, match="at least 1"):
                await self_test(settings, "http://127.0.0.1:1", process.pid, 0)
        finally:
            for one in reversed(tree(root) if root else []):
                send(one, signal.SIGKILL)
            await process.wait()


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.timeout(120)
async def test_the_engine_of_a_seat_is_not_tested() -> None:
    async with node() as here, engine(here, seat="s00") as (url, pid):
        settings = CheckpointerSettings.from_env(environment(here))
        with pytest.raises(UnfitError, match="has a seat"):
            await self_test(settings, url, pid, 1)
        assert (await here.used())[here.gpus[0]] == 20 * GIB
        code, out = await doctor(here, "--self-test", url)
        assert (code, "--pid" in out) == (2, True)
