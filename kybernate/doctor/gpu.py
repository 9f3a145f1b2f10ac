"""``kyb doctor gpu``: can processes be parked here, and if not, why. Reads the driver in a child process."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from kybernate import programs
from kybernate.doctor.driver_checks import check_backends, check_driver, self_tested
from kybernate.doctor.host import read_host
from kybernate.doctor.host_checks import check_host
from kybernate.doctor.model import DriverFacts, Finding, GpuFacts, Severity, warn
from kybernate.engines import VLLM_CUDA
from kybernate.extras import ExtraMissingError, dev_part
from kybernate.machine import GpuProcess
from kybernate.self_tests import SelfTest, SelfTests, SelfTestsError
from kybernate.settings import NodeSettings


class DoctorError(Exception):
    """Wrong usage of the doctor; the text says what to do."""


def examine_gpu(environment: Mapping[str, str], *, seconds: float = 60.0, root: Path = Path("/")) -> list[Finding]:
    """All findings. ``seconds`` (wall) is the deadline of the driver. Raises DoctorError."""
    socket = environment.get("KYB_FAKE_DRIVER")
    kind = environment.get("KYB_DRIVER") or ("fake" if socket else "cuda")
    if kind not in ("cuda", "fake"):
        raise DoctorError(f"KYB_DRIVER={kind!r}: known are cuda and fake")
    if kind == "cuda":
        driver = read_driver(environment, seconds)
    else:
        if not socket:
            raise DoctorError("KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket")
        try:
            driver = dev_part("driver_facts", "KYB_DRIVER=fake")(socket)
        except ExtraMissingError as error:
            raise DoctorError(str(error)) from error
        except OSError as error:
            raise DoctorError(f"KYB_FAKE_DRIVER={socket}: {error}") from error
    host = read_host(sorted({use.pid for use in driver.uses}), root)
    findings = [*check_driver(driver, host), *check_host(driver, host)]
    folder = Path(environment.get("KYB_STATE_DIR", NodeSettings.model_fields["state_dir"].default))
    try:
        tests = SelfTests(folder).read()
    except SelfTestsError as error:
        return [*findings, *check_backends(driver, findings), warn(VLLM_CUDA, f"off: {error}", "kyb.ai/backend: vllm")]
    return [*findings, *check_backends(driver, findings, tests)]


def self_test(environment: Mapping[str, str], url: str, pid: int, cycles: int) -> Finding:
    """Test ``vllm+cuda`` with the engine ``pid`` at ``url``, in the checkpointer's environment, and keep the result
    where that reads it. Signals are passed on: it ends after the cycle that runs. Raises DoctorError if the engine
    cannot be tested."""
    words = (*_SELF_TEST, "--url", url, "--pid", str(pid), "--cycles", str(cycles))
    variables, pipe = programs.environment(environment), subprocess.PIPE
    test = subprocess.Popen(words, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    before = {one: signal.signal(one, lambda *_: test.terminate()) for one in _STOPS}
    try:
        out, errors = test.communicate()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if test.returncode not in (0, 1) or not out:
        lines = errors.strip().splitlines()
        raise DoctorError(lines[-1].removeprefix("kyb: ") if lines else f"the self-test ended with {test.returncode}")
    found = self_tested(SelfTest.model_validate_json(out.splitlines()[-1]))
    return replace(found, level=Severity.FAIL) if test.returncode else found


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SELF_TEST = (sys.executable, "-m", "services.checkpointer.self_test")
_PROBE = (sys.executable, "-m", "kybernate.doctor.driver_probe")
_KILL_SECONDS = 5.0


def read_driver(environment: Mapping[str, str], seconds: float) -> DriverFacts:
    """The facts from libcuda and NVML within ``seconds`` (wall); a call that hangs or crashes is a fact as well."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        probe = subprocess.Popen(_PROBE, stdout=output, stderr=errors, env=dict(environment), start_new_session=True)
        try:
            code: int | None = probe.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            probe.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # inside the driver it may survive SIGKILL
                probe.wait(_KILL_SECONDS)
        except BaseException:
            probe.kill()
            raise
        ended = f"did not end within {seconds:g} s" if code is None else _exit_text(code, errors)
        output.seek(0)
        lines = [line for line in output.read().decode().splitlines(keepends=True) if line.endswith("\n")]
    return replace(gather(lines, ended), fake="KYB_FAKE_DRIVER" in environment)


def gather(lines: Iterable[str], ended: str) -> DriverFacts:
    """Facts from the output of the child; ``ended``: how it failed, or empty. Pure."""
    facts: dict[str, Any] = {"answers": {}}
    step = "starting"
    for line in lines:
        entry = json.loads(line)
        step = entry.pop("begin", step)
        facts["answers"] |= {int(pid): code for pid, code in entry.pop("answers", {}).items()}
        facts |= entry
    gpus = tuple(GpuFacts(index=index, **gpu) for index, gpu in enumerate(facts.pop("gpus", ())))
    uses = tuple(GpuProcess(**use) for use in facts.pop("uses", ()))
    return DriverFacts(**facts, gpus=gpus, uses=uses, hung=f"{step} {ended}" if ended else "")


def _exit_text(code: int, errors: IO[bytes]) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"failed: {lines[-1] if lines else f'exit code {code}'}"
