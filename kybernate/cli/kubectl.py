"""``kubectl``, with the rights and the cluster that it is set up for."""

import subprocess

from kybernate.cli.output import CliError


def kubectl(arguments: list[str], given: str | None = None) -> str:
    """What kubectl prints. Raises CliError."""
    try:
        done = subprocess.run(["kubectl", *arguments], input=given, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CliError("kubectl is not on PATH; install it, or run this on a machine that has it") from None
    if done.returncode:
        raise CliError(f"kubectl {' '.join(arguments[:2])}: {done.stderr.strip()}")
    return done.stdout
