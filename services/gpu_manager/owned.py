"""Groups of seats that somebody has, although the configuration no longer offers them. Pure.

The plugin keeps offering such seats (``kybernate.kept``); the manager must go on leading them. It knows them from its
ledger, which has every owned seat with its GPUs.
"""

from kybernate.kept import keep, key_of, size_of
from kybernate.known_gpus import Known
from kybernate.ledger import Ledger
from kybernate.topology import Group

UNKNOWN = "kyb.ai/kept"
"""The resource of a kept seat when no profile of its size is left; only for people."""


def with_owned(groups: tuple[Group, ...], ledger: Ledger, known: Known) -> tuple[Group, ...]:
    """The configured groups, and those of the owned seats that are in none of them."""
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    by_size = {len(group.gpus): group.profile.resource for group in groups}
    held = {one.seat: resources.get(one.seat) or by_size.get(size_of(one.seat), UNKNOWN) for one in ledger.seats}
    members = {key_of(one.seat): one.gpus for one in ledger.seats}
    return keep(groups, held, (*known.gpus, *known.instances), members=members, gone=known.before)[0]
