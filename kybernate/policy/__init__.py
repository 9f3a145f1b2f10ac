"""The brain: which seat runs when. Pure: a view goes in, a decision with its reason comes out.

The GPU manager and the simulator call the same code. Times are model seconds. A policy is one small class with one
method; adding one is adding a file here and a name to ``POLICIES``.
"""

from kybernate.policy.fifo_batch import FifoBatch
from kybernate.policy.view import Decision, GroupView, Park, Policy, SeatView, Stay, Switch

POLICIES: dict[str, type[Policy]] = {"fifo-batch": FifoBatch}

__all__ = ["POLICIES", "Decision", "FifoBatch", "GroupView", "Park", "Policy", "SeatView", "Stay", "Switch"]
