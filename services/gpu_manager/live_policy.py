"""The policy as the manager runs it: guarded, and what it learned.

A policy is code that people write and change. Whatever it raises or returns, the node goes on: its decision is checked,
and where there is none to be used a plain rule decides instead, which starves no seat.
"""

import asyncio
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from kybernate import files
from kybernate.logs import get_logger
from kybernate.policy import Decision, GroupView, Policy, Stay
from kybernate.policy.rules import Quantum
from kybernate.policy.view import checked
from services.gpu_manager.core.demand import Learning
from services.gpu_manager.core.inputs import Now

log = get_logger()

RETRY_SECONDS = 1.0
"""Model: how soon to decide again where even the plain rule failed."""
KEEP_SECONDS = 30.0
"""Wall: how often what was learned is written to disk."""


# --- the guarded policy -----------------------------------------------------------------------------------------------


@dataclass
class GuardedPolicy:
    """A policy that always decides. ``name`` is the live one's, for texts."""

    name: str
    live: Policy
    fallback: Policy = field(default_factory=Quantum)
    """The plain rule: first come, first served, and no seat stays longer than a while."""
    errors: int = 0
    last_error: str = ""

    def decide(self, view: GroupView) -> Decision:
        """The live policy's decision, or the plain rule's when that one cannot be used. Never raises."""
        try:
            return checked(self.live.decide(view), view)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            self.errors += 1
            self.last_error = f"group {view.group}: {error}"
            decision = self._fall_back(view, error)
            log.error("policy.failed", group=view.group, error=error, instead=decision.reason)
            return decision

    def _fall_back(self, view: GroupView, error: str) -> Decision:
        try:
            decision = checked(self.fallback.decide(view), view)
        except Exception as second:
            return Stay(RETRY_SECONDS, f"policy {self.name} failed ({error}), and so did the plain rule ({second!r})")
        reason = f"policy {self.name} failed ({error}); by the plain rule: {decision.reason}"
        return replace(decision, reason=reason)


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
