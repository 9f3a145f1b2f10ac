"""The self-test of ``vllm+cuda``: does this node's driver bring this vLLM back? ``kyb doctor gpu --self-test`` runs it.

It parks and activates, as the checkpointer would, an engine that no seat has, and compares its answers after each
cycle. The result goes into the state folder, where it switches the backend on or off for this pair of driver and
engine; so does the beginning, in case that the machine does not survive. What says nothing about the driver (no room,
a busy engine, a signal) is no result. SIGTERM, SIGINT and SIGHUP end it after the cycle that runs, so that the engine
serves. Output: the record as one JSON line.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kybernate.engines import VLLM_CUDA
from kybernate.extras import ExtraMissingError
from kybernate.messages import SeatTarget
from kybernate.self_tests import SelfTest, SelfTests, SelfTestsError
from kybernate.settings import SettingsError
from services.checkpointer.backends import open_backends
from services.checkpointer.backends.driver_calls import StepFailedError
from services.checkpointer.backends.host import open_host
from services.checkpointer.backends.port import (
    DriverUnreadableError,
    EngineSilentError,
    NoMemberError,
    NoProcessError,
    SeatProcesses,
)
from services.checkpointer.backends.vllm_cuda import VllmCuda
from services.checkpointer.core.refusals import comma_list
from services.checkpointer.engine_http import AnswerCheck, open_engines
from services.checkpointer.helper_pool import HelperPool, Leftover
from services.checkpointer.processes import ProcessIdentity, alive, connected, identify, tree
from services.checkpointer.settings import CheckpointerSettings, helper_command

ASK_SECONDS = 10.0
ACCEPT_SECONDS = 5.0
POLL_SECONDS = 0.05
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOT_BY_DRIVER = ("checks:", "headroom:", "room:")
"""Steps whose failure is about the engine's requests, or about memory that others have, and not about the driver."""


class UnfitError(Exception):
    """This engine cannot be tested, which says nothing about the driver; the text has the remedy."""


class _Trial(SelfTests):
    """Permits what is being tested."""

    def refusal(self, driver: str, engine: str) -> str:  # noqa: ARG002
        """Nothing is refused."""
        return ""


async def self_test(settings: CheckpointerSettings, url: str, pid: int, cycles: int) -> SelfTest:
    """The result, which is on record. Raises UnfitError, SelfTestsError, ValueError, ExtraMissingError or OSError."""
    if cycles < 1:
        raise ValueError(f"--cycles {cycles}: at least 1")
    timeouts, tests = settings.timeouts, SelfTests(settings.state_dir)
    host = open_host(settings.fake_driver, timeouts.settle(), comma_list(settings.park_allow), fake_kubelet=True)
    async with contextlib.AsyncExitStack() as stack:
        stopped = stack.enter_context(_stopped_by_signals())
        helpers = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # those of the checkpointer are its own
        pool = await stack.enter_async_context(HelperPool(helper_command(settings), helpers))
        http = await stack.enter_async_context(open_engines(settings.engine_keys_dir))
        backend = open_backends(pool, timeouts, host, http=http, self_tests=_Trial())[VLLM_CUDA]
        assert isinstance(backend, VllmCuda)
        check = AnswerCheck(http, speed=settings.speed)
        try:
            seat, driver, engine = await _found(backend, url, pid, settings.helpers_dir)
        except (NoProcessError, NoMemberError, DriverUnreadableError, EngineSilentError, StepFailedError) as error:
            raise UnfitError(str(error)) from error
        seat = await check.recorded(seat)
        try:
            why = await backend.refusal(seat)
        except EngineSilentError as error:
            why = str(error)
        if why := why or ("" if seat.answers else f"no model answers at {url}"):
            raise UnfitError(why)
        mark = SelfTest(
            driver=driver,
            engine=engine,
            cycles=cycles,
            at=time.time(),
            trouble="it did not end: it was killed, or the machine went down",
        )
        record = stack.enter_context(tests.recording(mark))
        try:
            result = mark.model_copy(update={"trouble": await _cycles(backend, check, seat, cycles, stopped)})
        except UnfitError:
            record(None)
            raise
        record(result)
        return result


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], bool]]:
    """True once a signal has asked for the end."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for one in STOPS:
        loop.add_signal_handler(one, asked.set)
    try:
        yield asked.is_set
    finally:
        for one in STOPS:
            loop.remove_signal_handler(one)


@dataclass(frozen=True, slots=True)
class _Turn:
    """How one cycle ended."""

    trouble: str = ""
    by_driver: bool = True
    """False: what went wrong says nothing about driver and engine."""
    serves: bool = False


async def _cycles(
    backend: VllmCuda, check: AnswerCheck, seat: SeatProcesses, cycles: int, stopped: Callable[[], bool]
) -> str:
    """Why the pair has failed, empty if it has not; an engine that may not serve then is killed. Raises UnfitError."""
    for number in range(1, cycles + 1):
        if stopped():
            raise UnfitError(f"a signal ended it after {number - 1} of {cycles} cycles; the engine serves")
        turn, end = _Turn("it was interrupted"), "serves"
        try:
            turn = await _cycle(backend, check, seat)
        finally:
            if not turn.serves:  # it may sleep or stand still
                killed = await backend.kill(seat, _not_journaled)
                end = "was killed" if killed.outcome == "gone" else f"was not killed ({killed.reason}): end it by hand"
        text = f"cycle {number} of {cycles}: {turn.trouble}; the engine {end}"
        if not turn.by_driver:
            raise UnfitError(text)
        if turn.trouble:
            return text
    return ""


async def _found(backend: VllmCuda, url: str, pid: int, helpers: Path) -> tuple[SeatProcesses, str, str]:
    """The engine, and the versions of driver and engine. ``helpers``: the folder where the checkpointer notes its."""
    root, inspection = identify(pid), backend.host.inspection
    processes = tree(root) if root is not None else []
    for process in processes:
        if process.pid == os.getpid():
            raise UnfitError(f"pid {pid} started this self-test: name the first process of the vLLM")
        if not (variables := inspection.environment(process)):
            raise UnfitError(f"the environment of pid {process.pid} cannot be read: whether it has a seat is not known")
        if variables.get("KYB_GPU_SEAT"):
            raise UnfitError(f"pid {process.pid} has a seat: start another vLLM for the test")
    name, container = f"self-test-{pid}", f"process://{pid}"
    target = SeatTarget(seat=name, pod_uid="", container_id=container, gpus=(), backend=VLLM_CUDA, endpoint=url)
    seat = await backend.discover(target, "ask", 0)
    await _same(url, processes)
    await _alone(backend, seat, processes, helpers)
    driver = (await backend.calls.describe("ask", fresh=True)).version
    engine = await backend.engine.version(seat, ASK_SECONDS)
    if not (driver and engine):
        raise UnfitError(f"the versions are not known: driver {driver!r}, vLLM {engine!r}")
    return seat, driver, engine


async def _same(url: str, processes: list[ProcessIdentity]) -> None:
    """Prove that the address is served by one of these processes. Raises UnfitError."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except (OSError, ValueError) as error:
        raise UnfitError(f"{url} does not answer: {error or 'in time'}") from error
    try:
        client, deadline = writer.get_extra_info("sockname")[:2], time.monotonic() + ACCEPT_SECONDS
        while not connected(processes, client):
            if time.monotonic() > deadline:
                raise UnfitError(
                    f"{url} is not served by pid {processes[0].pid} or a child of it; give the address on which that "
                    "vLLM listens itself, not one of a Service, a proxy or a mapped port"
                )
            await asyncio.sleep(POLL_SECONDS)
    finally:
        writer.close()


async def _alone(backend: VllmCuda, seat: SeatProcesses, processes: list[ProcessIdentity], helpers: Path) -> None:
    """Prove that no other process has memory on its GPUs: a driver that hangs takes it with it. Raises UnfitError."""
    if not seat.memory_on:
        raise UnfitError(f"the driver lists no memory of pid {processes[0].pid}: on which GPU it is is not known")
    ours = {process.pid for process in processes} | {member.who.pid for member in seat.members}
    with contextlib.suppress(FileNotFoundError):
        ours |= {one.who.pid for one in Leftover.read(helpers) if alive(one.who)}
    for use in await backend.calls.processes("ask", seat.memory_on):
        if use.holds and use.pid not in ours:
            name = backend.host.inspection.name(use.pid) or "not visible"
            raise UnfitError(
                f"pid {use.pid} ({name}) has memory on {use.gpu}, too: drain the group, and delete the pods of the "
                "seats that are parked there, or use another GPU"
            )


async def _cycle(backend: VllmCuda, check: AnswerCheck, seat: SeatProcesses) -> _Turn:
    """Park and activate it once."""
    ending = await backend.park(await backend.prepare(seat.model_copy(update={"reading": None})), _not_journaled)
    if ending.outcome == "active" and ending.reason.startswith(_NOT_BY_DRIVER):
        return _Turn(ending.reason, by_driver=False, serves=True)
    if ending.outcome != "parked" or ending.reason:
        return _Turn(f"the park ended {ending.outcome}: {ending.reason}")
    parked = seat.model_copy(update={"parked_on": seat.at, "residue_bytes": ending.residue_bytes})
    ending = await backend.activate(parked, _not_journaled)
    if ending.outcome == "parked" and ending.reason.startswith(_NOT_BY_DRIVER):
        return _Turn(ending.reason, by_driver=False)
    if ending.outcome != "active" or ending.reason:
        return _Turn(f"the activation ended {ending.outcome}: {ending.reason}")
    wrong = await check.wrong(seat)
    return _Turn(wrong, serves=not wrong)


async def _not_journaled(step: str, pid: int | None, detail: str = "") -> None:
    """No replay: an engine without a seat is ended by hand."""


def main() -> None:
    """Run it. Exit code 0: passed, 1: failed, 2: not tested."""
    parser = argparse.ArgumentParser(prog="services.checkpointer.self_test")
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--cycles", type=int, default=10)
    options = parser.parse_args()
    try:
        settings = CheckpointerSettings.from_env()
        test = asyncio.run(self_test(settings, options.url.rstrip("/"), options.pid, options.cycles))
    except (UnfitError, SelfTestsError, SettingsError, ExtraMissingError, ValueError, OSError) as error:
        sys.stderr.write(f"kyb: the self-test was not made: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.write(test.model_dump_json() + "\n")
    raise SystemExit(1 if test.trouble else 0)


if __name__ == "__main__":
    main()
