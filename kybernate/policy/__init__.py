"""The brain: which seat runs when. Pure: a view goes in, a decision with its reason comes out.

The GPU manager and the simulator call the same code. Times are model seconds. A policy is one small class with one
method; adding one is adding a file here and a name to ``POLICIES``.
"""

from kybernate.policy.exhaustive import Exhaustive
from kybernate.policy.fifo_switch import FifoSwitch
from kybernate.policy.idle_timeout import IdleTimeout
from kybernate.policy.kyb import KybBalanced, KybBounded, KybSlo
from kybernate.policy.quantum import Quantum
from kybernate.policy.view import Decision, GroupView, Park, Policy, SeatView, Stay, Switch

POLICIES: dict[str, type[Policy]] = {
    "kyb-balanced": KybBalanced,
    "kyb-bounded": KybBounded,
    "kyb-slo": KybSlo,
    "fifo-switch": FifoSwitch,
    "exhaustive": Exhaustive,
    "idle-timeout": IdleTimeout,
    "quantum": Quantum,
}

__all__ = [
    "POLICIES",
    "Decision",
    "GroupView",
    "KybBalanced",
    "KybBounded",
    "KybSlo",
    "Park",
    "Policy",
    "SeatView",
    "Stay",
    "Switch",
]
