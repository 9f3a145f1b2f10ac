"""``kyb-run``, the first process of an engine's container: a static program that needs nothing of its image.

The image has it compiled, beside this file. Elsewhere the system's C compiler makes it, once for each node.
"""

import os
import shutil
import subprocess
from pathlib import Path

from kybernate import files

PROGRAM = "kyb-run"
FOLDER = "/kyb"
"""Where a container with a seat has it."""
FLAGS = ("-std=gnu11", "-Os", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-static", "-s")
SOURCE = Path(__file__).with_name("kyb-run.c")
_COMPILE_SECONDS = 60


class NoProgramError(Exception):
    """There is no program, and none can be made; the text says why and what to do."""


def install(folder: Path) -> Path:
    """Put the program into ``folder`` and return its path. Blocking. Raises NoProgramError and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    target, compiled = folder / PROGRAM, SOURCE.with_suffix("")
    content = compiled.read_bytes() if compiled.is_file() else _compiled(folder)
    if not target.is_file() or target.read_bytes() != content:
        files.replace(target, content, durable=False, mode=0o755)
    return target


def _compiled(folder: Path) -> bytes:
    compiler = next(
        (path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if compiler is None:
        raise NoProgramError("no C compiler (cc, gcc, clang not found); install gcc, or set CC to a compiler")
    draft = folder / f".{PROGRAM}.{os.getpid()}"
    try:
        command = [compiler, *FLAGS, "-o", str(draft), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode != 0:
            raise NoProgramError(
                f"{compiler} refuses {SOURCE.name} (exit code {done.returncode}): {done.stderr.strip()}"
            )
        return draft.read_bytes()
    except subprocess.TimeoutExpired as error:
        raise NoProgramError(f"{compiler} needs more than {_COMPILE_SECONDS} s for {SOURCE.name}") from error
    finally:
        draft.unlink(missing_ok=True)
