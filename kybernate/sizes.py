"""Sizes as people and Kubernetes write them (``40GiB``, ``40Gi``, ``512M``, ``1000``), durations (``20s``), counts."""

import math
import re
from collections.abc import Mapping

_BYTES = (
    {"": 1}
    | {
        prefix + suffix: 10**power
        for prefix, power in (("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12))
        for suffix in ("", "B")
    }
    | {
        prefix + suffix: 2**power
        for prefix, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40))
        for suffix in ("", "B")
    }
)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
MOST_SECONDS = 86_400.0
"""Of a duration that a person wrote: a longer one has the wrong unit."""
MOST_BYTES = 2**50
"""Of what a person wrote: no machine has more memory."""
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of ``text``. Raises ValueError naming the text and the accepted forms."""
    return int(_parse(text, _BYTES, "a size; write bytes with an optional unit, e.g. 40GiB, 40Gi, 512M"))


def parse_size(text: str) -> int:
    """Bytes of what a person wrote: with a unit, for 512 is meant as GiB. Raises ValueError as ``parse_bytes``."""
    match = _QUANTITY.fullmatch(text)
    if match is not None and not match[2] and float(match[1]):
        raise ValueError(f"{text!r} is a size without a unit; write {text.strip()}GiB if that is meant")
    if (size := parse_bytes(text)) > MOST_BYTES:
        raise ValueError(f"{text!r} is more than {format_bytes(MOST_BYTES)}; check its unit")
    return size


def parse_seconds(text: str) -> float:
    """Seconds of ``text``. Raises ValueError naming the text and the accepted forms."""
    return _parse(text, _SECONDS, "a duration; write seconds with an optional unit, e.g. 20s, 500ms, 2m")


def _parse(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    value = float(match[1]) * units[match[2]] if match is not None and match[2] in units else math.inf
    if not math.isfinite(value):  # hundreds of digits are infinity, too
        raise ValueError(f"{text!r} is not {expected}")
    return value


def format_bytes(count: float) -> str:
    """A size for people: ``37.3 GiB``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count:.0f} B"


def count(number: int, noun: str) -> str:
    """``1 day``, ``2 days``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
