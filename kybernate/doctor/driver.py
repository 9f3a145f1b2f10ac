"""The driver's facts: from a child process that may be killed, or from the fake driver."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import IO, Any

from kybernate.cuda import Binding
from kybernate.doctor.facts import DriverFacts, GpuFacts, UseFacts

_PROBE = (sys.executable, "-m", "kybernate.doctor.driver_probe", "--binding")
_KILL_SECONDS = 5.0


def read_driver(environment: Mapping[str, str], binding: Binding, seconds: float) -> DriverFacts:
    """What libcuda and NVML say within ``seconds`` (wall); a call that hangs or crashes is a fact as well."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaints:
        probe = subprocess.Popen(
            (*_PROBE, binding), stdout=said, stderr=complaints, env=dict(environment), start_new_session=True
        )
        try:
            code: int | None = probe.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            probe.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # inside the driver it may not even die
                probe.wait(_KILL_SECONDS)
        except BaseException:
            probe.kill()
            raise
        ended = f"did not end within {seconds:g} s" if code is None else _ending(code, complaints)
        said.seek(0)
        lines = [line for line in said.read().decode().splitlines(keepends=True) if line.endswith("\n")]
    return replace(gather(lines, ended), fake="KYB_FAKE_DRIVER" in environment)


def gather(lines: Iterable[str], ended: str) -> DriverFacts:
    """Facts from what the child wrote; ``ended``: what was wrong with its end, or empty. Pure."""
    facts: dict[str, Any] = {"answers": {}}
    step = "starting"
    for line in lines:
        said = json.loads(line)
        step = said.pop("begin", step)
        facts["answers"] |= {int(pid): code for pid, code in said.pop("answers", {}).items()}
        facts |= said
    gpus = tuple(GpuFacts(index=index, **gpu) for index, gpu in enumerate(facts.pop("gpus", ())))
    uses = tuple(UseFacts(**use) for use in facts.pop("uses", ()))
    return DriverFacts(**facts, gpus=gpus, uses=uses, hung=f"{step} {ended}" if ended else "")


def _ending(code: int, complaints: IO[bytes]) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return f"failed: {lines[-1] if lines else f'exit code {code}'}"
