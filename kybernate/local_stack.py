"""The stack of ``kyb up`` on this machine, for ``kyb`` and the console: its stack file, processes and logs. Standard
library only: commands start at once.
"""

import contextlib
import fcntl
import glob
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLLOW_SECONDS = 0.2
ENGINE_LOGS = "**/run/pods"
"""Where the kubelets of a stack write the logs of containers, a folder per pod, as a pattern below its folder."""


def stack_file() -> Path:
    """``$XDG_RUNTIME_DIR/kybernate/stack.json``, or ``/tmp/kybernate-<uid>/stack.json`` where that is unset."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kybernate" / "stack.json" if runtime else _without_runtime()


def _without_runtime() -> Path:
    return Path(f"/tmp/kybernate-{os.getuid()}/stack.json")


def find_stack() -> dict[str, Any] | None:
    """Read the stack file of a live ``kyb up``; None without one. A live stack holds the lock of the file's folder.

    One that systemd started is found by a login of its user, too, whose XDG_RUNTIME_DIR it has not."""
    of_login = os.environ.get("XDG_RUNTIME_DIR") == f"/run/user/{os.getuid()}"
    for path in (stack_file(), *([_without_runtime()] if of_login else [])):
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(path.read_text())
            ours = path.parent.stat().st_uid == os.getuid()
            if ours and isinstance(content, dict) and _locked(path.parent):
                return content
    return None


def _locked(folder: Path) -> bool:
    """True if a process holds the folder's lock, tested by a shared lock that is released at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def container_logs(pod: str, uid: str) -> str:
    """The logs of a pod's containers, as a pattern below the folder that KYB_RUN_DIR names."""
    return f"pods/{glob.escape(f'{pod}_{uid}'.replace('/', '_'))}/*.log"


def engine_log(stack: dict[str, Any], pod: str, uid: str) -> Path | None:
    """The log of the pod's (``namespace/name``) present container; None: it has none yet."""
    files = Path(stack["folder"]).glob(f"**/run/{container_logs(pod, uid)}")
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
