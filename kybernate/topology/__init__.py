"""Groups of GPUs and the seats on them, from configuration and the machine's GPUs. Pure.

``plan`` is the entry: groups, each with the reason for it, and warnings. ``docs/dev/topology.md`` describes the rules.
"""

from kybernate.topology.groups import (
    SEAT_ID,
    Group,
    IncompleteGroup,
    Topology,
    group_key,
    peers,
    seat_id,
    size_of,
)
from kybernate.topology.mig import mig_refusal
from kybernate.topology.orphaned_seats import AllocatedSeat, with_orphaned_seats
from kybernate.topology.planner import plan
