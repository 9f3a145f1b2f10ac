"""The processes of a seat: those in the control group of its container, and no others.

``containerd://``, ``cri-o://`` and ``docker://`` ids are looked for in /proc/<pid>/cgroup. The fake kubelet's
``process://<pid>`` means a process, its descendants and its process group. ``kyb-run``, the first process of a
container that starts its engine again, is none of them, and its descendants are the engine: where it has none, no
process is left, whatever ``kubectl exec`` runs beside it. It is known by its program's name, which any process may
have. That a container without a process holds no memory, the driver has to show (``evidence``).
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kybernate.cgroups import CONTAINER, Cgroup, Cgroups, HiddenProcessesError, read
from kybernate.homes import Homes
from kybernate.messages import SeatTarget
from kybernate.run import PROGRAM
from kybernate.seat import container_of
from services.checkpointer.core.failures import StepFailedError
from services.checkpointer.processes import ProcessIdentity, group, identify, parent, tree

RUNTIMES = ("containerd", "cri-o", "docker")


@dataclass(frozen=True, slots=True)
class SeatContainer:
    """One container with at least one process."""

    root: ProcessIdentity
    """Its first process."""
    cgroup: Cgroup | None
    """None for ``process://``: such processes share the control group of the process that started them."""


@contextlib.contextmanager
def _visible() -> Iterator[None]:
    """Where processes cannot be seen, a step fails. Raises StepFailedError."""
    try:
        yield
    except HiddenProcessesError as error:
        raise StepFailedError(str(error)) from error


@dataclass
class Containers:
    """Containers of this machine; tests pass other folders."""

    cgroups: Cgroups = field(default_factory=Cgroups)
    fake_kubelet: bool = False
    """Accept ``process://<pid>``. A real kubelet reports none: a pod's status that has one is forged."""
    _known: dict[str, Cgroup] = field(default_factory=dict)
    """By container, which never moves."""

    def blind(self) -> str:
        """Why no container of this machine can be found from here; empty if one can, or none has to be."""
        try:
            seen = self.fake_kubelet or self.cgroups.names_containers()
        except HiddenProcessesError as error:
            return str(error)
        text = f"no control group in {self.cgroups.proc} is named by a container's id, so no seat's processes are found"
        return "" if seen else f"{text}: set hostPID: true"

    @_visible()
    def find(self, target: SeatTarget) -> SeatContainer | None:
        """The container of a seat; None if it has no process, or kyb-run only. Raises StepFailedError for
        an id that no known runtime gives, and where no processes can be seen."""
        container = self._container(target)
        if container is None or (self._is_keeper(container.root) and not self._engine(container)):
            return None
        return container

    @_visible()
    def keeper(self, target: SeatTarget) -> ProcessIdentity | None:
        """``kyb-run``, if it is the first process of the seat's container. Raises as ``find``."""
        container = self._container(target)
        return container.root if container is not None and self._is_keeper(container.root) else None

    def _engine(self, container: SeatContainer) -> list[ProcessIdentity]:
        """The processes of the container, parents first; where kyb-run leads it, what it has started."""
        if container.cgroup is None:
            return self._without_keeper(tree(container.root, self.cgroups.proc))
        found = sorted(self._identities(self.cgroups.pids(container.cgroup)), key=lambda who: (who.start, who.pid))
        if not (found and self._is_keeper(found[0])):
            return found
        inside = {one.pid for one in found[1:]}
        return [one for one in found[1:] if self._descends(one.pid, found[0].pid, inside)]

    def _descends(self, pid: int, keeper: int, inside: set[int]) -> bool:
        """True unless a process that lives outside the container has started it or its ancestor."""
        while pid in inside:
            pid = parent(pid, self.cgroups.proc)
        return pid == keeper or (pid > 0 and identify(pid, self.cgroups.proc) is None)

    def _is_keeper(self, root: ProcessIdentity) -> bool:
        try:
            program = os.readlink(f"{self.cgroups.proc}/{root.pid}/exe")
        except OSError:
            return False
        return os.path.basename(program.removesuffix(" (deleted)")) == PROGRAM

    def _container(self, target: SeatTarget) -> SeatContainer | None:
        """The container of a seat, whatever process it has."""
        if not target.container_id:
            return None  # its container was never started
        scheme, _, name = container_of(target.container_id).partition("://")
        if self.fake_kubelet and scheme == "process" and name.isdigit():
            root = identify(int(name), self.cgroups.proc)
            return None if root is None else SeatContainer(root, None)
        if scheme not in RUNTIMES or CONTAINER.fullmatch(name) is None:
            known = ", ".join(f"{one}://" for one in (*RUNTIMES, *(("process",) if self.fake_kubelet else ())))
            raise StepFailedError(f"container {target.container_id!r} has no known id; known are {known}")
        cgroup = self._cgroup(name)
        if cgroup is None:
            return None
        found = self._identities(self.cgroups.pids(cgroup))
        if not found:
            self._known.pop(name, None)
            return None
        return SeatContainer(min(found, key=lambda who: (who.start, who.pid)), cgroup)

    @_visible()
    def processes(
        self, target: SeatTarget, root: ProcessIdentity | None, *, strays: bool = False
    ) -> list[ProcessIdentity]:
        """All processes of the seat's container now but kyb-run, parents first; empty if there is none.

        ``root``: its first process as last known, since the pid of ``process://<pid>`` may have been reused.
        ``strays``: also search all of /proc for members of its process group whose parents are gone.
        """
        if not (self.fake_kubelet and target.container_id.startswith("process://")):
            container = self._container(target)
            return [] if container is None else self._engine(container)
        if root is None:
            return []
        found = tree(root, self.cgroups.proc)
        if not strays or (not found and identify(root.pid, self.cgroups.proc) is not None):  # the pid was reused
            return self._without_keeper(found)
        strange = [one for one in group(root.pid, self.cgroups.proc) if one not in found]
        return self._without_keeper(found + strange)

    def _without_keeper(self, found: list[ProcessIdentity]) -> list[ProcessIdentity]:
        """The first process is left out if it is kyb-run."""
        return found[1:] if found and self._is_keeper(found[0]) else found

    def own(self, target: SeatTarget, among: Iterable[int]) -> list[ProcessIdentity]:
        """Those of the pids ``among`` that are in the seat's container, kyb-run too, by any parent."""
        homes, found = Homes((target.container_id,), self.cgroups.proc), []
        for pid in among:
            with contextlib.suppress(OSError):
                found += [pid] if homes.of(pid) is not None else []
        return self._identities(found)

    def unclear(self, target: SeatTarget, among: Iterable[int]) -> str:
        """Why one of the pids ``among`` may be in the seat's container although ``own`` leaves it out: nothing shows
        where it is, or it is in another place of its pod, as a sandbox. Empty if none may."""
        uids = {target.pod_uid, target.pod_uid.replace("-", "_")} - {""}
        for pid in among:
            try:
                groups = read(self.cgroups.proc / str(pid) / "cgroup")
            except OSError as error:
                return f"/proc/{pid}/cgroup cannot be read ({error.strerror}): is hostPID: true set, or /proc hidden?"
            if any(uid in groups for uid in uids):
                return f"pid {pid} is in its pod, and not in its container: is this a sandbox (gVisor)?"
        return ""

    def _cgroup(self, name: str) -> Cgroup | None:
        known = self._known.get(name)
        if known is not None and (known.folder is None or known.folder.is_dir()):
            return known
        found = self.cgroups.find(name)
        if found is not None:
            self._known[name] = found
        return found

    def _identities(self, numbers: Iterable[int]) -> list[ProcessIdentity]:
        return [who for pid in numbers if (who := identify(pid, self.cgroups.proc)) is not None]
