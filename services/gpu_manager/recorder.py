"""Writes every view and decision to a file, for ``python -m kybernate.lab.simulate.replay``. Never delays a decision.

A thread writes; what it cannot keep up with is left out and counted. The file has a largest size: then it becomes
``FILE.1``, in place of an older one, and a new one begins.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kybernate.logs import get_logger
from kybernate.policy import Decision, GroupView
from kybernate.policy.recording import encode, heading

MOST_BYTES = 64 * 2**20
MOST_QUEUED = 2_000
"""Looks: with 64 seats in view each takes some 50 kB."""

Look = tuple[GroupView, Decision, str]


class Recorder:
    """One file. ``look`` may be called from anywhere; ``close`` writes what is left and ends the thread."""

    def __init__(
        self, path: Path, name: str, settings: Mapping[str, Any], node: str = "", most_bytes: int = MOST_BYTES
    ) -> None:
        self.path = path
        self.written = 0
        """Looks in files."""
        self.left_out = 0
        """Looks for which there was no time or no disk."""
        self._first = heading(name, settings, node)
        self._most = most_bytes
        self._begun = False
        self._queue: queue.Queue[Look | None] = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def look(self, view: GroupView, decision: Decision, error: str = "") -> None:
        """Keep one look, if there is room for it. Never waits."""
        try:
            self._queue.put_nowait((view, decision, error))
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            look = self._queue.get()
            if look is None:
                return
            batch = [look]
            ended = self._gather(batch)
            try:
                self._write([json.dumps(encode(*each), separators=(",", ":")) for each in batch])
                self.written += len(batch)
            except Exception as error:  # whatever a policy put into its answer: the thread must go on
                if not self.left_out:
                    get_logger().warning("recorder.failed", file=str(self.path), reason=str(error))
                self.left_out += len(batch)
            if ended:
                return

    def _gather(self, batch: list[Look]) -> bool:
        """Take what else is there; True when the end is among it."""
        while len(batch) < 256:
            try:
                look = self._queue.get_nowait()
            except queue.Empty:
                return False
            if look is None:
                return True
            batch.append(look)
        return False

    def _write(self, lines: list[str]) -> None:
        """Append; each process begins with a heading of its own."""
        if self.path.exists() and self.path.stat().st_size > self._most:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._begun = False
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({**self._first, "unix": time.time()}), *lines]
            self._begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
