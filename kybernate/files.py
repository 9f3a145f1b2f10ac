"""Files that are replaced as a whole (readers see the old content or the new one, never a part), and watching
them."""

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from kybernate.clock import to_beat, wait_for

NO_FILE = "it is a FIFO, a socket or a device, not a file"
MOST_BYTES = 2 * 2**20
"""Of a file that a person writes: YAML of this size takes half a minute."""
LOOK_SECONDS = 1.0


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors name ``path``: for a handle the kernel names no file, and a full disk could be any."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read; a FIFO or device, which might never end, is refused. Blocking. Raises OSError."""
    with named(path), open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, NO_FILE)
        yield file


def read(path: Path) -> bytes:
    """The content of a file that a person wrote, at most ``MOST_BYTES``. Blocking. Raises OSError."""
    with opened(path) as file:
        if len(data := file.read(MOST_BYTES + 1)) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MOST_BYTES >> 20} MiB")
        return data


def replace(path: Path, content: str | bytes, *, durable: bool, mode: int | None = None) -> None:
    """Write ``content`` beside ``path`` and rename it to ``path``. Blocking. Raises OSError.

    ``durable``: content and name survive a crash of the machine (fsync of the file and of its folder); without it they
    survive the end of the process only. ``mode``: the permissions, from the first byte on, whatever the umask is; None:
    0666 less the umask. The folder must exist.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.new")
    draft.unlink(missing_ok=True)  # of an earlier process with these numbers
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
        with named(path), os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(handle)
            if os.fstat(handle).st_size != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def append(handle: int, line: bytes) -> None:
    """Write the whole line or nothing: a full disk accepts a part, to which the next line would be appended. Blocking.
    Raises OSError."""
    before = os.fstat(handle).st_size
    if os.write(handle, line) != len(line):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine. Blocking. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(path: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Which files a file or a folder of configurations is now; none while it is not there. Blocking.

    Links are followed: Kubernetes swaps one link in the folder of a mounted ConfigMap, and all files are others.
    """
    found = []
    with contextlib.suppress(OSError):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.name.startswith(".") and file != path:
                continue
            with contextlib.suppress(OSError):
                at = file.stat()
                found.append((file.name, at.st_dev, at.st_ino, at.st_mtime_ns, at.st_size))
    return tuple(found)


async def changes(path: Path, poke: asyncio.Event, *, seconds: float = LOOK_SECONDS) -> AsyncIterator[None]:
    """One item after each change, and after each ``poke`` (SIGHUP) whether anything changed or not.

    And one at the beginning: what was read before may have changed before anybody looked here. ``seconds``: interval of
    the looks.
    """
    known = await asyncio.to_thread(fingerprint, path)
    yield
    while True:
        poked = await wait_for(poke, to_beat(seconds))
        poke.clear()
        found = await asyncio.to_thread(fingerprint, path)
        if poked or (found and found != known):  # a file that is being replaced may not be there for a moment
            known = found or known
            yield
