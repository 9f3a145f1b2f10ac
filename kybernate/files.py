"""Files that are replaced as a whole: a reader sees the old content or the new one, never a part."""

import contextlib
import os
from pathlib import Path


def replace(path: Path, content: str | bytes, *, durable: bool, mode: int | None = None) -> None:
    """Write ``content`` beside ``path`` and rename it to ``path``. Blocking. Raises OSError.

    ``durable``: content and name survive a crash of the machine (fsync of the file and of its folder); without it they
    survive the end of the process only. ``mode``: the permissions, from the first byte on, whatever the umask is; None:
    0666 less the umask. The folder must exist.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    draft.unlink(missing_ok=True)  # of an earlier process with this number
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data)
            if durable:
                file.flush()
                os.fsync(handle)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine. Blocking. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
