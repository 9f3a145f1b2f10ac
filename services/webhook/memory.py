"""Memory of a container whose VRAM is parked in it: the copy counts as the container's own. Pure."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from kybernate.annotations import VRAM, SeatAnnotations
from kybernate.sizes import format_bytes

_SUFFIXES = {"m": Decimal("0.001"), "": Decimal(1)}
_SUFFIXES |= {letter: Decimal(10) ** (3 * power) for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{letter}i": Decimal(2) ** (10 * power) for power, letter in enumerate("KMGTPE", 1)}
Json = dict[str, Any]


def memory(path: str, container: Mapping[str, Any], notes: SeatAnnotations) -> tuple[list[Json], list[str]]:
    """Patch and warnings for the container at this JSON pointer.

    Request = limit: a node that has promised less than the copies take would kill engines when they are parked.
    """
    resources = container.get("resources") or {}
    limit = (resources.get("limits") or {}).get("memory")
    requests = resources.get("requests")
    who, declared, warnings = f"container {container.get('name')}", notes.vram_bytes, list[str]()
    restarts = notes.backend == "restart"  # nothing is kept then
    if limit is None:
        if not restarts:
            warnings.append(
                f"{who} has no memory limit: a parked copy of its VRAM counts on the node unannounced; set one"
            )
        return [], warnings
    held = quantity(limit)
    if declared and held is not None and held < declared and not restarts:
        warnings.append(
            f"{who}: its memory limit of {limit} cannot hold the {format_bytes(declared)} of VRAM that parking copies "
            f"into it ({VRAM}); raise limits.memory above {format_bytes(declared)} plus what the engine needs itself"
        )
    present = (requests or {}).get("memory")
    if present is not None and quantity(present) == held:
        return [], warnings
    if requests is None:
        return [{"op": "add", "path": f"{path}/resources/requests", "value": {"memory": limit}}], warnings
    return [{"op": "add", "path": f"{path}/resources/requests/memory", "value": limit}], warnings


def quantity(text: object) -> Decimal | None:
    """A quantity of Kubernetes, e.g. 64Gi, 129e6, 128974848000m; None: it is none."""
    said = str(text).strip()
    number = said.rstrip("kKMGTPEim")
    suffix = said[len(number) :]
    try:
        return Decimal(number) * _SUFFIXES[suffix]
    except (InvalidOperation, KeyError):
        return None
