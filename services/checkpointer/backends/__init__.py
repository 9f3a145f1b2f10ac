"""Backends by name; a pod selects one with the annotation ``kyb.ai/backend``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kybernate.engines import DRIVER_BACKENDS, RESTART
from kybernate.extras import registered
from kybernate.logs import get_logger
from services.checkpointer.backends.driver import Backend, DriverBackend
from services.checkpointer.backends.driver_calls import DriverCalls, Timeouts
from services.checkpointer.backends.engine import EngineBackend, EngineCalls, EngineRefusedError, SleepingEngine
from services.checkpointer.backends.evidence import Evidence
from services.checkpointer.backends.host import Host
from services.checkpointer.backends.port import SeatProcesses
from services.checkpointer.backends.restart import RestartBackend
from services.checkpointer.backends.sglang import Sglang
from services.checkpointer.backends.unload import Unload
from services.checkpointer.backends.vllm import Vllm
from services.checkpointer.core.refusals import Allowance
from services.checkpointer.helper_pool import HelperPool


def open_backends(
    pool: HelperPool, timeouts: Timeouts, host: Host, margin_bytes: int = 0, *, http: EngineCalls, fake: bool = False
) -> Mapping[str, Backend]:
    """Backends by name. ``cuda`` uses the checkpoint API of the driver that the helpers call. ``fake`` does the same
    with every allowance granted, so it exists only where that driver is the fake one. ``restart`` ends containers,
    which start again at their gate. The others call engines through ``http``. Packages add APIs of engines as entry
    points of the group ``kybernate.backends``: each is a callable that gets ``http``. All share ``host`` and thereby
    the reservations."""
    calls = DriverCalls(pool, timeouts)
    evidence = Evidence(calls, host.freezer, margin_bytes)
    reserved = (*DRIVER_BACKENDS, RESTART)
    engines = {name: api for name, api in _of_packages(http).items() if name not in reserved}
    engines |= {"vllm": Vllm(http), "vllm-2": Vllm(http, level=2), "sglang": Sglang(http), "unload": Unload(http)}
    backends = _Offered(lambda api: EngineBackend(calls, host, evidence, http, api))
    backends["cuda"] = DriverBackend(calls, host, evidence)
    backends["restart"] = RestartBackend(calls, host, evidence)
    backends |= {name: backends.parks_by(api) for name, api in engines.items()}
    if fake:
        backends["fake"] = DriverBackend(calls, replace(host, allowed=frozenset(Allowance)), evidence)
    return backends


class _Offered(dict[str, Backend]):
    """The backends that this node offers; any other name is in none of its lists, and yet a job of the journal that a
    restart interrupted may have it, if its package was uninstalled meanwhile."""

    def __init__(self, parks_by: Callable[[SleepingEngine], Backend]) -> None:
        super().__init__()
        self.parks_by = parks_by

    def __missing__(self, name: str) -> Backend:
        return self.parks_by(UnusableEngine(f"backend {name}: no package registers it"))


def _of_packages(http: EngineCalls) -> dict[str, SleepingEngine]:
    """The APIs of other packages; one that cannot be used refuses, so that its seats are demoted with the reason."""
    found, unusable = registered("kybernate.backends")
    engines: dict[str, SleepingEngine] = {}
    for name, api in found.items():
        try:
            engines[name] = api(http)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit
            unusable[name] = f"{api!r} cannot be made: {type(error).__name__}: {error}; repair or uninstall its package"
    for name, why in unusable.items():
        get_logger().error("backend.unusable", backend=name, reason=why)
        engines[name] = UnusableEngine(f"backend {name}: {why}")
    return engines


@dataclass(frozen=True)
class UnusableEngine(SleepingEngine):
    """In place of an API that cannot be used: refuses to park, and a seat that is parked starts cold."""

    why: str
    pace = 0.25

    async def refusal(self, seat: SeatProcesses, command: str, seconds: float) -> str:  # noqa: ARG002
        """Always."""
        return self.why

    async def sleep(self, seat: SeatProcesses, seconds: float) -> None:  # noqa: ARG002
        """Raises EngineRefusedError."""
        raise EngineRefusedError(self.why)

    async def wake(self, seat: SeatProcesses, seconds: float) -> None:  # noqa: ARG002
        """Raises EngineRefusedError."""
        raise EngineRefusedError(self.why)
