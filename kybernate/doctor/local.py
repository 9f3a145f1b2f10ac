"""What this machine shows of the stack that runs here: folders, disk, memory, processes and engines."""

import contextlib
import http.client
import os
import shutil
import socket
import ssl
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kybernate.config import ConfigError, load
from kybernate.local_stack import find_stack, processes, refusal, stack_file
from kybernate.node.host_memory import available_bytes
from kybernate.tls import key_of, trusting

ENGINE_SECONDS = 2.0
OUTSIDE_SECONDS = 3.0
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


def from_outside(url: str, ca_file: Path | None) -> tuple[str, float | None]:
    """Call a router as its users do, by its name and its certificate: what is wrong (empty: it answers), and when the
    certificate ends (unix seconds; None: it has none). ``ca_file`` is trusted beside the machine's authorities."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "", None
    try:
        connection, ends = http.client.HTTPConnection(parts.hostname, parts.port, timeout=OUTSIDE_SECONDS), ""
        if parts.scheme == "https":
            context = trusting(None)
            if ca_file is not None:
                context.load_verify_locations(ca_file)
            secure = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=OUTSIDE_SECONDS, context=context)
            secure.connect()
            connection, ends = secure, str((secure.sock.getpeercert() or {}).get("notAfter", ""))
        status = _status(connection, "/healthz")
        wrong = "" if status == http.client.OK else f"{url} answers /healthz with {status}: is that a router?"
        return wrong, ssl.cert_time_to_seconds(ends) if ends else None
    except socket.gaierror:
        return f"{url}: this machine cannot resolve the name {parts.hostname}", None
    except ssl.SSLCertVerificationError as error:
        return f"{url}: its certificate is refused: {error.verify_message}", None
    except (OSError, http.client.HTTPException) as error:
        return f"{url} does not answer: {getattr(error, 'strerror', None) or error or 'no answer'}", None


def _status(connection: http.client.HTTPConnection, path: str) -> int:
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


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
        status = _status(connection, "/health")
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return f"HTTP {status}" if status >= 500 else ""
