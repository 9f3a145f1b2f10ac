"""``kyb doctor``: what works on this machine, one line each."""

import json
import os

import typer

from kybernate.cli.errors import CliError
from kybernate.cuda import Binding
from kybernate.doctor import DoctorError, Finding, examine_gpu, exit_code

_CHECK_WIDTH = 12


def gpu(binding: Binding, seconds: float, *, as_json: bool) -> None:
    """Look, print, and end with 1 if something fails."""
    try:
        findings = examine_gpu(os.environ, binding=binding, seconds=seconds)
    except DoctorError as error:
        raise CliError(str(error), code=2) from None
    code = exit_code(findings)
    if as_json:
        print(json.dumps({"ok": code == 0, "findings": [finding.as_json() for finding in findings]}))
    else:
        for finding in findings:
            print(line(finding))
    raise typer.Exit(code)


def line(finding: Finding) -> str:
    """``WARN persistence  off on GPU 0 → nvidia-smi -pm 1``."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:4} {finding.check:{_CHECK_WIDTH}} {finding.finding}{remedy}"
