"""Ways of parking by the name that a pod asks for (annotation ``kyb.ai/backend``)."""

from collections.abc import Mapping

from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.port import Backend
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.patience import Patience


def open_backends(pool: HelperPool, patience: Patience) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` is the checkpoint API of whichever driver this node's helpers speak to."""
    calls = DriverCalls(pool, patience)
    driver = DriverBackend(calls, Evidence(calls))
    return {"cuda": driver, "fake": driver}
