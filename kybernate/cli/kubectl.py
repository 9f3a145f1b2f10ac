"""``kubectl``, with the rights and the cluster that it is set up for."""

import re
import subprocess

from kybernate.cli.output import CliError

_LOG = re.compile(r"^[IWE]\d{4} .*\n(?=[^\n])", re.MULTILINE)
"""A line of kubectl's own log, which says the same error several times over, before another line."""


def kubectl(arguments: list[str], given: str | None = None) -> str:
    """What kubectl prints. Raises CliError."""
    try:
        done = subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CliError("kubectl is not on PATH; install it, or run this on a machine that has it") from None
    if done.returncode:
        raise CliError(f"kubectl {' '.join(arguments[:2])}: {_LOG.sub('', done.stderr).strip()}")
    return done.stdout
