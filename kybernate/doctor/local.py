"""What this machine shows of the stack that runs here: folders, disk, memory, processes and engines."""

import contextlib
import http.client
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kybernate.config import ConfigError, load
from kybernate.local_stack import find_stack, processes, refusal, stack_file

ENGINE_SECONDS = 2.0
OLD_CALL_SECONDS = 60.0
"""Age of a call at the start gate that a working plugin has removed: it waits for 28 s at most."""


def local_facts(stack: dict[str, Any] | None) -> dict[str, Any]:
    """What this machine shows of its stack, as fields of StackFacts."""
    if stack is None:
        stale = stack_file()
        return {"stale_file": str(stale) if stale.exists() and find_stack() is None else ""}
    folder = Path(stack["folder"])
    facts: dict[str, Any] = {"processes": processes(stack)}
    with contextlib.suppress(OSError):
        facts["disk"] = (str(folder), shutil.disk_usage(folder).free)
    facts["restarts"] = {str(name): tuple(times) for name, times in (stack.get("restarts") or {}).items()}
    states = [seats.parents[1] / "state" for seats in _seat_folders(folder)]
    facts["state_folders"] = {str(one): why for one in states if (why := _unwritable(one))}
    facts["gate_folders"] = {str(seats): why for seats in _seat_folders(folder) if (why := _unusable(seats))}
    why = refusal(folder)
    try:
        listed = frozenset(group.name for group in load(folder / "config.yaml").gpu_topology.groups)
        facts["configured"] = {"": listed}
    except ConfigError as error:
        why = str(error)
    facts["refused"] = " ".join(why.split())
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        facts["available_bytes"] = int(line.split()[1]) * 1024
    return facts


def _seat_folders(stack: Path) -> list[Path]:
    """Of each node of a local stack."""
    return [run / "seats" for pattern in ("run", "*/run") for run in stack.glob(pattern)]


def _unwritable(folder: Path) -> str:
    """Why nothing can be written to a folder; empty: it can."""
    if not folder.is_dir():
        return "it is gone"
    return "" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else "no access"


def _unusable(seats: Path) -> str:
    """Why the start gate does not work in this folder of seat folders; empty: it does."""
    try:
        folders = sorted(seats.iterdir())
        closed = [one.name for one in (seats, *folders) if not os.access(one, os.R_OK | os.W_OK | os.X_OK)]
        before = time.time() - OLD_CALL_SECONDS
        calls = [one / "call.json" for one in folders]
        old = [call.parent.name for call in calls if call.exists() and call.stat().st_mtime < before]
    except OSError as error:
        return f"{error.strerror}: calls and tickets do not pass"
    if closed:
        return f"no access to {', '.join(closed)}: calls and tickets do not pass"
    return f"the call of {', '.join(old)} is over and still there: the plugin does not run or hangs" if old else ""


def silent_engines(seats: Collection[dict[str, Any]]) -> dict[str, str]:
    """Active models of a stack on this machine whose engine does not answer, and why."""
    silent = ((seat, _silence(seat)) for seat in seats if seat.get("state") == "active" and seat.get("endpoint"))
    return {str(seat["model"]): why for seat, why in silent if why}


def _silence(seat: dict[str, Any]) -> str:
    """Why an engine does not answer; empty: it does."""
    parts = urlsplit(str(seat["endpoint"]))
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ENGINE_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return f"HTTP {status}" if status >= 500 else ""
