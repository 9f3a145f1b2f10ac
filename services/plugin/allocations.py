"""Allocated seats of this node, in memory and on disk.

The plugin needs three sources to know which seats are allocated; none can replace another:

* its answers to Allocate are known at once. PodResources shows an allocation only after the pod's admission; before
  that, kubelet may ask for the next seat, also of another resource on the same GPUs;
* PodResources alone shows that a seat was freed (kubelet does not notify plugins), and which seats an earlier plugin
  allocated. It lists no pods while kubelet starts, and never the GPUs of a seat;
* the file lets a plugin that starts with another configuration rebuild the groups of allocated seats: a seat's ID has
  only a hash of the GPUs, and finding GPUs by their hash is limited to a number of combinations.

``Allocations`` merges the first two in memory; the file is its copy. The GPU manager's ledger is not read: the plugin
must work while the manager is down.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kybernate import files
from kybernate.logs import get_logger
from kybernate.topology import AllocatedSeat

FILE = "plugin-seats.json"
FORGET_AFTER = 3
"""Consecutive PodResources lists without a seat after which it is free: an admitted pod is listed with a delay."""


@dataclass
class Allocations:
    """The allocated seats."""

    seats: dict[str, AllocatedSeat] = field(default_factory=dict)
    """By seat ID."""
    _misses: dict[str, int] = field(default_factory=dict)
    """By seat ID: consecutive PodResources lists without it."""

    def allocate(self, seat: AllocatedSeat) -> None:
        """Record an answer to Allocate."""
        self._misses.pop(seat.id, None)
        self.seats[seat.id] = seat

    @property
    def settled(self) -> bool:
        """True if the last PodResources list had every allocated seat."""
        return not self._misses

    def add_listed(self, listed: Mapping[str, str]) -> None:
        """Add the seats of a PodResources list (resource by seat ID); forgets none, as kubelet may be starting."""
        for seat, resource in listed.items():
            self._misses.pop(seat, None)
            self.seats.setdefault(seat, AllocatedSeat(seat, resource))

    def observe(self, listed: Mapping[str, str]) -> bool:
        """Apply a PodResources list; return whether an allocation was added or forgotten."""
        before = dict(self.seats)
        self.add_listed(listed)
        for seat in self.seats.keys() - listed.keys():
            misses = self._misses[seat] = self._misses.get(seat, 0) + 1
            if misses >= FORGET_AFTER:
                del self.seats[seat], self._misses[seat]
        return self.seats != before


def load(state_dir: Path) -> Allocations:
    """Return what the last plugin saved; empty when there is no file or it cannot be read. Blocking."""
    path = state_dir / FILE
    try:
        rows = json.loads(path.read_text())["seats"]
        seats = [
            AllocatedSeat(row["seat"], row["resource"], tuple(row["gpus"]), tuple(row.get("reach", ()))) for row in rows
        ]
    except FileNotFoundError:
        return Allocations()
    except (OSError, ValueError, KeyError, TypeError) as error:
        get_logger().warning("allocations.read_failed", file=str(path), reason=repr(error))
        return Allocations()
    return Allocations({one.id: one for one in seats})


def dump(allocations: Allocations) -> str:
    """Return the text of the file."""
    seats = [
        {"seat": one.id, "resource": one.resource, "gpus": list(one.gpus), "reach": list(one.reach)}
        for one in sorted(allocations.seats.values(), key=lambda one: one.id)
    ]
    return json.dumps({"seats": seats}, indent=1)


def save(state_dir: Path, text: str) -> None:
    """Replace the file. Blocking. Raises OSError."""
    state_dir.mkdir(parents=True, exist_ok=True)
    files.replace(state_dir / FILE, text, durable=False, mode=0o600)
