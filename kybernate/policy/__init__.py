"""Policies decide which seat runs when. Pure: a view goes in, a decision with its reason comes out.

The GPU manager and the simulator call the same code. Times are model seconds. A policy is one small class with one
method ``decide``; ``POLICIES`` lists those that a node's configuration may name: these, and what installed packages
register as entry points of the group ``kybernate.policies``. A name below stays what it is.
"""

from dataclasses import is_dataclass

from kybernate.extras import registered
from kybernate.policy.kyb import KybBalanced, KybBounded, KybSlo
from kybernate.policy.rules import Exhaustive, Quantum
from kybernate.policy.view import Decision, GroupView, Park, PeerView, Policy, SeatView, Stay, Switch

POLICIES: dict[str, type[Policy]] = {
    "kyb-balanced": KybBalanced,
    "kyb-bounded": KybBounded,
    "kyb-slo": KybSlo,
    "exhaustive": Exhaustive,
    "quantum": Quantum,
}
_others, _unusable = registered("kybernate.policies")
_unusable |= {
    name: f"{kind!r} is no dataclass; make it one, as docs/dev/policy.md shows, or uninstall its package"
    for name, kind in _others.items()
    if not (isinstance(kind, type) and is_dataclass(kind))
}
UNUSABLE = {name: why for name, why in _unusable.items() if name not in POLICIES}
"""Policies of packages that cannot be used: why, and the remedy. Only what names one is refused."""
POLICIES = {name: kind for name, kind in _others.items() if name not in UNUSABLE} | POLICIES

__all__ = [
    "POLICIES",
    "UNUSABLE",
    "Decision",
    "GroupView",
    "KybBalanced",
    "KybBounded",
    "KybSlo",
    "Park",
    "PeerView",
    "Policy",
    "SeatView",
    "Stay",
    "Switch",
]
