"""The live policy and all who look over its shoulder. Pure, but for what the lookers do.

A policy is code that people write and change. Whatever it raises or answers, the node goes on: its answer is checked,
and where there is none to be used a plain rule answers instead, which starves nobody.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kybernate.policy import Decision, GroupView, Park, Policy, Stay, Switch
from kybernate.policy.rules import Quantum
from kybernate.policy.view import checked

Looker = Callable[[GroupView, Decision, str], None]
"""Told about each look: the view, the decision, and what the policy raised instead ("": nothing)."""

AGAIN_SECONDS = 1.0
"""Model: how soon it is asked again where even the plain rule had no answer."""


@dataclass
class Brain:
    """A policy that always answers. ``name`` is the live one's, for texts."""

    name: str
    live: Policy
    instead: Policy = field(default_factory=Quantum)
    """The plain rule: first come, first served, and nobody stays longer than a while."""
    lookers: list[Looker] = field(default_factory=list)
    errors: int = 0
    last_error: str = ""

    def decide(self, view: GroupView) -> Decision:
        """What the live policy says, or the plain rule when that cannot be used. Never raises."""
        error = ""
        try:
            decision = checked(self.live.decide(view), view)
        except Exception as raised:
            error = repr(raised)
            self.errors += 1
            self.last_error = f"group {view.group}: {error}"
            decision = self._instead(view, error)
        for look in self.lookers:
            look(view, decision, error)
        return decision

    def _instead(self, view: GroupView, error: str) -> Decision:
        try:
            decision = checked(self.instead.decide(view), view)
        except Exception as second:
            return Stay(AGAIN_SECONDS, f"policy {self.name} failed ({error}), and so did the plain rule ({second!r})")
        said = f"policy {self.name} failed ({error}); by the plain rule: {decision.reason}"
        if isinstance(decision, Stay):
            return Stay(decision.until, said)
        if isinstance(decision, Park):
            return Park(decision.seat, said)
        return Switch(decision.activate, decision.evict, said)
