"""``kyb doctor gpu``: can processes be parked here, and if not, why. Reads the driver in a child process."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import IO, Any

from kybernate.doctor.driver_checks import check_backends, check_driver
from kybernate.doctor.host import read_host
from kybernate.doctor.host_checks import check_host
from kybernate.doctor.model import DriverFacts, Finding
from kybernate.extras import dev_part
from kybernate.machine import Gpu, GpuProcess
from kybernate.settings import NodeSettings, SettingsError


def examine_gpu(environment: Mapping[str, str], *, seconds: float = 60.0) -> list[Finding]:
    """All findings. ``seconds`` (wall): the driver's deadline. Raises SettingsError, ExtraMissingError."""
    names = {"KYB_DRIVER", "KYB_FAKE_DRIVER"} & environment.keys()
    settings = NodeSettings.from_env({name: environment[name] for name in names})
    if not settings.fakes:
        driver = read_driver(environment, seconds)
    elif settings.fake_driver is None:
        raise SettingsError("KYB_DRIVER=fake needs KYB_FAKE_DRIVER, the fake driver's socket")
    else:
        try:
            driver = dev_part("driver_facts", "KYB_DRIVER=fake")(str(settings.fake_driver))
        except OSError as error:
            raise SettingsError(f"KYB_FAKE_DRIVER={settings.fake_driver}: {error}") from error
    host = read_host(sorted({use.pid for use in driver.uses}))
    findings = [*check_driver(driver, host), *check_host(driver, host)]
    return [*findings, *check_backends(driver, findings)]


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
    gpus = tuple(Gpu(**gpu) for gpu in facts.pop("gpus", ()))
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
