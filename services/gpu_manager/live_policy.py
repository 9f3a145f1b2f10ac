"""The policy as the manager runs it: guarded.

A policy is code that people write and change. Whatever it raises or returns, the node goes on: its decision is checked,
and where there is none to be used a plain rule decides instead, which starves no seat.
"""

from dataclasses import dataclass, field, replace

from kybernate.logs import get_logger
from kybernate.policy import Decision, GroupView, Policy, Stay
from kybernate.policy.rules import Quantum
from kybernate.policy.view import checked

log = get_logger()

RETRY_SECONDS = 1.0
"""Model: how soon to decide again where even the plain rule failed."""


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
