"""The fake GPU driver as a backend: everything is the driver backend's; only the helper speaks to the fake."""

import sys
from pathlib import Path

FAKE_HELPER = (sys.executable, "-m", "services.checkpointer.helper", "--driver", "fake", "--socket")


def fake_helper_command(socket: Path) -> tuple[str, ...]:
    """Command line of the helper for the fake driver at ``socket``."""
    return (*FAKE_HELPER, str(socket))
