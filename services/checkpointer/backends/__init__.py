"""Ways of parking by the name that a pod asks for (annotation ``kyb.ai/backend``)."""

from collections.abc import Mapping
from dataclasses import replace

from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.port import Backend
from services.checkpointer.backends.refusals import Allowance
from services.checkpointer.backends.site import Site
from services.checkpointer.helper_pool import HelperPool
from services.checkpointer.patience import Patience


def open_backends(pool: HelperPool, patience: Patience, site: Site, margin_bytes: int = 0) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` is the checkpoint API of whichever driver this node's helpers speak to; ``fake`` the
    same with everything allowed that only hardware would punish. They share the site, and so all reservations."""
    calls = DriverCalls(pool, patience)
    evidence = Evidence(calls, site.freezer, margin_bytes)
    anything = replace(site, allowed=frozenset(Allowance))
    return {"cuda": DriverBackend(calls, site, evidence), "fake": DriverBackend(calls, anything, evidence)}
