"""What a parked engine may keep on a GPU. Pure."""

RESIDUE_SHARE, RESIDUE_BYTES, RESIDUE_MOST = 0.1, 4 * 2**30, 0.5
"""What a parked engine may keep on a GPU: a share of its footprint there or these bytes, whichever is more, and never
more than the last share. Published: 1.2 to 4 GiB per GPU."""


def most_residue(size: int) -> int:
    """Bytes that a parked engine may keep on a GPU where it took ``size``."""
    return round(min(max(RESIDUE_SHARE * size, RESIDUE_BYTES), RESIDUE_MOST * size))
