"""Groups of GPUs and the seats on them, from configuration and the machine's GPUs. Pure.

``plan`` is the entry: groups, each with the reason for it, and warnings. ``docs/topology.md`` tells it in words.
"""

from kybernate.topology.groups import SEAT_ID, Group, Incomplete, Topology, group_key, seat_id
from kybernate.topology.mig import mig_refusal
from kybernate.topology.moving import peers
from kybernate.topology.planning import build_groups, plan

__all__ = [
    "SEAT_ID",
    "Group",
    "Incomplete",
    "Topology",
    "build_groups",
    "group_key",
    "mig_refusal",
    "peers",
    "plan",
    "seat_id",
]
