"""Which pod fits onto the node: the scheduler's arithmetic. Pure."""

from collections.abc import Iterable, Mapping

from kybernate.dev.fakes.kubelet.manifest import PodSpec


def lacking(spec: PodSpec, bound: Iterable[PodSpec], allocatable: Mapping[str, int]) -> str:
    """The first resource of which too little is left, in the scheduler's words; empty when the pod fits."""
    used: dict[str, int] = {}
    for other in bound:
        for resource, count in wanted(other).items():
            used[resource] = used.get(resource, 0) + count
    for resource, count in wanted(spec).items():
        if allocatable.get(resource, 0) - used.get(resource, 0) < count:
            return f"0/1 nodes are available: 1 Insufficient {resource}."
    return ""


def wanted(spec: PodSpec) -> dict[str, int]:
    """What the scheduler counts: the sum over app containers and sidecars, or the largest init container."""
    total: dict[str, int] = {}
    for container in spec.containers:
        if not container.init or container.sidecar:
            for resource, count in container.limits.items():
                total[resource] = total.get(resource, 0) + count
    for container in spec.containers:
        if container.init and not container.sidecar:
            for resource, count in container.limits.items():
                total[resource] = max(total.get(resource, 0), count)
    return total
