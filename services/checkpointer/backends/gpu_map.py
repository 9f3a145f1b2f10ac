"""Restoring to other GPUs than those a seat was parked on. Pure.

The driver wants a map that names every GPU of the machine once on each side, by UUID, whatever the container sees; a
map that moves nothing is left out. Moving is for seats of one process on one GPU: after a move NCCL looks up the old
PCI address (H12), and a partly moved seat could not be parked again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

NEEDS_DRIVER = "restoring to another GPU needs driver 580 or newer"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a seat cannot move, and for whom else that holds."""

    reason: str
    whose: Literal["seat", "node"] = "seat"


def moves(parked_on: Sequence[str], target: Sequence[str]) -> dict[str, str]:
    """Old → new GPU, in the groups' order; empty where the seat stays on its GPUs."""
    if set(parked_on) == set(target):
        return {}
    return {old: new for old, new in zip(parked_on, target, strict=False) if old != new}


def permutation(everyone: Iterable[str], wanted: Mapping[str, str]) -> dict[str, str] | None:
    """The driver's map over all GPUs: the old and the new one change places. None when nothing moves.

    Raises ValueError naming a GPU that is not among them.
    """
    if not wanted:
        return None
    found = sorted(gpu for gpu in everyone if not gpu.startswith("MIG-"))
    if missing := sorted({*wanted, *wanted.values()} - set(found)):
        raise ValueError(f"{', '.join(missing)} does not answer; those that do are {', '.join(found) or 'none'}")
    back = {new: old for old, new in wanted.items()}
    return {gpu: wanted.get(gpu, back.get(gpu, gpu)) for gpu in found}


def why_not(
    parked_on: Sequence[str], target: Sequence[str], processes: int, *, driver_can: bool, driver: str
) -> Refusal | None:
    """Why a seat cannot move from these GPUs to those; None when it can as far as this tells."""
    if not driver_can:
        return Refusal(f"{NEEDS_DRIVER}, this is {driver or 'older'}", "node")
    if len(parked_on) != 1 or len(target) != 1:
        text = f"it was parked on {len(parked_on)} GPUs; only seats of one GPU can move, activate it on its own group"
        return Refusal(text)
    if processes != 1:
        text = f"it has {processes} GPU processes; only seats of one process can move, activate it on its own group"
        return Refusal(text)
    return None
