"""Backends by name; a pod selects one with the annotation ``kyb.ai/backend``."""

from collections.abc import Mapping
from dataclasses import replace

from kybernate.engines import DRIVER_BACKENDS, RESTART
from kybernate.extras import registered
from services.checkpointer.backends.driver import DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.engine import EngineBackend, EngineCalls, SleepingEngine
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import Backend
from services.checkpointer.backends.restart import RestartBackend
from services.checkpointer.backends.sglang import Sglang
from services.checkpointer.backends.trtllm import Trtllm
from services.checkpointer.backends.unload import Unload
from services.checkpointer.backends.vllm import Vllm
from services.checkpointer.core.refusals import Allowance
from services.checkpointer.helper_pool import HelperPool


def open_backends(
    pool: HelperPool,
    timeouts: Timeouts,
    host: Host,
    margin_bytes: int = 0,
    *,
    fake: bool = False,
    http: EngineCalls | None = None,
) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` uses the checkpoint API of the driver that the helpers call. ``fake`` does the same
    with every allowance granted, so it exists only where that driver is the fake one. ``restart`` ends containers,
    which start again at their gate. The others call engines through ``http``; without it they are not offered. Packages
    add APIs of engines as entry points of the group ``kybernate.backends``: each is a callable that gets ``http``. All
    share ``host`` and thereby the reservations."""
    calls = DriverCalls(pool, timeouts)
    evidence = Evidence(calls, host.freezer, margin_bytes)
    backends: dict[str, Backend] = {
        "cuda": DriverBackend(calls, host, evidence),
        "restart": RestartBackend(calls, host, evidence),
    }
    if http is not None:
        engines: dict[str, SleepingEngine] = {
            "vllm": Vllm(http),
            "vllm-2": Vllm(http, level=2),
            "sglang": Sglang(http),
            "trtllm": Trtllm(http),
            "unload": Unload(http),
        }
        reserved = (*DRIVER_BACKENDS, RESTART)
        others = {name: api for name, api in registered("kybernate.backends").items() if name not in reserved}
        engines = {name: api(http) for name, api in others.items()} | engines
        backends |= {name: EngineBackend(calls, host, evidence, http, one) for name, one in engines.items()}
    if fake:
        backends["fake"] = DriverBackend(calls, replace(host, allowed=frozenset(Allowance)), evidence)
    return backends
