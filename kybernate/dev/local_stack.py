"""The stack of ``kyb up`` on this machine, for commands: without one they fail."""

from typing import Any

from kybernate.cli.console import find_url, own_stack
from kybernate.cli.output import CliError
from kybernate.local_stack import find_stack


def local_stack(instead: str) -> dict[str, Any]:
    """The running stack's file. Raises CliError without one, or where ``--url`` or KYB_URL names another one.
    ``instead``: what does the same in a cluster."""
    found = find_stack()
    if found is None:
        raise CliError(f"no stack runs on this machine; kyb up starts one; in a cluster: {instead}")
    if own_stack() is None:
        text = (
            f"{find_url()} is another stack's console; this command is about the one that runs here, whose console is"
        )
        raise CliError(f"{text} {found['console']}: leave --url and KYB_URL out, or use it on the other machine", 2)
    return found
