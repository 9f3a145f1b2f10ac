"""GPU UUIDs as the driver's structs want them. Pure."""

from collections.abc import Mapping

_PREFIX = "GPU-"
_BYTES = 16


def uuid_bytes(uuid: str) -> bytes:
    """``GPU-01234567-89ab-…`` → 16 bytes. Raises ValueError, also for MIG instances, which cannot be checkpointed."""
    try:
        raw = bytes.fromhex(uuid.removeprefix(_PREFIX).replace("-", ""))
    except ValueError:
        raw = b""
    if len(raw) != _BYTES or not uuid.startswith(_PREFIX):
        raise ValueError(f"{uuid!r} is not the UUID of a whole GPU; it has the form GPU- and 32 hexadecimal digits")
    return raw


def gpu_pairs(moves: Mapping[str, str]) -> list[tuple[bytes, bytes]] | None:
    """Old → new UUID as pairs; None where nothing moves, since drivers are best asked without a map then.

    Raises ValueError unless it is a permutation: a partial map is refused by drivers (research/checkpoint.md, H14).
    """
    if sorted(moves) != sorted(moves.values()):
        raise ValueError("a GPU map must name every GPU once as old and once as new")
    pairs = [(uuid_bytes(old), uuid_bytes(new)) for old, new in moves.items()]
    return None if all(old == new for old, new in pairs) else pairs
