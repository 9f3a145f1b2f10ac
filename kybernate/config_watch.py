"""Notices that a configuration changed on disk: a file that was written, a link that was swapped (a ConfigMap)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

LOOK_SECONDS = 1.0

Fingerprint = tuple[tuple[str, int, int, int, int], ...]


def fingerprint(path: Path) -> Fingerprint:
    """Which files a file or a folder of configurations is now. Blocking.

    Links are followed: Kubernetes swaps one link in the folder of a mounted ConfigMap, and all files are others.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = []
    for file in files:
        if file.name.startswith(".") and file != path:
            continue
        try:
            stat = file.stat()
        except OSError:
            continue
        found.append((file.name, stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


async def changes(path: Path, poke: asyncio.Event, *, seconds: float = LOOK_SECONDS) -> AsyncIterator[None]:
    """One item after each change, and after each ``poke`` (SIGHUP) whether anything changed or not.

    And one at the beginning: what was read before may have changed before anybody looked here.
    """
    known = await asyncio.to_thread(_fingerprint, path)
    yield
    while True:
        try:
            async with asyncio.timeout(seconds):
                await poke.wait()
        except TimeoutError:
            pass
        poked = poke.is_set()
        poke.clear()
        found = await asyncio.to_thread(_fingerprint, path)
        if poked or (found and found != known):  # a file that is being replaced may not be there for a moment
            known = found or known
            yield


def _fingerprint(path: Path) -> Fingerprint:
    try:
        return fingerprint(path)
    except OSError:
        return ()
