"""How often a message returns to a file of a service that it has left.

The walk is the one of a reader: follow the calls in the order in which they happen, and read each function once. Only
calls into another file of the service count, of all its files. A return is a call into a file that the walk was in
before; coming back to the caller is none, since the reader has not left its page.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Walk:
    """The files of folders that a message visits, in order; consecutive visits to one file are one visit.

    ``entry``: the function that is walked; empty: all.
    """

    def __init__(self, *folders: Path, entry: str = "") -> None:
        self.files: list[str] = []
        self._folders, self._entry = tuple(f"{folder}/" for folder in folders), entry
        self._begun = not entry
        self._stack: list[str | None] = []
        self._read: set[object] = set()

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            self._begun = self._begun or code.co_qualname == self._entry
            inside = self._begun and code.co_filename.startswith(self._folders)
            name = Path(code.co_filename).stem if inside else None
            caller = next((file for file in reversed(self._stack) if file is not None), None)
            if name is not None and name != caller and code not in self._read:
                self._visit(name)
            if inside:
                self._read.add(code)
            self._stack.append(name)
        elif event == "return" and self._stack:
            self._stack.pop()
            self._begun = self._begun and frame.f_code.co_qualname != self._entry

    def _visit(self, name: str) -> None:
        if not self.files or self.files[-1] != name:
            self.files.append(name)

    @property
    def returns(self) -> int:
        return len(self.files) - len(set(self.files))


@contextmanager
def walking(*folders: Path, entry: str = "") -> Iterator[Walk]:
    walk = Walk(*folders, entry=entry)
    sys.setprofile(walk.profile)
    try:
        yield walk
    finally:
        sys.setprofile(None)
