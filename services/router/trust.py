"""How far a router may believe what it knows of the seats. Pure.

A manager waits for the acknowledgement of every router that it heard within 10 s. A router that could not make itself
heard for ``TRUST_SECONDS`` must therefore not send to a seat on its own knowledge any more: it asks the manager over
HTTP (an answer holds for ``ANSWER_SECONDS``), and reads the roster again before it believes itself.
"""

TRUST_SECONDS = 8.0
ANSWER_SECONDS = 1.0


class Trust:
    """Times are wall seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.ever_synced = False
        self.synced = False
        self._confirmed = float("-inf")
        self._verified: dict[str, float] = {}

    def sure(self, node: str, now: float) -> bool:
        """Whether what is known of this node's seats may be acted on."""
        if self.ever_synced and now < self._confirmed + TRUST_SECONDS:
            return True
        return now < self._verified.get(node, float("-inf")) + ANSWER_SECONDS

    def sync(self, at: float) -> None:
        """The roster was read after a presence said at ``at`` had reached the bus."""
        self.ever_synced = self.synced = True
        self._confirmed = max(self._confirmed, at)

    def confirm(self, at: float) -> bool:
        """A presence said at ``at`` reached the bus; False: too long after the one before, read the roster again."""
        if not self.synced or at >= self._confirmed + TRUST_SECONDS:
            self.synced = False
            return False
        self._confirmed = at
        return True

    def lose(self) -> None:
        """The bus went away: what is known ages from the last presence on, until the next ``sync``."""
        self.synced = False

    def verify(self, node: str, at: float) -> None:
        """A node's manager answered a question sent at ``at``."""
        self._verified[node] = at
