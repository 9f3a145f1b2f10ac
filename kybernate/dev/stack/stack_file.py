"""The stack file, by which other commands find a stack: one JSON file per user, held by the first live stack.

The stack holds a kernel lock on the file's folder, which a killed process loses. ``kybernate.local_stack`` reads it.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from kybernate import files
from kybernate.local_stack import stack_file


class StackFileError(Exception):
    """The folder of the stack file cannot be used; the text says why."""


class StackFile:
    """The right to write the file, as long as this object holds it."""

    def __init__(self) -> None:
        self.path = stack_file()
        self._lock: int | None = None

    @property
    def held(self) -> bool:
        """Whether this stack owns the file."""
        return self._lock is not None

    def claim(self) -> bool:
        """Take the file if no live stack holds it. Raises StackFileError when the folder is not ours to use."""
        folder = self.path.parent
        for _ in range(5):  # the folder may vanish under our hands when another stack ends
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StackFileError(f"{folder}: {error.strerror}; remove it or set XDG_RUNTIME_DIR") from None
            if os.fstat(descriptor).st_uid != os.getuid():
                os.close(descriptor)
                raise StackFileError(f"{folder} belongs to another user; remove it or set XDG_RUNTIME_DIR")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                time.sleep(0.01)  # a command that looks for a stack touches the lock for an instant
                continue
            if folder.exists() and os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
                self._lock = descriptor
                return True
            os.close(descriptor)
        return False

    def write(self, content: Mapping[str, Any]) -> None:
        """Put the content there in one step; does nothing when another stack holds the file."""
        if self._lock is None:
            return
        files.replace(self.path, json.dumps(content, indent=2) + "\n", durable=False)

    def release(self) -> None:
        """Remove the file and let go."""
        if self._lock is None:
            return
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        os.close(self._lock)
        self._lock = None
