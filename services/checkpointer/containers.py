"""The processes of a seat: those in the control group of its container in its pod, and no others.

``containerd://``, ``cri-o://`` and ``docker://`` ids are looked for in /proc/<pid>/cgroup together with the pod's UID.
``process://<pid>``, reported by the fake kubelet, means a process, its descendants and its process group. ``kyb-run``,
the first process of a container that starts its engine again, is none of them: where it is alone, no process is left.
It is known by its program's name, which any process may have: that it holds no memory, the driver has to show.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from kybernate.cgroups import Cgroup, Cgroups
from kybernate.messages import SeatTarget
from kybernate.run import PROGRAM
from kybernate.seat import container_of
from services.checkpointer.processes import ProcessIdentity, group, identify, tree

RUNTIMES = ("containerd", "cri-o", "docker")


class UnknownContainerError(Exception):
    """A container id of an unknown runtime, or without a pod UID."""


@dataclass(frozen=True, slots=True)
class SeatContainer:
    """One container with at least one process."""

    root: ProcessIdentity
    """Its first process."""
    cgroup: Cgroup | None
    """None for ``process://``: such processes share the control group of the process that started them."""


@dataclass
class Containers:
    """Containers of this machine; tests pass other folders."""

    cgroups: Cgroups = field(default_factory=Cgroups)
    fake_kubelet: bool = False
    """Accept ``process://<pid>``. A real kubelet reports none: a pod's status that has one is forged."""
    _known: dict[tuple[str, str], Cgroup] = field(default_factory=dict)
    """By (container, pod); a container never moves."""

    def find(self, target: SeatTarget) -> SeatContainer | None:
        """The container of a seat; None if it has no process, or kyb-run only. Raises UnknownContainerError,
        HiddenProcessesError."""
        container = self._container(target)
        if container is None or self._alone(container):
            return None
        return container

    def keeper(self, target: SeatTarget) -> ProcessIdentity | None:
        """``kyb-run``, if it is the first process of the seat's container. Raises as ``find``."""
        container = self._container(target)
        return container.root if container is not None and self._is_keeper(container.root) else None

    def _alone(self, container: SeatContainer) -> bool:
        """True if its first process is kyb-run and the only one."""
        if not self._is_keeper(container.root):
            return False
        cgroup = container.cgroup
        found = (
            tree(container.root, self.cgroups.proc) if cgroup is None else self._identities(self.cgroups.pids(cgroup))
        )
        return not {*found} - {container.root}

    def _is_keeper(self, root: ProcessIdentity) -> bool:
        try:
            program = os.readlink(self.cgroups.proc / str(root.pid) / "exe")
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
        if scheme not in RUNTIMES or not name or not target.pod_uid:
            known = ", ".join(f"{one}://" for one in (*RUNTIMES, *(("process",) if self.fake_kubelet else ())))
            raise UnknownContainerError(
                f"container {target.container_id!r} of pod {target.pod_uid!r}; known are {known}"
            )
        cgroup = self._cgroup(name, target.pod_uid)
        if cgroup is None:
            return None
        found = self._identities(self.cgroups.pids(cgroup))
        if not found:
            self._known.pop((name, target.pod_uid), None)
            return None
        return SeatContainer(min(found, key=lambda who: (who.start, who.pid)), cgroup)

    def processes(
        self, target: SeatTarget, root: ProcessIdentity | None, *, strays: bool = False
    ) -> list[ProcessIdentity]:
        """All processes of the seat's container now but kyb-run, parents first; empty if there is none.

        ``root``: its first process as last known, since the pid of ``process://<pid>`` may have been reused.
        ``strays``: also search all of /proc for members of its process group whose parents are gone.
        """
        if not (self.fake_kubelet and target.container_id.startswith("process://")):
            container = self.find(target)
            if container is None or container.cgroup is None:
                return []
            found = sorted(self._identities(self.cgroups.pids(container.cgroup)), key=lambda who: (who.start, who.pid))
            return self._without_keeper(found)
        if root is None:
            return []
        found = tree(root, self.cgroups.proc)
        if not strays or (not found and identify(root.pid, self.cgroups.proc) is not None):  # the pid was reused
            return self._without_keeper(found)
        strange = [one for one in group(root.pid, None, self.cgroups.proc) if one not in found]
        return self._without_keeper(found + strange)

    def _without_keeper(self, found: list[ProcessIdentity]) -> list[ProcessIdentity]:
        """The first process is left out if it is kyb-run."""
        return found[1:] if found and self._is_keeper(found[0]) else found

    def own(self, container: SeatContainer, among: Iterable[int]) -> list[ProcessIdentity]:
        """Those of the pids ``among`` that belong to the container."""
        if container.cgroup is None:
            return group(container.root.pid, among, self.cgroups.proc)
        inside = set(self.cgroups.pids(container.cgroup))
        return self._identities([pid for pid in among if pid in inside])

    def _cgroup(self, name: str, pod_uid: str) -> Cgroup | None:
        known = self._known.get((name, pod_uid))
        if known is not None and (known.folder is None or known.folder.is_dir()):
            return known
        found = self.cgroups.find(name, pod_uid)
        if found is not None:
            self._known[name, pod_uid] = found
        return found

    def _identities(self, numbers: Iterable[int]) -> list[ProcessIdentity]:
        return [who for pid in numbers if (who := identify(pid, self.cgroups.proc)) is not None]
