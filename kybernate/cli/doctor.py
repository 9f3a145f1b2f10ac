"""``kyb doctor``: what works on this machine, one line each."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kybernate.cli.output import Commands, answer

if TYPE_CHECKING:
    from kybernate.doctor import Finding

_CHECK_WIDTH = 12
doctor_app = Commands(help="What is wrong, and how to repair it.")


@doctor_app.callback(invoke_without_command=True, epilog="Example: kyb doctor --bundle report.tar.gz")
def stack(
    context: typer.Context,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write findings, state, events, logs and configuration there.")
    ] = None,
) -> None:
    """Check the whole stack: machine, processes, cluster, router, bus, clocks, configuration, gate, seats, engines.

    Exit code 1: at least one check fails.
    """
    if context.invoked_subcommand is not None:
        return
    from kybernate.cli.stack_facts import read_facts, write_bundle
    from kybernate.doctor.stack import check_stack

    findings = list(check_stack(facts := read_facts()))
    if bundle is not None:
        members = write_bundle(bundle, findings, facts.cluster)
        sys.stderr.write(f"kyb: wrote {bundle}: {len(members)} files, without keys and passwords\n")
    _report(findings)


@doctor_app.command("gpu", epilog="Example: kyb doctor gpu -o json")
def gpu(
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the driver may take to answer.")] = 60.0,
) -> None:
    """Check whether GPU processes can be parked here. Exit code 1: at least one check fails."""
    from kybernate.doctor import examine_gpu

    _report(examine_gpu(os.environ, seconds=timeout))


def _report(findings: "list[Finding]") -> None:
    from kybernate.doctor import Severity

    ok = all(finding.level is not Severity.FAIL for finding in findings)
    data = {"ok": ok, "findings": [asdict(finding) for finding in findings]}
    answer(data, "\n".join(map(line, findings)))
    raise typer.Exit(int(not ok))


def line(finding: "Finding") -> str:
    """``WARN persistence  off on GPU 0 → nvidia-smi -pm 1``."""
    remedy = f" → {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:4} {finding.check:{_CHECK_WIDTH}} {finding.finding}{remedy}"
