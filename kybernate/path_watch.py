"""Polls that sleep longer: inotify wakes them when a file or folder may have changed.

A hint only; the poll looks what has changed. The kernel limits instances per user, a missing path cannot be watched,
and some file systems report no changes of other machines: each poll still looks at intervals.
"""

import asyncio
import contextlib
import ctypes
import os
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary

_CHANGES = 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
"""IN_ATTRIB (also: a replaced file lost its name), IN_CLOSE_WRITE, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE,
IN_DELETE_SELF, IN_MOVE_SELF."""
_libc = ctypes.CDLL(None)


class PathWatch:
    """A context in an event loop; ``wait`` returns when one of its files or folders may have changed."""

    def __init__(self, *paths: Path) -> None:
        """Of a folder the names directly in it are watched, too. Links are followed."""
        self._paths = paths
        self._complete = False
        self.changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._inotify = _instances.get(loop) or _instances.setdefault(loop, _Inotify(loop))
        self._inotify.watches.add(self)
        self.wake()
        return self

    def __exit__(self, *_: object) -> None:
        self._inotify.watches.discard(self)
        if not self._inotify.watches:
            self._inotify.close()

    async def wait(self, seconds: float, unwatched_seconds: float, other: asyncio.Event | None = None) -> None:
        """Return after a change, after ``seconds``, or when ``other`` is set.

        ``unwatched_seconds``: in place of ``seconds`` while a path cannot be watched.
        """
        if not self._complete:
            self._add()
            if self._complete:
                return  # what was missing may have changed before it was watched
        waits = [asyncio.create_task(event.wait()) for event in (self.changed, other) if event is not None]
        try:
            limit = seconds if self._complete else unwatched_seconds
            await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.changed.clear()
        self._add()  # another link or parent folder: no change was reported, and a path may be another file now

    def wake(self) -> None:
        """Something may have changed, and a path may be another file now."""
        self._add()
        self.changed.set()

    def _add(self) -> None:
        unwatched = [path for path in self._paths if not self._inotify.add(path)]
        self._complete = not unwatched


class _Inotify:
    """One instance for all watches of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.watches: set[PathWatch] = set()
        self._loop = loop
        self._file = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            loop.add_reader(self._file, self._read)

    def add(self, path: Path) -> bool:
        """Watch what is at this path now; False: it cannot be watched."""
        return bool(self._file >= 0 and _libc.inotify_add_watch(self._file, os.fsencode(path), _CHANGES) >= 0)

    def close(self) -> None:
        """Nothing watches any more."""
        del _instances[self._loop]
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 1 << 16)
        for watch in self.watches:
            watch.wake()


_instances: WeakKeyDictionary[asyncio.AbstractEventLoop, _Inotify] = WeakKeyDictionary()
"""The kernel allows a user 128 by default, in all its processes."""
