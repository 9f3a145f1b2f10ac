"""``kyb doctor``: what works on this machine, one line each."""

import json
import os
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import CliError, Output, OutputOption

if TYPE_CHECKING:
    from kybernate.doctor import Finding

_CHECK_WIDTH = 12
doctor_app = typer.Typer(no_args_is_help=True, help="What works on this machine, and how to repair the rest.")


class CudaBinding(StrEnum):
    """How libcuda is called."""

    AUTO = "auto"
    BINDINGS = "bindings"
    CTYPES = "ctypes"


@doctor_app.callback()
def _group() -> None:
    """Keep the name of the one command."""


@doctor_app.command("gpu")
def gpu(
    binding: Annotated[
        CudaBinding, typer.Option(envvar="KYB_CUDA_BINDING", help="auto: cuda-bindings if usable, else ctypes.")
    ] = CudaBinding.AUTO,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the driver may take to answer.")] = 60.0,
    output: OutputOption = Output.TEXT,
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Check whether GPU processes can be parked here. Exit code 1: at least one check fails."""
    from kybernate.doctor import DoctorError, examine_gpu, exit_code

    try:
        findings = examine_gpu(os.environ, binding=binding.value, seconds=timeout)
    except DoctorError as error:
        raise CliError(str(error), code=2) from None
    code = exit_code(findings)
    if as_json or output is Output.JSON:
        print(json.dumps({"ok": code == 0, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            print(line(finding))
    raise typer.Exit(code)


def line(finding: "Finding") -> str:
    """``WARN persistence  off on GPU 0 → nvidia-smi -pm 1``."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:4} {finding.check:{_CHECK_WIDTH}} {finding.finding}{remedy}"
