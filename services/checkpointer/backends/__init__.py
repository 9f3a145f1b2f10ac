"""Ways of parking by the name that a pod asks for (annotation ``kyb.ai/backend``)."""

from collections.abc import Mapping
from dataclasses import replace

from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import Backend
from services.checkpointer.backends.refusals import Allowance
from services.checkpointer.helper_pool import HelperPool


def open_backends(pool: HelperPool, timeouts: Timeouts, host: Host, margin_bytes: int = 0) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` is the checkpoint API of whichever driver this node's helpers speak to; ``fake`` the
    same with everything allowed that only hardware would punish. They share the host, and so all reservations."""
    calls = DriverCalls(pool, timeouts)
    evidence = Evidence(calls, host.freezer, margin_bytes)
    anything = replace(host, allowed=frozenset(Allowance))
    return {"cuda": DriverBackend(calls, host, evidence), "fake": DriverBackend(calls, anything, evidence)}
