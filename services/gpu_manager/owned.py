"""Groups of seats that somebody has, although the configuration no longer offers them. Pure.

The plugin keeps offering such seats (``kybernate.kept``); the manager must go on leading them. It knows them from its
ledger, which has every owned seat with its GPUs.
"""

from typing import NamedTuple

from kybernate.kept import keep, key_of, size_of
from kybernate.ledger import Ledger
from kybernate.machine import Gpu, Link
from kybernate.topology import Group

UNKNOWN = "kyb.ai/kept"
"""The resource of a kept seat when no profile of its size is left; only for people."""


class Machine(NamedTuple):
    """What groups are made of."""

    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...]
    instances: tuple[Gpu, ...]


def with_owned(groups: tuple[Group, ...], ledger: Ledger, machine: Machine) -> tuple[Group, ...]:
    """The configured groups, and those of the owned seats that are in none of them."""
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    by_size = {len(group.gpus): group.profile.resource for group in groups}
    held = {one.seat: resources.get(one.seat) or by_size.get(size_of(one.seat), UNKNOWN) for one in ledger.seats}
    members = {key_of(one.seat): one.gpus for one in ledger.seats}
    return keep(groups, held, (*machine.gpus, *machine.instances), members=members)[0]
