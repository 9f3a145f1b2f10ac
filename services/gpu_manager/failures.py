"""Failures of one seat as facts: how often its engine has ended without having served, why, and what follows. Pure.

*Served*: healthy, then an answered request or ``SERVED_SECONDS``. That, a new pod and ``kyb activate`` clear them.
A start that gave way to requests has not failed; but another one without a request makes its neighbours cold.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

FAILING = 2
"""Ends in a row after which a seat asks only by requests: one may be an accident."""
SERVED_SECONDS = 60.0
"""Wall: an engine that was healthy for so long counts as one that serves."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_REST_SECONDS = 5.0, 300.0, 3600.0
"""Wall: the pause after ``FAILING`` ends; its end by doubling; and by the length of the attempts."""


@dataclass(frozen=True, slots=True)
class Failures:
    """What has failed with a seat lately. Times: unix seconds."""

    count: int = 0
    """Ends in a row of its engine, which had not served."""
    code: int | None = None
    """The exit code of the last one; None: not known, or the node has ended it."""
    why: str = ""
    """How the last one ended: ``exited with code 1``."""
    line: str = ""
    """The last line of its log."""
    since: float = 0.0
    failing: bool = False
    """No warm-up, and no eviction for it without a request."""
    until: float = 0.0
    """Others go first until then, and after ``FAILING`` ends it is not tried again before."""
    gave_way: int = 0
    """Starts that gave way to requests for others."""
    unasked_until: float = 0.0
    """Until then only a request, a pin or an operator starts it."""

    def pausing(self, now: float) -> bool:
        """Others go first. A clock that was set back makes no pause longer."""
        return 0.0 < self.until - now <= LONGEST_REST_SECONDS

    def ended(self, now: float, took: float, why: str, code: int | None, line: str) -> "Failures":
        """Its engine has ended after ``took`` seconds of its start, and had not served."""
        count, since = self.count + 1, self.since or now
        failing = count >= FAILING
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(count - FAILING, 64)) if failing else 0.0
        until = now + max(pause, min(LONGEST_REST_SECONDS, took / 2))
        return replace(self, count=count, code=code, why=why, line=line, since=since, until=until, failing=failing)

    def unasked(self, now: float) -> bool:
        """It has no claim without a request."""
        return self.failing or 0.0 < self.unasked_until - now <= LONGEST_REST_SECONDS

    def yielded(self, now: float) -> "Failures":
        """Its start gave way: the next one without a request comes after twice the pause."""
        pause = min(LONGEST_REST_SECONDS, SERVED_SECONDS * 2.0 ** min(self.gave_way, 64))
        return replace(self, gave_way=self.gave_way + 1, unasked_until=now + pause)

    def text(self, name: str) -> str:
        """For people; empty while it is not failing. It has no time that passes."""
        if not self.failing:
            return ""
        last = f": {self.line}" if self.line else ""
        since = datetime.fromtimestamp(self.since, UTC)
        return f"{name} has failed {self.count} times in a row since {since:%H:%M} UTC: {self.why}{last}"
