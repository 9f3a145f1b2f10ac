"""Sizes as people and Kubernetes write them (``40GiB``, ``40Gi``, ``512M``, ``1000``), durations (``20s``)."""

import re

_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    prefix + suffix: 2**power
    for prefix, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40))
    for suffix in ("", "B")
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of ``text``. Raises ValueError naming the text and the accepted forms."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes with an optional unit, e.g. 40GiB, 40Gi, 512M")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_seconds(text: str) -> float:
    """Seconds of ``text``. Raises ValueError naming the text and the accepted forms."""
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration; write seconds with an optional unit, e.g. 20s, 500ms, 2m")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(count: float) -> str:
    """A size for people: ``37.3 GiB``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count:.0f} B"
