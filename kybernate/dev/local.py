"""What this machine shows of the stack that runs here: folders, disk, memory, processes and engines."""

import contextlib
import http.client
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kybernate.config import ConfigError, load
from kybernate.doctor.outside import from_outside
from kybernate.node.host_memory import available_bytes
from kybernate.tls import key_of

ENGINE_SECONDS = 2.0
OLD_CALL_SECONDS = 60.0
"""Age of a call at the start gate that a working plugin has removed: it waits for 28 s at most."""


def local_facts(stack: dict[str, Any], seats: Collection[dict[str, Any]]) -> dict[str, Any]:
    """What this machine shows of its stack, as fields of StackFacts."""
    folder = Path(stack["folder"])
    facts: dict[str, Any] = {"processes": processes(stack), "engines": silent_engines(seats)}
    with contextlib.suppress(OSError):
        facts["disk"] = (str(folder), shutil.disk_usage(folder).free)
    facts["restarts"] = {str(name): tuple(times) for name, times in (stack.get("restarts") or {}).items()}
    states = [seats.parents[1] / "state" for seats in _seat_folders(folder)]
    facts["state_folders"] = {str(one): why for one in (folder / "logs", *states) if (why := _unwritable(one))}
    facts["gate_folders"] = {str(seats): why for seats in _seat_folders(folder) if (why := _unusable(seats))}
    secrets = {str(name): Path(path) for name, path in (stack.get("secrets") or {}).items()}
    facts["open_files"] = {text: remedy for name, path in secrets.items() for text, remedy in _open(name, path)}
    facts["outside"] = from_outside(str(stack.get("url") or ""), secrets.get("KYB_TLS_CERT_FILE"))
    why = refusal(folder)
    try:
        listed = frozenset(group.name for group in load(folder / "config.yaml").gpu_topology.groups)
        facts["configured"] = {"": listed}
    except ConfigError as error:
        why = str(error)
    facts["refused"] = " ".join(why.split())
    with contextlib.suppress(OSError):
        facts["available_bytes"] = available_bytes()
    return facts


def _open(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """What others may do with a file that a setting names, and with the key beside a certificate."""
    with contextlib.suppress(OSError):
        secret = key_of(path) if name == "KYB_TLS_CERT_FILE" else path
        mode = secret.stat().st_mode
        if mode & 0o022:
            yield f"{secret} of {name} can be written by other users of this machine", f"chmod go-w {secret}"
        if name == "KYB_TLS_CERT_FILE" and mode & 0o044:
            yield f"the private key {secret} can be read by other users of this machine", f"chmod 600 {secret}"


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
        deaf = [one.name for one in folders if not (one / "gate.sock").is_socket()]
        before = time.time() - OLD_CALL_SECONDS
        calls = [one / "call.json" for one in folders]
        old = [call.parent.name for call in calls if call.exists() and call.stat().st_mtime < before]
    except OSError as error:
        return f"{error.strerror}: calls and tickets do not pass"
    if closed:
        return f"no access to {', '.join(closed)}: calls and tickets do not pass"
    if deaf:
        return f"no gate.sock for {', '.join(deaf)}: /kyb/kyb-run does not pass"
    return f"the call of {', '.join(old)} is over and still there: the plugin does not run or hangs" if old else ""


def silent_engines(seats: Collection[dict[str, Any]]) -> dict[str, str]:
    """Active models of a stack on this machine whose engine does not answer, and why."""
    silent = ((seat, _silence(seat)) for seat in seats if seat.get("state") == "active" and seat.get("endpoint"))
    return {str(seat["model"]): why for seat, why in silent if why}


def _silence(seat: dict[str, Any]) -> str:
    """Why an engine does not answer; empty: it does."""
    parts = urlsplit(str(seat["endpoint"]))
    try:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ENGINE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return f"HTTP {status}" if status >= 500 else ""


def processes(stack: dict[str, Any]) -> dict[str, str]:
    """Every process of the stack: ``running``, ``stopped`` (by a signal) or ``dead``."""
    pids = pids_of(stack)
    names = {path.stem for path in Path(stack["folder"]).glob("logs/*.log")}
    return {name: _state(pids.get(name)) for name in sorted(names | pids.keys())}


def pids_of(stack: dict[str, Any]) -> dict[str, int]:
    """Of the processes that run, and of ``kyb up`` itself, which starts them again and takes their logs."""
    own = {"kyb up": stack["pid"]} if "pid" in stack else {}
    return own | (stack.get("pids") or {})


def refusal(folder: Path) -> str:
    """Why the stack of this folder goes on without the last change of its files, as ``kyb up`` wrote it; empty: it uses
    them."""
    with contextlib.suppress(OSError):
        return (folder / "refused").read_text()
    return ""


def _state(pid: object) -> str:
    try:
        letter = Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return "dead"
    return {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}.get(letter, "running")
