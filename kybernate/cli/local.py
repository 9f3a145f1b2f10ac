"""The stack of ``kyb up`` on this machine, from its stack file: processes and logs."""

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kybernate.cli.console import Console, find_stack
from kybernate.cli.output import CliError

FOLLOW_SECONDS = 0.2
ENGINE_LOGS = "**/run/pods"
"""Where the kubelets of a stack write the logs of containers, a folder per pod, as a pattern below its folder."""


def local_stack() -> dict[str, Any]:
    """The running stack's file. Raises CliError without one."""
    found = find_stack()
    if found is None:
        remedy = "kyb up starts one; in a cluster: kubectl -n kybernate logs POD -c CONTAINER"
        raise CliError(f"no stack runs on this machine; {remedy}")
    return found


def processes(stack: dict[str, Any]) -> dict[str, str]:
    """Every process of the stack that has a log: ``running``, ``stopped`` (by a signal) or ``dead``."""
    logs = Path(stack["folder"]) / "logs"
    pids = stack.get("pids") or {}
    return {path.stem: _state(pids.get(path.stem)) for path in sorted(logs.glob("*.log"))}


def log_of(stack: dict[str, Any], name: str) -> Path:
    """The log of a process, or of the engine of a model or seat. Raises CliError with the known names."""
    folder = Path(stack["folder"])
    file = folder / "logs" / f"{name.replace('-', '_')}.log"
    if "/" not in name and file.exists():
        return file
    plain = name.partition("/")[2] if name.startswith(("model/", "seat/")) else name
    seats = [seat for seat in Console(str(stack["console"])).seats()["seats"] if seat.get("pod")]
    for seat in seats:
        if plain in (seat["model"], seat["seat"]) and (found := engine_log(stack, seat["pod"], seat["pod_uid"])):
            return found
    known = ", ".join([*processes(stack), *sorted({seat["model"] for seat in seats})])
    raise CliError(f"nothing here is called {name!r}; known: {known}")


def engine_log(stack: dict[str, Any], pod: str, uid: str) -> Path | None:
    """The log of the pod's (``namespace/name``) present container; None: it has none yet."""
    files = Path(stack["folder"]).glob(f"{ENGINE_LOGS}/{pod.replace('/', '_')}_{uid}/*.log")
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def log_lines(file: Path, *, last: int, follow: bool) -> Iterator[str]:
    """The last lines of a log, then, with ``follow``, every new one until the stack has ended."""
    with file.open(encoding="utf-8", errors="replace") as opened:
        yield from (line.rstrip("\n") for line in deque(opened, maxlen=last))
        while follow:
            line = opened.readline()
            if line:
                yield line.rstrip("\n")
            elif not file.exists():
                return
            elif os.fstat(opened.fileno()).st_size < opened.tell():
                opened.seek(0)  # it was emptied, since it had grown too long
            else:
                time.sleep(FOLLOW_SECONDS)


def _state(pid: object) -> str:
    try:
        letter = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return "dead"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")
