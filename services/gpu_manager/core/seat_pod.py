"""Pods that own seats, and the groups that such seats need although the configuration no longer has them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kybernate.annotations import AnnotationProblem, SeatAnnotations, parse
from kybernate.node.known_gpus import KnownGpus
from kybernate.topology import AllocatedSeat, Group, group_key, size_of, with_orphaned_seats
from services.gpu_manager.ledger import Ledger

Reserved = Mapping[str, tuple[str, ...]]
"""By claim (``model/NAME``, ``tier/NAME``, ``pin``): the namespaces that alone may have it."""
ORPHANED = "kyb.ai/kept"
"""The resource of an owned seat when no profile of its size is left; only for people."""


@dataclass(frozen=True, slots=True)
class SeatPod:
    """One container that kubelet gave a seat to."""

    seat: str
    namespace: str
    name: str
    uid: str
    container: str
    container_id: str | None = None
    """``containerd://…`` or ``process://<pid>``; None before the first start."""
    running: bool = False
    restarts: int = 0
    ended: str = ""
    """How its last run ended, when it is not running."""
    code: int | None = None
    """Its exit code."""
    line: str = ""
    """The last line of its log, without secrets."""
    waits: str = ""
    """Why kubelet does not make it, without secrets; the start gate and the back-off are none."""
    exited: float | None = None
    """When that run ended, unix seconds, as the runtime of this node has it: whole seconds, cut off."""
    ip: str | None = None
    probe_seconds: float = 0.0
    """For how long its container's startupProbe waits until kubelet ends it; 0: it has none."""
    deleting: bool = False
    """It is being deleted, or has ended for good."""
    annotations: dict[str, str] = field(default_factory=dict, hash=False)
    replaced: tuple[AnnotationProblem, ...] = ()
    """Annotations of the pod that cannot be used, in whose place ``annotations`` has what its container implies."""
    resources: tuple[str, ...] = ()
    """Resources of all seats of this container; more than one cannot work."""
    restarts_inside: bool = False
    """kyb-run starts its engine, and starts it again on whatever group it gets."""
    notes: SeatAnnotations = field(init=False, compare=False)
    """``annotations``, parsed; all problems."""

    pod: str = field(init=False, compare=False)
    """``namespace/name``."""
    model: str = field(init=False, compare=False)
    """The model it serves; without an annotation, the pod's name."""
    endpoint: str | None = field(init=False, compare=False)
    """Where its engine answers, once it has an address."""
    engine_key: str = field(init=False, compare=False)
    """The file of the key that its engine requires, ``namespace.name``: a pod gets no other namespace's key. Empty: it
    names none."""
    vram_bytes: int = field(init=False, compare=False)
    """Declared footprint over all its GPUs; 0 when nothing (or nothing readable) is declared."""

    def __post_init__(self) -> None:
        notes = parse(self.annotations)
        host = f"[{self.ip}]" if self.ip and ":" in self.ip else self.ip
        found = {
            "notes": replace(notes, problems=self.replaced + notes.problems),
            "pod": f"{self.namespace}/{self.name}",
            "model": notes.model or self.name,
            "endpoint": None if host is None else f"http://{host}:{notes.port}",
            "engine_key": f"{self.namespace}.{notes.engine_key}" if notes.engine_key else "",
            "vram_bytes": notes.vram_bytes or 0,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


def not_its_own(pod: SeatPod, reserved: Reserved) -> str:
    """Why this pod may not have the model's name, tier or pin that it claims, and what to do; empty: it may."""
    claims = [f"model/{pod.model}", f"tier/{pod.notes.tier}", *(["pin"] if pod.notes.pin else ())]
    for claim in claims:
        if pod.namespace not in (owners := reserved.get(claim, (pod.namespace,))):
            return (
                f"pod {pod.pod} claims {claim}, which is reserved for namespace {' and '.join(owners) or 'none'}: "
                f"change the pod, or reserved: in the node's configuration"
            )
    return ""


@dataclass(frozen=True, slots=True)
class PendingPod:
    """A pod without a seat that names the group it would like (annotation ``kyb.ai/prefer-group``)."""

    uid: str
    pod: str
    """``namespace/name``."""
    prefers: str
    """``group``, or ``node/group``."""
    resources: tuple[str, ...] = ()
    """What its containers ask for."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Which pods own the seats of a node, as of one read of the pods; a message to the board."""

    pods: tuple[SeatPod, ...] = ()
    listed: frozenset[str] = frozenset()
    """UIDs of all pods that the pod list shows and that are not over. Kubelet forgets devices for a moment when it
    restarts; a pod that is still listed has not lost its seat."""
    pending: tuple[PendingPod, ...] = ()
    """Pods that have no seat yet and name a group."""
    unproven: frozenset[str] = frozenset()
    """Seats whose owner comes from a copy of the pods that may lie behind: no evidence of whose start call waits."""


def with_owned(groups: tuple[Group, ...], ledger: Ledger, known: KnownGpus) -> tuple[Group, ...]:
    """The configured groups, and those of the owned seats that are in none of them.

    The plugin goes on offering such seats (``kybernate.topology.orphaned_seats``), so the manager goes on managing
    them. Its ledger has every owned seat with its GPUs.
    """
    resources = {seat: group.profile.resource for group in groups for seat in group.seat_ids}
    by_size = {len(group.gpus): group.profile.resource for group in groups}
    allocated = [
        AllocatedSeat(one.seat, resources.get(one.seat) or by_size.get(size_of(one.seat), ORPHANED), one.gpus)
        for one in ledger.seats
    ]
    kept, _ = with_orphaned_seats(groups, allocated, known.all)
    return (*kept, *_shelters(kept, ledger, known))


def _shelters(groups: tuple[Group, ...], ledger: Ledger, known: KnownGpus) -> tuple[Group, ...]:
    """For each seat that has moved to GPUs which are no group any more: these GPUs, as a group without own seats.

    The memory that it holds there counts against the groups that share these GPUs. Once it is parked, it returns to its
    own group as soon as that has a slot.
    """
    gpus = {gpu.uuid: gpu for gpu in known.all}
    homes = {seat: group for group in groups for seat in group.seat_ids}
    there = {frozenset(group.uuids) for group in groups}
    found: dict[frozenset[str], Group] = {}
    for one in ledger.seats:
        on, home = frozenset(one.on), homes.get(one.seat)
        if home is None or not on or on in there or on in found or not on <= gpus.keys():
            continue
        key = group_key(one.on)
        found[on] = replace(
            home,
            name=f"{len(on)}x-{key}",
            key=key,
            gpus=tuple(gpus[uuid] for uuid in one.on),
            seat_ids=(),
            why=f"the seat of pod {one.pod} moved there before the configuration changed",
            overlaps=(),
        )
    return tuple(found.values())
