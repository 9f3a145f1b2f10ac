"""A driver that succeeds at every call and hangs at one verb; helpers of tests use it."""

import sys
import time
from typing import Any


class EchoDriver:
    """``hangs``: the verb."""

    def __init__(self, hangs: str) -> None:
        self._hangs = hangs

    def call(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Succeed, or hang."""
        if verb == self._hangs:
            time.sleep(3600)
        return {"code": 0}


def echo_command(hangs: str = "hang") -> tuple[str, ...]:
    """The command line of a helper that hangs at a verb."""
    helper = (sys.executable, "-m", "services.checkpointer.helper")
    return (*helper, "--fake", "tests.cuda.echo_driver:EchoDriver", hangs)
