"""The pauses between attempts that fail: of connections, watches and registrations."""

import random


class Backoff:
    """Pauses of a loop that tries again: each twice as long as the one before, from ``first`` to ``last`` wall seconds.
    Each is shortened by chance to half of it at most, so that many processes do not try at the same time."""

    def __init__(self, first: float, last: float) -> None:
        self._first, self._last, self._next = first, last, first

    def reset(self) -> None:
        """The attempt has succeeded: the next pause is the first one again."""
        self._next = self._first

    def pause(self) -> float:
        """Wall seconds to wait now."""
        seconds, self._next = self._next, min(2 * self._next, self._last)
        return seconds * random.uniform(0.5, 1.0)
