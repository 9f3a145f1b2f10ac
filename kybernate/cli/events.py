"""Following the router's events over its restarts, each event once."""

import time
from collections.abc import Callable
from typing import Any

from kybernate.cli.errors import CliError
from kybernate.cli.router import Router

AGAIN_SECONDS = 0.5
GIVE_UP_SECONDS = 30.0
"""A router that has been away for so long is not coming back."""


def follow_events(router: Router, show: Callable[[dict[str, Any]], None], *, again: bool) -> None:
    """Show each event. ``again``: connect again after a break and go on after the last one shown."""
    last_id: str | None = None
    reached = False
    lost_at: float | None = None
    while True:
        try:
            for number, event in router.events(last_id):
                reached, lost_at = True, None
                if event is not None:
                    last_id = number or last_id
                    show(event)
        except CliError:
            lost_at = lost_at or time.monotonic()
            # The first try must work: a wrong address is not an interruption.
            if not again or not reached or time.monotonic() - lost_at > GIVE_UP_SECONDS:
                raise
        if not again:
            return
        time.sleep(AGAIN_SECONDS)
