"""A pod that owns a seat, as the node's kubelet and the pod list tell it together. Pure."""

from dataclasses import dataclass, field

from kybernate.annotations import SeatAnnotations, parse
from kybernate.topology import Group, mig_refusal


@dataclass(frozen=True, slots=True)
class SeatPod:
    """One container that kubelet gave a seat to."""

    seat: str
    resource: str
    namespace: str
    name: str
    uid: str
    container: str
    container_id: str | None = None
    """``containerd://…`` or ``process://<pid>``; None before the first start."""
    running: bool = False
    restarts: int = 0
    exit_code: int | None = None
    """Of the last run, when it is not running."""
    ip: str | None = None
    deleting: bool = False
    """Its deletion was asked for (or it has already ended for good)."""
    annotations: dict[str, str] = field(default_factory=dict, hash=False)
    resources: tuple[str, ...] = ()
    """Resources of all seats of this container; more than one cannot work."""
    notes: SeatAnnotations = field(init=False, compare=False)
    """``annotations``, parsed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "notes", parse(self.annotations))

    @property
    def pod(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def model(self) -> str:
        """The model it serves; without an annotation, the pod's name."""
        return self.notes.model or self.name

    @property
    def endpoint(self) -> str | None:
        """Where its engine answers, once it has an address."""
        if self.ip is None:
            return None
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.notes.port}"

    @property
    def backend(self) -> str:
        """How it wants to be parked."""
        return self.notes.backend

    @property
    def tier(self) -> str:
        """Its service tier."""
        return self.notes.tier

    @property
    def pin(self) -> bool:
        """Whether its owner wants it always active."""
        return self.notes.pin

    @property
    def vram_bytes(self) -> int:
        """Declared footprint over all its GPUs; 0 when nothing (or nothing readable) is declared."""
        return self.notes.vram_bytes or 0


def refusal(pod: SeatPod, group: Group) -> str:
    """Why this container can never start on this group, and what to do; empty when it can."""
    if len(pod.resources) > 1:
        return (
            f"container {pod.container} of pod {pod.pod} asks for {' and '.join(pod.resources)}: a container runs on "
            f"one group of GPUs; keep one of them in resources.limits and make the pod anew"
        )
    return mig_refusal(group, pod.backend) or ""


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

    def group_on(self, node: str) -> str:
        """The group it means on this node; empty when it names another node."""
        where, slash, group = self.prefers.partition("/")
        if not slash:
            return where
        return group if where == node else ""


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns the seats of a node, as of one look."""

    pods: tuple[SeatPod, ...] = ()
    listed: frozenset[str] = frozenset()
    """UIDs of all pods that the pod list shows and that are not over. Kubelet forgets devices for a moment when it
    restarts; a pod that is still listed has not lost its seat."""
    pending: tuple[PendingPod, ...] = ()
    """Pods that have no seat yet and name a group."""
    unproven: frozenset[str] = frozenset()
    """Seats whose owner comes from a copy of the pods that may lie behind: no evidence of whose start call waits."""
