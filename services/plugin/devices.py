"""What kubelet is told: which seats exist, which are healthy, which one to take, and what a container gets with it.

Pure: everything comes from the groups that were built at start, so that an answer never waits for anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.gpus import Gpu
from kybernate.topology import Group

CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
RECOVERY_READS = 2
"""Probation: a GPU that was missing must be seen this often in a row before its seats are offered again."""


class RefusedError(Exception):
    """A request that must not be granted; users read this text in ``kubectl describe pod``."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A device, as kubelet calls it."""

    id: str
    resource: str
    group: Group
    order: int
    """Place among all seats: groups in the order of the configuration, then by number. First-fit and ties use it."""


@dataclass(frozen=True, slots=True)
class OfferedSeat:
    """One entry of ListAndWatch."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a container gets with its seat."""

    envs: Mapping[str, str]
    mounts: tuple[tuple[str, str], ...]
    """Read-only (container path, host path)."""
    devices: tuple[str, ...]
    """Device nodes, the same path on both sides."""


@dataclass(frozen=True)
class Offer:
    """All seats of this node and how to answer for them."""

    groups: tuple[Group, ...]
    gpus: tuple[Gpu, ...]
    seats_dir: Path
    """Host folder of the seat folders; containers see theirs at the same path."""
    present: frozenset[str] = frozenset()
    """Device nodes that exist on this host; others are not handed out, since creating the container would fail."""
    fake_driver: Path | None = None
    """Set with the fakes: no device nodes, but the socket of the fake driver."""
    seats: Mapping[str, Seat] = field(init=False)

    def __post_init__(self) -> None:
        pairs = [(seat_id, group) for group in self.groups for seat_id in group.seat_ids]
        seats = {
            seat_id: Seat(seat_id, group.profile.resource, group, order) for order, (seat_id, group) in enumerate(pairs)
        }
        object.__setattr__(self, "seats", seats)

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources that have seats here, in the order of the configuration."""
        return tuple(dict.fromkeys(seat.resource for seat in self.seats.values()))

    def listed(self, resource: str, faulty: frozenset[str]) -> tuple[OfferedSeat, ...]:
        """The complete list. A faulty GPU (UUID) makes every seat of every group that contains it unhealthy."""
        return tuple(
            OfferedSeat(seat.id, faulty.isdisjoint(gpu.uuid for gpu in seat.group.gpus), _numa_nodes(seat.group))
            for seat in self.seats.values()
            if seat.resource == resource
        )

    def preferred(
        self, available: Iterable[str], must_include: Sequence[str], size: int, faulty: frozenset[str]
    ) -> tuple[str, ...]:
        """First-fit: the first seats of the first groups. An empty list where there is no good answer."""
        must = [seat_id for seat_id in must_include if seat_id in self.seats]
        others = [self.seats[seat_id] for seat_id in set(available) - set(must) if seat_id in self.seats]
        sound = [seat for seat in others if faulty.isdisjoint(gpu.uuid for gpu in seat.group.gpus)]
        ranked = [seat.id for seat in sorted(sound, key=lambda seat: seat.order)]
        chosen = (*must, *ranked)[: max(size, 0)]
        return chosen if len(chosen) == size else ()

    def answer(self, resource: str, seat_ids: Sequence[str]) -> Answer:
        """What the container gets. Raises RefusedError. The same seats always give the same answer."""
        if len(set(seat_ids)) != 1:
            raise RefusedError(
                f"a container can have one {resource}, not {len(set(seat_ids))}: a seat already is a whole group of "
                f"GPUs; set resources.limits to 1 and take a larger profile for more GPUs"
            )
        seat = self.seats.get(seat_ids[0])
        if seat is None or seat.resource != resource:
            raise RefusedError(
                f"seat {seat_ids[0]} of {resource} does not exist on this node any more; "
                f"its configuration changed since the seat was offered; delete the pod so that it gets another one"
            )
        folder = str(self.seats_dir / seat.id)
        envs = {
            "KYB_GPU_INDICES": ",".join(str(gpu.index) for gpu in seat.group.gpus),
            "KYB_GPU_GROUP": seat.group.name,
            "KYB_GPU_SEAT": seat.id,
            "KYB_SEAT_DIR": folder,
            "NVIDIA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in seat.group.gpus),  # images carry "all"
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(str(ordinal) for ordinal in self._ordinals(seat.group)),
        }
        if self.fake_driver is not None:
            envs["KYB_FAKE_GPU"] = envs["NVIDIA_VISIBLE_DEVICES"]
            envs["KYB_FAKE_DRIVER"] = str(self.fake_driver)
        return Answer(envs, ((folder, folder),), self._devices(seat.group))

    def _exposed(self, group: Group) -> list[Gpu]:
        """GPUs whose device nodes the container has, in the order in which CUDA counts them there."""
        exposed = self.gpus if group.profile.expose_devices == "node" else group.gpus
        return sorted(exposed, key=lambda gpu: gpu.pci_bus_id.lower())

    def _ordinals(self, group: Group) -> list[int]:
        """The group's GPUs as the container counts them: host indices would be wrong inside it."""
        own = {gpu.uuid for gpu in group.gpus}
        return [ordinal for ordinal, gpu in enumerate(self._exposed(group)) if gpu.uuid in own]

    def _devices(self, group: Group) -> tuple[str, ...]:
        if self.fake_driver is not None:
            return ()
        nodes = [f"/dev/nvidia{gpu.minor}" for gpu in self._exposed(group)]
        return tuple(path for path in (*nodes, *CONTROL_DEVICES) if path in self.present)


def device_paths(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Every device node that an answer may name; the caller looks which exist."""
    return (*(f"/dev/nvidia{gpu.minor}" for gpu in gpus), *CONTROL_DEVICES)


@dataclass
class Probation:
    """Which of the node's GPUs count as faulty, from one reading of the machine after another."""

    expected: frozenset[str]
    faulty: frozenset[str] = frozenset()
    _seen: dict[str, int] = field(default_factory=dict)

    def read(self, uuids: Iterable[str]) -> bool:
        """Take a reading; returns whether the faulty ones changed."""
        there = set(uuids)
        self._seen = {uuid: self._seen.get(uuid, RECOVERY_READS) + 1 if uuid in there else 0 for uuid in self.expected}
        before = self.faulty
        self.faulty = frozenset(
            uuid for uuid in self.expected if self._seen[uuid] < (RECOVERY_READS if uuid in before else 1)
        )
        return self.faulty != before


def _numa_nodes(group: Group) -> tuple[int, ...]:
    return tuple(sorted({gpu.numa_node for gpu in group.gpus if gpu.numa_node is not None}))
