"""What the driver backend needs of the machine besides the driver: containers, freezers, memory, reservations."""

from dataclasses import dataclass, field
from pathlib import Path

from kybernate.cgroups import Cgroup, HiddenProcessesError
from kybernate.extras import dev_part
from kybernate.messages import SeatTarget
from services.checkpointer.backends.driver_calls import StepFailedError
from services.checkpointer.backends.headroom import Headroom, KernelMemory
from services.checkpointer.backends.inspection import Inspection
from services.checkpointer.backends.port import Unit
from services.checkpointer.backends.refusals import Allowance
from services.checkpointer.backends.reservations import Reservations
from services.checkpointer.containers import Container, Containers, UnknownContainerError
from services.checkpointer.failures import Trouble
from services.checkpointer.freezer import Freezer
from services.checkpointer.processes import Identity, alive


@dataclass
class Site:
    """One machine. Everything that halves of different seats share is here."""

    containers: Containers
    freezer: Freezer
    headroom: Headroom
    reservations: Reservations = field(default_factory=Reservations)
    inspection: Inspection = field(default_factory=Inspection)
    allowed: frozenset[str] = frozenset()
    """Allowances of the node (refusals.Allowance)."""
    device_nodes: bool = True
    """Whether GPUs have device nodes; the fake machine's have none."""

    def container(self, target: SeatTarget) -> Container | None:
        """The seat's container; None without a process. Raises UnknownContainerError or HiddenProcessesError."""
        return self.containers.find(target)

    def cgroup(self, unit: Unit) -> Cgroup | None:
        """The control group of the unit's container alone; None when it has none or is gone. Raises StepFailedError."""
        if unit.target.container_id.startswith("process://"):
            return None
        try:
            container = self.container(unit.target)
        except (UnknownContainerError, HiddenProcessesError) as error:
            raise StepFailedError(Trouble.REFUSED, str(error)) from error
        return None if container is None else container.cgroup

    def living(self, unit: Unit, *, strays: bool = False) -> list[Identity]:
        """Every process of the seat that exists: those of its container, and members that left it.

        ``strays``: with a look through all of /proc; see ``Containers.processes``. Raises StepFailedError.
        """
        try:
            found = self.containers.processes(unit.target, unit.root, strays=strays)
        except (UnknownContainerError, HiddenProcessesError) as error:
            raise StepFailedError(Trouble.REFUSED, str(error)) from error
        return found + [m.who for m in unit.members if m.who not in found and alive(m.who)]


def open_site(fake_driver: Path | None, freeze_seconds: float, allowed: frozenset[str] = frozenset()) -> Site:
    """This machine; with ``fake_driver``, the socket of the daemon, its GPUs are made up.

    Copies in host memory exist by name only then, so no control group limits them; there are no device nodes; and
    seats of several GPUs and processes are parked, since a made-up GPU punishes nobody who has not asked for it.
    Raises ExtraMissingError.
    """
    containers = Containers()
    freezer = Freezer(containers.cgroups, freeze_seconds)
    if fake_driver is None:
        return Site(containers, freezer, Headroom(KernelMemory(), containers.cgroups), allowed=allowed)
    together = {Allowance.SEVERAL_GPUS, Allowance.SEVERAL_PROCESSES}
    headroom = Headroom(dev_part("host_memory", "KYB_FAKE_DRIVER")(fake_driver), None)
    return Site(containers, freezer, headroom, allowed=allowed | together, device_nodes=False)
