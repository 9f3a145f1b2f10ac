"""What kubelet is told: which seats exist, which are healthy, which one to take, and what a container gets with it.

Pure: everything comes from the groups that were built before, so that an answer never waits for anything.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.machine import Gpu, Link
from kybernate.topology import Group, peers
from services.plugin.cdi import GroupDevice
from services.plugin.placement import Place, Strategy, best
from services.plugin.surroundings import Surroundings

CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class RefusedError(Exception):
    """A request that must not be granted; users read this text in ``kubectl describe pod``."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A device, as kubelet calls it."""

    id: str
    resource: str
    group: Group
    order: int
    """Place among all seats: groups in the order of the configuration, then by number. Ties go by it."""
    group_name: str


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
    """Device nodes, the same path on both sides; none when ``cdi`` names them."""
    cdi: tuple[str, ...] = ()
    """Qualified CDI names, ``vendor/class=name``."""


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
    """Set with the fakes: no device nodes, but the socket of the fake driver, whose folder containers get."""
    links: tuple[Link, ...] = ()
    """How near the GPUs are to each other, for topology-aware placement."""
    mig_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID of a MIG instance: the device nodes that give access to it, beside its GPU's."""
    cdi: Mapping[str, tuple[str, ...]] | None = None
    """By group name: the CDI names of its devices. None: device nodes and environment instead."""
    kept: frozenset[str] = frozenset()
    """Seats that the configuration no longer has; listed as long as somebody has them."""
    seats: Mapping[str, Seat] = field(init=False)
    _ordered: tuple[Seat, ...] = field(init=False)
    _around: Surroundings = field(init=False)
    _peers: Mapping[str, tuple[Group, ...]] = field(init=False)
    """By group: others to which its seats may be moved."""

    def __post_init__(self) -> None:
        pairs = [(seat_id, group) for group in self.groups for seat_id in group.seat_ids]
        seats = {
            seat_id: Seat(seat_id, group.profile.resource, group, order, group.name)
            for order, (seat_id, group) in enumerate(pairs)
        }
        object.__setattr__(self, "seats", seats)
        object.__setattr__(self, "_ordered", tuple(seats.values()))
        object.__setattr__(self, "_around", Surroundings.of(self.groups, self.links))
        object.__setattr__(self, "_peers", peers(self.groups))

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources that have seats here, in the order of the configuration."""
        return tuple(dict.fromkeys(seat.resource for seat in self.seats.values()))

    def listed(self, resource: str, faulty: frozenset[str]) -> tuple[OfferedSeat, ...]:
        """The complete list. A faulty GPU (UUID) makes every seat of every group that contains it unhealthy."""
        sick = self.touched(faulty)
        return tuple(
            OfferedSeat(seat.id, seat.group.name not in sick, self._around.numa_nodes[seat.group.name])
            for seat in self.seats.values()
            if seat.resource == resource
        )

    def is_kept(self, group: Group) -> bool:
        """Whether it is here only for seats that somebody has."""
        return all(seat in self.kept for seat in group.seat_ids)

    def touched(self, gpus: Collection[str]) -> frozenset[str]:
        """Names of the groups that contain one of these GPUs (UUIDs), or a MIG instance of one."""
        return frozenset(name for name, own in self._around.physical.items() if not own.isdisjoint(gpus))

    def preferred(
        self,
        available: Iterable[str],
        must_include: Sequence[str],
        size: int,
        faulty: frozenset[str],
        *,
        in_use: Collection[str] = (),
        wish: str = "",
    ) -> tuple[str, ...]:
        """The seats to take, by the profile's strategy. An empty list where there is no good answer.

        ``available`` tells which seats of this resource are free; ``in_use`` which seats of the others are not.
        ``wish`` names a group that goes first.
        """
        must = [seat_id for seat_id in must_include if seat_id in self.seats]
        free = self._free({*available}.difference(must), faulty)
        if len(must) >= size or not free:
            return tuple(must[: max(size, 0)]) if len(must) >= size else ()
        some = self._ordered[next(iter(free.values()))[0]]
        places = self._places(some.resource, free, in_use)
        strategy = Strategy(some.group.profile.placement)
        chosen = list(must)
        while len(chosen) < size:
            place = best(strategy, places.values(), wish)
            if place is None:
                return ()
            seats = free[place.name]
            first = min(seats)
            seats.remove(first)
            chosen.append(self._ordered[first].id)
            places[place.name] = place.with_one_less()
        return tuple(chosen)

    def _free(self, available: set[str], faulty: frozenset[str]) -> dict[str, list[int]]:
        """By group: the orders of its seats that may be given. Seats that are going are not."""
        sick = self.touched(faulty) if faulty else frozenset()
        free: dict[str, list[int]] = {}
        for seat_id in available.difference(self.kept) if self.kept else available:
            seat = self.seats.get(seat_id)
            if seat is not None and seat.group_name not in sick:
                free.setdefault(seat.group_name, []).append(seat.order)
        return free

    def _places(self, resource: str, free: Mapping[str, list[int]], in_use: Collection[str]) -> dict[str, Place]:
        """The groups of a resource as they are now."""
        used = dict.fromkeys((group.name for group in self.groups), 0)
        for seat_id in in_use:
            seat = self.seats.get(seat_id)
            if seat is not None and seat.resource != resource:
                used[seat.group_name] += 1
        own = [group for group in self.groups if group.profile.resource == resource]
        for group in own:
            used[group.name] = len(group.seat_ids) - len(free.get(group.name, ()))
        around = self._around
        return {
            group.name: Place(
                name=group.name,
                order=around.order[group.name],
                seats=len(group.seat_ids),
                free=len(free[group.name]),
                slots=group.slots,
                overlapping_in_use=sum(used[name] for name in around.overlapping[group.name]),
                nearby_in_use=sum(used[name] for name in around.nearby[group.name]),
                distance=around.distance[group.name],
                numa_nodes=len(around.numa_nodes[group.name]),
            )
            for group in own
            if group.name in free
        }

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
        group = seat.group
        folder = str(self.seats_dir / seat.id)
        uuids = ",".join(gpu.uuid for gpu in group.gpus)
        reachable = ",".join(gpu.uuid for gpu in (*group.gpus, *self._further(group)))
        names = self.cdi.get(group.name, ()) if self.cdi is not None and self.fake_driver is None else ()
        envs = {
            "KYB_GPU_INDICES": ",".join(str(gpu.index) for gpu in group.gpus),
            "KYB_GPU_GROUP": group.name,
            "KYB_GPU_SEAT": seat.id,
            "KYB_SEAT_DIR": folder,
            # Images carry "all". Where NVIDIA's CDI devices are named, its runtime must not inject a second time.
            "NVIDIA_VISIBLE_DEVICES": "void" if len(names) > 1 else reachable,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(str(ordinal) for ordinal in self._ordinals(group)),
        }
        mounts = [(folder, folder)]
        if self.fake_driver is not None:
            envs["KYB_FAKE_GPU"] = uuids
            envs["KYB_FAKE_DRIVER"] = str(self.fake_driver)
            # The folder, not the socket: a fake driver that starts again makes a new one.
            mounts.append((str(self.fake_driver.parent), str(self.fake_driver.parent)))
        return Answer(envs, tuple(mounts), () if names else self.devices(group), names)

    def cdi_devices(self) -> tuple[GroupDevice, ...]:
        """The groups as CDI devices, for the spec file. A group without any device node has none."""
        nodes = {cdi_name(group): self.devices(group) for group in self.groups}
        return tuple(GroupDevice(name, paths) for name, paths in nodes.items() if paths)

    def devices(self, group: Group) -> tuple[str, ...]:
        """Device nodes of a container on this group, by minor number; none with the fakes."""
        if self.fake_driver is not None:
            return ()
        exposed = self._exposed(group)
        nodes = [f"/dev/nvidia{gpu.minor}" for gpu in exposed]
        nodes += [path for gpu in exposed for path in self.mig_nodes.get(gpu.uuid, ())]
        return tuple(path for path in dict.fromkeys((*nodes, *CONTROL_DEVICES)) if path in self.present)

    def _further(self, group: Group) -> tuple[Gpu, ...]:
        """GPUs to which a container of this group may be moved: it is given access to them, and does not see them.

        Those that do not answer are left out, since CUDA does not count them in the container.
        """
        there = {gpu.uuid for gpu in self.gpus}
        return tuple(gpu for peer in self._peers[group.name] for gpu in peer.gpus if gpu.uuid in there)

    def _exposed(self, group: Group) -> list[Gpu]:
        """GPUs whose device nodes the container has, in the order in which CUDA counts them there."""
        whole = group.profile.expose_devices == "node" and all(gpu.mig is None for gpu in group.gpus)
        exposed = self.gpus if whole else (*group.gpus, *self._further(group))
        return sorted(exposed, key=lambda gpu: gpu.pci_bus_id.lower())

    def _ordinals(self, group: Group) -> list[int]:
        """The group's GPUs as the container counts them: host indices would be wrong inside it."""
        own = {gpu.uuid for gpu in group.gpus}
        return [ordinal for ordinal, gpu in enumerate(self._exposed(group)) if gpu.uuid in own]


def cdi_name(group: Group) -> str:
    """By its GPUs: containers name it for as long as they live, and a group's own name may come to mean other GPUs."""
    return f"{len(group.gpus)}x-{group.key}"


def device_paths(gpus: Iterable[Gpu], mig_nodes: Mapping[str, tuple[str, ...]] | None = None) -> tuple[str, ...]:
    """Every device node that an answer may name; the caller looks which exist."""
    parts = [path for paths in (mig_nodes or {}).values() for path in paths]
    return (*dict.fromkeys(f"/dev/nvidia{gpu.minor}" for gpu in gpus), *parts, *CONTROL_DEVICES)
