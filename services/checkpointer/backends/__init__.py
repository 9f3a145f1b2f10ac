"""Backends by name; a pod selects one with the annotation ``kyb.ai/backend``."""

from collections.abc import Mapping
from dataclasses import replace

from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import Backend
from services.checkpointer.backends.restart import RestartBackend
from services.checkpointer.core.refusals import Allowance
from services.checkpointer.helper_pool import HelperPool


def open_backends(
    pool: HelperPool, timeouts: Timeouts, host: Host, margin_bytes: int = 0, *, fake: bool = False
) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` uses the checkpoint API of the driver that the helpers call. ``fake`` does the same
    with every allowance granted, so it exists only where that driver is the fake one. ``restart`` ends containers,
    which start again at their gate. They share ``host`` and thereby all reservations."""
    calls = DriverCalls(pool, timeouts)
    evidence = Evidence(calls, host.freezer, margin_bytes)
    backends: dict[str, Backend] = {
        "cuda": DriverBackend(calls, host, evidence),
        "restart": RestartBackend(calls, host, evidence),
    }
    if fake:
        backends["fake"] = DriverBackend(calls, replace(host, allowed=frozenset(Allowance)), evidence)
    return backends
