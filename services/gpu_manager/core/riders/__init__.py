"""The riders of a node, in the order in which they are asked."""

from services.gpu_manager.core.riders import lanes  # noqa: F401 with its row
from services.gpu_manager.core.riders.host_memory import HostMemory
from services.gpu_manager.core.riders.operations import Operations
from services.gpu_manager.core.riders.rehearsal import Rehearsals
from services.gpu_manager.core.state import Rider

RIDERS: tuple[Rider, ...] = (HostMemory(), Rehearsals(), Operations())
