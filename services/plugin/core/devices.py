"""The answers to kubelet: which seats exist, which are healthy, which to take, and what a container gets with a seat.

Pure: every answer is computed from groups that were built before, so that none waits for I/O.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kybernate import run
from kybernate.machine import Gpu, Link
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.topology import Group, peers
from services.plugin.core.placement import GroupLoad, GroupRelations, best

CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class NotGrantedError(Exception):
    """A seat that must not be allocated, or a start that must not happen now; ``kubectl describe pod`` shows this
    text."""


@dataclass(frozen=True)
class Offer:
    """All seats of this node, and the answers for them."""

    groups: tuple[Group, ...]
    gpus: tuple[Gpu, ...]
    """Those that answer, and the MIG instances on them."""
    seats_dir: Path
    """Host folder of the seat folders; containers see theirs at the same path."""
    run_dir: Path | None = None
    """Host folder with ``kyb-run``, which each container gets; None: this node has none."""
    present: frozenset[str] = frozenset()
    """Device nodes that exist on this host; others are left out of answers, since creating the container would fail."""
    fake_driver: Path | None = None
    """Set with the fakes: socket of the fake driver; containers get its folder instead of device nodes."""
    links: tuple[Link, ...] = ()
    """Links between the GPUs, for topology-aware placement."""
    mig_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID of a MIG instance: the device nodes that give access to it, beside its GPU's."""
    cdi: Mapping[str, tuple[str, ...]] | None = None
    """By group name: the CDI names of its devices. None: device nodes and environment instead."""
    orphaned: frozenset[str] = frozenset()
    """Seats that the configuration no longer has; listed while they are allocated."""
    seats: Mapping[str, Group] = field(init=False)
    """The group of each seat: groups in the order of the configuration, then by number."""
    _relations: GroupRelations = field(init=False)
    _peers: Mapping[str, tuple[Group, ...]] = field(init=False)
    """By group: the groups to which its seats may be moved."""

    def __post_init__(self) -> None:
        seats = {seat_id: group for group in self.groups for seat_id in group.seat_ids}
        object.__setattr__(self, "seats", seats)
        object.__setattr__(self, "_relations", GroupRelations.of(self.groups, self.links))
        object.__setattr__(self, "_peers", peers(self.groups))

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources that have seats here, in the order of the configuration."""
        return tuple(dict.fromkeys(group.profile.resource for group in self.seats.values()))

    def listed(self, resource: str, faulty: frozenset[str]) -> pb.ListAndWatchResponse:
        """Return all seats of a resource. Seats of groups that contain a faulty GPU (UUID) are unhealthy."""
        sick, answer = self.groups_with(faulty), pb.ListAndWatchResponse()
        for seat_id, group in self.seats.items():
            if group.profile.resource == resource:
                device = answer.devices.add(ID=seat_id, health="Unhealthy" if group.name in sick else "Healthy")
                for numa_node in self._relations.numa_nodes[group.name]:
                    device.topology.nodes.add(ID=numa_node)
        return answer

    def groups_with(self, gpus: Collection[str]) -> frozenset[str]:
        """Return the names of the groups that contain one of these GPUs (UUIDs), or a MIG instance of one."""
        return frozenset(group.name for group in self.groups if not group.physical.isdisjoint(gpus))

    def preferred(
        self,
        available: Iterable[str],
        must_include: Sequence[str],
        size: int,
        faulty: frozenset[str],
        *,
        allocated: Collection[str] = (),
        wish: str = "",
    ) -> tuple[str, ...]:
        """Return the seats to take, by the profile's strategy; none where there is no good answer.

        ``available``: the free seats of this resource; ``allocated``: allocated seats, used for the other resources.
        ``wish`` names a group that comes first.
        """
        must = [seat_id for seat_id in must_include if seat_id in self.seats]
        free = self._free({*available}.difference(must), faulty)
        if len(must) >= size or not free:
            return tuple(must[: max(size, 0)]) if len(must) >= size else ()
        profile = self.seats[next(iter(free.values()))[0]].profile
        loads = self._loads(profile.resource, free, allocated)
        chosen = list(must)
        while len(chosen) < size:
            load = best(profile.placement, loads.values(), wish)
            if load is None:
                return ()
            first = min(free[load.name])  # by number, which has two digits
            free[load.name].remove(first)
            chosen.append(first)
            loads[load.name] = replace(load, free=load.free - 1, nearby_allocated=load.nearby_allocated + 1)
        return tuple(chosen)

    def _free(self, available: set[str], faulty: frozenset[str]) -> dict[str, list[str]]:
        """Return by group its seats that can be allocated. Orphaned seats cannot."""
        sick = self.groups_with(faulty) if faulty else frozenset()
        free: dict[str, list[str]] = {}
        for seat_id in available.difference(self.orphaned):
            group = self.seats.get(seat_id)
            if group is not None and group.name not in sick:
                free.setdefault(group.name, []).append(seat_id)
        return free

    def _loads(self, resource: str, free: Mapping[str, list[str]], allocated: Collection[str]) -> dict[str, GroupLoad]:
        """Return the present load of the groups of a resource."""
        used = dict.fromkeys((group.name for group in self.groups), 0)
        for seat_id in allocated:
            holder = self.seats.get(seat_id)
            if holder is not None and holder.profile.resource != resource:
                used[holder.name] += 1
        own = [group for group in self.groups if group.profile.resource == resource]
        for group in own:
            used[group.name] = len(group.seat_ids) - len(free.get(group.name, ()))
        relations = self._relations
        return {
            group.name: GroupLoad(
                name=group.name,
                order=order,
                seats=len(group.seat_ids),
                free=len(free[group.name]),
                slots=group.slots,
                overlapping_allocated=sum(used[name] for name in relations.overlapping[group.name]),
                nearby_allocated=sum(used[name] for name in relations.nearby[group.name]),
                distance=relations.distance[group.name],
                numa_nodes=len(relations.numa_nodes[group.name]),
            )
            for order, group in enumerate(own)
            if group.name in free
        }

    def answer(self, resource: str, seat_ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        """Return what the container gets; the same seats always give the same answer. Raises NotGrantedError."""
        if len(set(seat_ids)) != 1:
            raise NotGrantedError(
                f"a container can have one {resource}, not {len(set(seat_ids))}: a seat already is a whole group of "
                f"GPUs; set resources.limits to 1 and take a larger profile for more GPUs"
            )
        seat_id = seat_ids[0]
        group = self.seats.get(seat_id)
        if group is None or group.profile.resource != resource:
            raise NotGrantedError(
                f"this seat of {resource} does not exist on this node any more; "
                f"its configuration changed since the seat was offered; delete the pod so that it gets another one"
            )
        folder = str(self.seats_dir / seat_id)
        reachable = ",".join(gpu.uuid for gpu in (*group.gpus, *self._peer_gpus(group)))
        names = self.cdi.get(group.name, ()) if self.cdi is not None and self.fake_driver is None else ()
        envs = {
            "KYB_GPU_SEAT": seat_id,
            "KYB_SEAT_DIR": folder,
            # Images carry "all". Where NVIDIA's CDI devices are named, its runtime must not inject a second time.
            "NVIDIA_VISIBLE_DEVICES": "void" if len(names) > 1 else reachable,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            **self.group_envs(group, group),
        }
        mounts = {folder: folder}
        if self.run_dir is not None:
            mounts[run.FOLDER] = str(self.run_dir)
        if self.fake_driver is not None:
            envs["KYB_FAKE_DRIVER"] = str(self.fake_driver)
            # The folder, not the socket: a restarted fake driver creates a new socket.
            mounts[str(self.fake_driver.parent)] = str(self.fake_driver.parent)
        paths = () if names else self.devices(group)
        return pb.ContainerAllocateResponse(
            envs=envs,
            mounts=[pb.Mount(container_path=inside, host_path=host, read_only=True) for inside, host in mounts.items()],
            devices=[pb.DeviceSpec(container_path=path, host_path=path, permissions="rw") for path in paths],
            cdi_devices=[pb.CDIDevice(name=name) for name in names],
        )

    def reach(self, group: Group) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that a container with a seat of this group gets now."""
        return tuple(gpu.uuid for gpu in self._exposed(group))

    def group_envs(self, home: Group, group: Group, reach: Collection[str] = ()) -> dict[str, str]:
        """Return what names the GPUs of a start on ``group``, in a container that has the devices of ``home``;
        ``reach``: those GPUs, else the ones that it would get now."""
        own = {*group.uuids}
        counted = [gpu for gpu in self._exposed(home, reach) if gpu in self.gpus or gpu.uuid in own]
        # CUDA counts what the container has, but of several MIG instances the first alone.
        named = group.is_mig and self._peers[group.name]
        visible = [gpu.uuid if named else str(at) for at, gpu in enumerate(counted) if gpu.uuid in own]
        envs = {
            "KYB_GPU_INDICES": ",".join(str(gpu.index) for gpu in group.gpus),
            "KYB_GPU_GROUP": group.name,
            "CUDA_VISIBLE_DEVICES": ",".join(visible),
        }
        return envs if self.fake_driver is None else {**envs, "KYB_FAKE_GPU": ",".join(group.uuids)}

    def moved_envs(self, seat_id: str, group_name: str, reach: Collection[str] = ()) -> dict[str, str]:
        """Return what a start on this group of the seat's pool needs in another way than its container, which has the
        GPUs ``reach``, has it. Raises NotGrantedError: the group is not on this node any more.
        """
        home = self.seats[seat_id]
        if group_name in ("", home.name):
            return {}
        group = next((one for one in self.groups if one.name == group_name), None)
        if group is None:
            raise NotGrantedError(f"group {group_name} is not on this node any more; another one is looked for")
        return self.group_envs(home, group, reach)

    def cdi_devices(self) -> dict[str, tuple[str, ...]]:
        """Return the device nodes of each CDI device, for the spec file; a group without device nodes is left out."""
        nodes = {cdi_name(group): self.devices(group) for group in self.groups}
        return {name: paths for name, paths in nodes.items() if paths}

    def devices(self, group: Group) -> tuple[str, ...]:
        """Return the device nodes of a container on this group; none with the fakes."""
        if self.fake_driver is not None:
            return ()
        exposed = self._exposed(group)
        nodes = [f"/dev/nvidia{gpu.minor}" for gpu in exposed]
        nodes += [path for gpu in exposed for path in self.mig_nodes.get(gpu.uuid, ())]
        return tuple(path for path in dict.fromkeys((*nodes, *CONTROL_DEVICES)) if path in self.present)

    def _peer_gpus(self, group: Group) -> tuple[Gpu, ...]:
        """Return the GPUs to which a seat of this group may be moved: its container can access but does not use them.

        GPUs that do not answer are left out, since CUDA does not count them in the container.
        """
        there = {gpu.uuid for gpu in self.gpus}
        return tuple(gpu for peer in self._peers[group.name] for gpu in peer.gpus if gpu.uuid in there)

    def _exposed(self, group: Group, reach: Collection[str] = ()) -> list[Gpu]:
        """Return the GPUs whose device nodes a container gets, or has (``reach``), in the order in which CUDA counts
        them there."""
        exposed = (*group.gpus, *self._peer_gpus(group))
        if group.profile.expose_devices == "node" and not group.is_mig:
            exposed = tuple(gpu for gpu in self.gpus if not (gpu.mig or gpu.mig_enabled))
        if reach:
            exposed = tuple(gpu for gpu in dict.fromkeys((*exposed, *self.gpus)) if gpu.uuid in reach)
        return sorted(exposed, key=lambda gpu: gpu.pci_bus_id.lower())


def cdi_name(group: Group) -> str:
    """Return the name of a group's CDI device, made of its GPUs: a new configuration may reuse the group's name."""
    return f"{len(group.gpus)}x-{group.key}"


def device_paths(gpus: Iterable[Gpu], mig_nodes: Mapping[str, tuple[str, ...]] | None = None) -> tuple[str, ...]:
    """Return every device node that an answer may name; the caller checks which exist."""
    parts = [path for paths in (mig_nodes or {}).values() for path in paths]
    return (*dict.fromkeys(f"/dev/nvidia{gpu.minor}" for gpu in gpus), *parts, *CONTROL_DEVICES)
