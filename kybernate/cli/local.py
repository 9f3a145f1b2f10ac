"""The stack of ``kyb up`` on this machine, for commands: without one they fail."""

from pathlib import Path
from typing import Any

from kybernate.cli.console import Console, find_url, own_stack
from kybernate.cli.output import CliError
from kybernate.local_stack import engine_log, find_stack, processes


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


def log_of(stack: dict[str, Any], name: str) -> Path:
    """The log of a process, or of the engine of a model or seat. Raises CliError with the known names."""
    folder = Path(stack["folder"])
    file = folder / "logs" / f"{name.replace('-', '_')}.log"
    if "/" not in name and file.exists():
        return file
    plain = name.partition("/")[2] if name.startswith(("model/", "seat/")) else name
    seats = [seat for seat in Console(str(stack["console"])).seats()["seats"] if seat.get("pod")]
    mine = [seat for seat in seats if plain in (seat["model"], seat["seat"])]
    for seat in mine:
        if found := engine_log(stack, seat["pod"], seat["pod_uid"]):
            return found
    if mine:
        raise CliError(f"{plain} has no log, for its engine never ran; see kyb why {plain}")
    known = ", ".join([*processes(stack), *sorted({seat["model"] for seat in seats})])
    raise CliError(f"nothing here is called {name!r}; known: {known}")
