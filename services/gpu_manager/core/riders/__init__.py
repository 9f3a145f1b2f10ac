"""The riders of a node, in the order in which they are asked."""

from services.gpu_manager.core.rider import Rider
from services.gpu_manager.core.riders.host_memory import HostMemory
from services.gpu_manager.core.riders.rehearsal import Rehearsals

RIDERS: tuple[Rider, ...] = (HostMemory(), Rehearsals())
