"""The self-test of ``vllm+cuda``: does this node's driver bring this vLLM back? ``kyb doctor gpu --self-test`` runs it.

It parks and activates, as the checkpointer would, an engine that no seat has, and compares its answers after each
cycle. The result goes into the state folder, where it switches the backend on or off for this pair of driver and
engine; so does the beginning, in case that the machine does not survive. Output: the record as one JSON line.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from kybernate.engines import VLLM_CUDA
from kybernate.extras import ExtraMissingError
from kybernate.messages import SeatTarget
from kybernate.self_tests import SelfTest, SelfTests
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
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.processes import identify, tree
from services.checkpointer.settings import CheckpointerSettings, helper_command

ASK_SECONDS = 10.0


class UnfitError(Exception):
    """This engine cannot be tested, which says nothing about the driver; the text has the remedy."""


class _Trial(SelfTests):
    """Permits what is being tested."""

    def refusal(self, driver: str, engine: str) -> str:  # noqa: ARG002
        """Nothing is refused."""
        return ""


async def self_test(settings: CheckpointerSettings, url: str, pid: int, cycles: int) -> SelfTest:
    """The result, which is on record. Raises UnfitError, ValueError, ExtraMissingError or OSError."""
    if cycles < 1:
        raise ValueError(f"--cycles {cycles}: at least 1")
    timeouts, tests = settings.timeouts, SelfTests(settings.state_dir)
    host = open_host(settings.fake_driver, timeouts.settle(), comma_list(settings.park_allow), fake_kubelet=True)
    async with contextlib.AsyncExitStack() as stack:
        helpers = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # those of the checkpointer are its own
        pool = await stack.enter_async_context(HelperPool(helper_command(settings), helpers))
        http = await stack.enter_async_context(open_engines(settings.engine_keys_dir))
        backend = open_backends(pool, timeouts, host, http=http, self_tests=_Trial())[VLLM_CUDA]
        assert isinstance(backend, VllmCuda)
        check = AnswerCheck(http, settings.verify_seconds, settings.verify_tolerance, settings.speed)
        try:
            seat, driver, engine = await _found(backend, url, pid)
        except (NoProcessError, NoMemberError, DriverUnreadableError, EngineSilentError, StepFailedError) as error:
            raise UnfitError(str(error)) from error
        seat = await check.recorded(seat)
        if why := await backend.refusal(seat) or ("" if seat.answers else f"no model answers at {url}"):
            raise UnfitError(why)
        result = SelfTest(driver=driver, engine=engine, cycles=cycles, at=time.time(), trouble="it did not end")
        tests.add(result)
        trouble = ""
        for turn in range(1, cycles + 1):
            found = "it was interrupted"
            try:
                found = await _cycle(backend, check, seat)
            finally:
                if found:  # it may sleep or stand still
                    await backend.kill(seat, _not_journaled)
            if found:
                trouble = f"cycle {turn} of {cycles}: {found}"
                break
        result = result.model_copy(update={"trouble": trouble})
        tests.add(result)
        return result


async def _found(backend: VllmCuda, url: str, pid: int) -> tuple[SeatProcesses, str, str]:
    """The engine, and the versions of driver and engine."""
    root, inspection = identify(pid), backend.host.inspection
    for process in tree(root) if root is not None else ():
        if not (variables := inspection.environment(process)):
            raise UnfitError(f"the environment of pid {process.pid} cannot be read: whether it has a seat is not known")
        if variables.get("KYB_GPU_SEAT"):
            raise UnfitError(f"pid {process.pid} has a seat: start another vLLM for the test")
    name, container = f"self-test-{pid}", f"process://{pid}"
    target = SeatTarget(seat=name, pod_uid="", container_id=container, gpus=(), backend=VLLM_CUDA, endpoint=url)
    seat = await backend.discover(target, "ask", 0)
    driver = (await backend.calls.describe("ask", fresh=True)).version
    engine = await backend.engine.version(seat, ASK_SECONDS)
    if not (driver and engine):
        raise UnfitError(f"the versions are not known: driver {driver!r}, vLLM {engine!r}")
    return seat, driver, engine


async def _cycle(backend: VllmCuda, check: AnswerCheck, seat: SeatProcesses) -> str:
    """Park and activate it once; what went wrong, empty if nothing did."""
    ending = await backend.park(await backend.prepare(seat), _not_journaled)
    if ending.outcome != "parked" or ending.reason:
        return f"the park ended {ending.outcome}: {ending.reason}"
    parked = seat.model_copy(update={"parked_on": seat.at, "residue_bytes": ending.residue_bytes})
    ending = await backend.activate(parked, _not_journaled)
    if ending.outcome != "active" or ending.reason:
        return f"the activation ended {ending.outcome}: {ending.reason}"
    return await check.wrong(seat)


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
    except (UnfitError, SettingsError, ExtraMissingError, ValueError, OSError) as error:
        sys.stderr.write(f"kyb: the self-test was not made: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.write(test.model_dump_json() + "\n")
    raise SystemExit(1 if test.trouble else 0)


if __name__ == "__main__":
    main()
