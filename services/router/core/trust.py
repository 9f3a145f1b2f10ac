"""How long a router may act on what it knows of a node's seats. Pure.

A manager parks a seat once every router whose presence it received within 10 s has acknowledged the drain. Its own
presence lists these routers. A router therefore forwards on its own knowledge only while the node's manager lists it,
for ``TRUST_SECONDS`` from when it sent the presence that the manager names: that its own nats-server answers proves
nothing, since that server may be cut off from the manager's. Without that lease it queries the manager over HTTP (an
answer is valid for ``ANSWER_SECONDS``). A manager that does not answer while the roster's leader does is away: it parks
nothing before ``AWAY_SECONDS`` after its return.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

TRUST_SECONDS = 8.0
ANSWER_SECONDS = 1.0
COMPLETE_SECONDS = 3.0
"""After the first reading of the roster in which every manager has published how many rows it has written."""
COUNT_SECONDS = 10.0
"""How long that is valid: a manager repeats it every 2 s."""
AWAY_SECONDS = 3.0
"""As ``services.gpu_manager.core.demand.SETTLE_SECONDS``, for which a manager that was away evicts nothing."""


@dataclass(slots=True)
class _Lease:
    """What one node's manager reports of this router."""

    until: float = -inf
    """The router is sure until then."""
    unbroken: bool = False
    """A later list extends it. False: what happened since is not known, so the roster is read again before."""
    began: float = inf
    """When the first list came that is not in force yet: it is, once the roster was read after that."""
    counted: float = -inf
    """Until when the router is counted according to that list and those after it."""


class Trust:
    """How far this router may act on what it knows of the seats. Times are wall seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.ever_synced = False
        self.settles = inf
        """From then on a model that is not known does not exist, if the rows of every node have arrived."""
        self._rows: dict[str, tuple[float, int, int]] = {}
        """By node: until when it is valid, number and highest ``seq`` of the rows that its manager has written."""
        self._leases: defaultdict[str, _Lease] = defaultdict(_Lease)
        self._verified: dict[str, float] = {}

    def sure(self, node: str, now: float) -> bool:
        """Return whether the router may act on what it knows of this node's seats."""
        lease = self._leases.get(node)
        if self.ever_synced and lease is not None and now < lease.until:
            return True
        return now < self._verified.get(node, -inf)

    def count(self, node: str, sent: float, now: float) -> bool:
        """Record that a manager counts this router since its presence of ``sent``.

        Returns True if the roster must be read first: this router was not sure when the list came, so the manager may
        have parked seats without it, or the bus was lost since the last reading.
        """
        lease, until = self._leases[node], min(sent, now) + TRUST_SECONDS
        if lease.unbroken and now < lease.until:
            lease.until = max(lease.until, until)
            return False
        if until <= now:
            return False
        first = now >= lease.counted
        lease.began, lease.counted = now if first else lease.began, max(lease.counted, until)
        return first

    def written(self, node: str, rows: int, seq: int, now: float) -> None:
        """Record that a manager has written so many rows, the last with this ``seq``."""
        self._rows[node] = now + COUNT_SECONDS, rows, seq

    def incomplete(self, rows: Mapping[str, int], seqs: Mapping[str, int], now: float) -> str:
        """Return why rows may not have arrived; empty: all have. ``rows``: how many have, and the highest ``seqs``, by
        node."""
        if now < self.settles:
            return "managers have not reported yet how many rows the roster has"
        for node, (until, count, seq) in self._rows.items():
            if now < until and (rows.get(node, 0) < count or seqs.get(node, 0) < seq):
                return f"not all rows of node {node} have arrived"
        return ""

    def sync(self, at: float, now: float) -> None:
        """Record that the roster was read, from ``at`` until now."""
        if not self.ever_synced:
            self.ever_synced, self.settles = True, now + COMPLETE_SECONDS
        for lease in self._leases.values():
            if lease.began <= at:
                lease.until, lease.unbroken, lease.began = max(lease.until, lease.counted), True, inf

    def lose(self) -> None:
        """Record the loss of the bus: no lease is extended before the next ``sync``."""
        for lease in self._leases.values():
            lease.unbroken, lease.began, lease.counted = False, inf, -inf

    def verify(self, node: str, until: float) -> None:
        """Record that the node's manager has answered a query, or is away."""
        self._verified[node] = until
