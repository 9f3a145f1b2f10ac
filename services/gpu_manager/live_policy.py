"""The policy as the manager runs it: guarded, recorded where a file for it is, and what it learned.

A policy is code that people write and change. Whatever it raises or returns, the node goes on: its decision is checked,
and where there is none to be used a plain rule decides instead, which starves no seat.
"""

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from kybernate import files
from kybernate.config import NodeConfig
from kybernate.logs import get_logger
from kybernate.policy import Decision, GroupView, Policy, Stay
from kybernate.policy.recording import encode, heading
from kybernate.policy.rules import Quantum
from kybernate.policy.view import checked
from services.gpu_manager.core.demand import Learning
from services.gpu_manager.core.inputs import Now
from services.gpu_manager.settings import ManagerSettings

log = get_logger()

RETRY_SECONDS = 1.0
"""Model: how soon to decide again where even the plain rule failed."""
KEEP_SECONDS = 30.0
"""Wall: how often what was learned is written to disk."""
MOST_BYTES = 64 * 2**20
MOST_QUEUED = 2_000
"""Evaluations that wait to be recorded: with 64 seats in view each takes some 50 kB."""


# --- the guarded policy -----------------------------------------------------------------------------------------------


@dataclass
class GuardedPolicy:
    """A policy that always decides. ``name`` is the live one's, for texts."""

    name: str
    live: Policy
    fallback: Policy = field(default_factory=Quantum)
    """The plain rule: first come, first served, and no seat stays longer than a while."""
    recorder: "ViewRecorder | None" = None
    errors: int = 0
    last_error: str = ""

    def decide(self, view: GroupView) -> Decision:
        """The live policy's decision, or the plain rule's when that one cannot be used. Never raises."""
        error = ""
        try:
            decision = checked(self.live.decide(view), view)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            self.errors += 1
            self.last_error = f"group {view.group}: {error}"
            decision = self._fall_back(view, error)
            log.error("policy.failed", group=view.group, error=error, instead=decision.reason)
        if self.recorder is not None:
            self.recorder.observe(view, decision, error)
        return decision

    def _fall_back(self, view: GroupView, error: str) -> Decision:
        try:
            decision = checked(self.fallback.decide(view), view)
        except Exception as second:
            return Stay(RETRY_SECONDS, f"policy {self.name} failed ({error}), and so did the plain rule ({second!r})")
        reason = f"policy {self.name} failed ({error}); by the plain rule: {decision.reason}"
        return replace(decision, reason=reason)


@contextmanager
def open_policy(config: NodeConfig, settings: ManagerSettings) -> Iterator[GuardedPolicy]:
    """The configured policy, recorded if the state folder has a file ``views.jsonl``; that is whole at the end."""
    name, path = config.policy.name, settings.state_dir / "views.jsonl"
    recorder = ViewRecorder(path, name, config.policy.settings, settings.node) if path.exists() else None
    try:
        yield GuardedPolicy(name, config.policy.build(), recorder=recorder)
    finally:
        if recorder is not None:
            recorder.close()


# --- recording --------------------------------------------------------------------------------------------------------


class ViewRecorder:
    """Writes every view and decision to a file, for ``python -m kybernate.lab.simulate.replay``. Never delays a
    decision.

    A thread writes; evaluations for which it has no time are left out and counted. A file of the largest size becomes
    ``FILE.1``, in place of an older one, and a new one begins. ``observe`` may be called from anywhere; ``close``
    writes what is left and ends the thread.
    """

    def __init__(
        self, path: Path, name: str, settings: Mapping[str, Any], node: str = "", most_bytes: int = MOST_BYTES
    ) -> None:
        self.path = path
        self.written = 0
        """Evaluations in files."""
        self.left_out = 0
        """Evaluations for which there was no time or no disk."""
        self._first = heading(name, settings, node)
        self._most = most_bytes
        self._begun = False
        self._queue: queue.Queue[tuple[GroupView, Decision, str] | None] = queue.Queue(MOST_QUEUED)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def observe(self, view: GroupView, decision: Decision, error: str = "") -> None:
        """Keep one evaluation, if there is room for it. Never waits."""
        try:
            self._queue.put_nowait((view, decision, error))
        except queue.Full:
            self.left_out += 1

    def close(self) -> None:
        """Write what is left."""
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        ended = False
        while not ended:
            taken = [self._queue.get()]
            while len(taken) < 256 and taken[-1] is not None and not self._queue.empty():  # only this thread takes
                taken.append(self._queue.get())
            ended = taken[-1] is None
            batch = [each for each in taken if each is not None]
            try:
                self._write([json.dumps(encode(*each), separators=(",", ":")) for each in batch])
                self.written += len(batch)
            except Exception as error:  # a policy may return anything: the thread must go on
                if not self.left_out:
                    log.warning("recorder.failed", file=str(self.path), reason=str(error))
                self.left_out += len(batch)

    def _write(self, lines: list[str]) -> None:
        """Append; each process begins with its own heading."""
        if not lines:
            return
        if self.path.exists() and self.path.stat().st_size > self._most:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            self._begun = False
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({**self._first, "unix": time.time()}), *lines]
            self._begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


# --- what was learned -------------------------------------------------------------------------------------------------


class LearnedFile:
    """What was learned, on disk over a restart. Losing it costs some minutes of learning, so it is never fsynced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, into: Learning, now: Now, seats: Collection[str]) -> None:
        """Go on from what the last manager knew of these seats; a file that cannot be read counts as none."""
        try:
            into.restore(json.loads(self.path.read_bytes()), now, seats)
        except FileNotFoundError:
            log.debug("learned_state.missing", file=str(self.path))  # the first start on this node
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            log.warning("learned_state.read_failed", file=str(self.path), reason=repr(error))

    async def keep(self, learning: Learning, now: Callable[[], Now]) -> NoReturn:
        """Write it regularly, and once more at the end; until cancelled."""
        try:
            while True:
                await asyncio.sleep(KEEP_SECONDS)
                await asyncio.to_thread(self._put, json.dumps(learning.dump(now())))
        finally:
            self._put(json.dumps(learning.dump(now())))

    def _put(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self.path, text, durable=False, mode=0o600)
        except OSError as error:
            log.warning("learned_state.write_failed", file=str(self.path), reason=str(error))
