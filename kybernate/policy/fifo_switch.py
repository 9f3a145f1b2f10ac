"""Ollama's rule: the first request for another model ends the admission of the running one."""

from dataclasses import dataclass

from kybernate.policy.turns import oldest, take_turns
from kybernate.policy.view import Decision, GroupView


@dataclass(frozen=True, slots=True)
class FifoSwitch:
    """Whoever waits longest goes next, and the holder admits nothing more from the moment somebody waits.

    Source: Ollama's ``server/sched.go``, as a rule: the head of the queue expires the runner, all behind it queue.
    """

    def decide(self, view: GroupView) -> Decision:
        """Close the holder as soon as somebody waits."""
        return take_turns(view, oldest, lambda holder, comer: 0.0)  # noqa: ARG005
