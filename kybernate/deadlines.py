"""How long what may hang takes, and when it is given up: one rule for the manager, which shows it, the checkpointer,
which keeps it, and all that read an age. Pure. Wall seconds, where nothing else is written.
"""

import math

BASE_SECONDS = 30.0
"""Model: of a transfer; the fixed cost is up to 15 s per process."""
SECONDS_PER_GIB = 3.0
"""Model: of a transfer; the slowest published rate is about 1.1 GB/s."""
FLOOR_SECONDS = 2.0
"""Of each deadline, so that a busy machine does not look like a hang."""
VERIFY_SECONDS = 60.0
"""Model: in which an engine must be healthy and answer as before its first park."""
LEARNED_TIMES, LEARNED_FLOOR_SECONDS = 10.0, 20.0
"""What takes so many times what it usually takes hangs, after so long at the earliest."""
FIRST_START_SECONDS = 3600.0
"""Of a pod's first start, which may download its model, where the pod has no startupProbe. Nothing on the node tells a
slow download from a hang: by size, a slow line would end small models first."""
START_FLOOR_SECONDS = 900.0
"""Of later starts: a machine that has just started has read none of the weights."""
PROBE_MARGIN_SECONDS = 45.0
"""Kubelet ends what fails its startupProbe, with 30 s of grace; a manager waits for longer."""
LATE_SECONDS = 5.0
"""Beyond what is usual, and twice what is usual where that is more, a phase is late."""
UNKNOWN_LATE_SECONDS = 300.0
"""A phase with an end, of which nothing is known, is late: an engine that listens on another port, or downloads."""


def learned(longest: float, usual: float) -> float:
    """A deadline that nothing exceeds, made shorter by what is known. ``usual`` 0: nothing is known."""
    return min(longest, max(LEARNED_FLOOR_SECONDS, LEARNED_TIMES * usual)) if usual > 0 else longest


def transfer(vram_bytes: int, speed: float, base: float = BASE_SECONDS, per_gib: float = SECONDS_PER_GIB) -> float:
    """Of a checkpoint or restore of one process, where nothing is learned; without a floor."""
    return (base + per_gib * vram_bytes / 2**30) / speed


def half(vram_bytes: int, gpus: int, usual: float, speed: float) -> float:
    """Of all driver calls or calls of the engine by which a seat on so many GPUs is parked, or is activated."""
    return learned(max(FLOOR_SECONDS, transfer(vram_bytes, speed)) + gpus * BASE_SECONDS / speed, usual)


def verify(usual: float, speed: float) -> float:
    """Of the comparison of its answers. ``usual``: of the activation, which includes it."""
    return learned(VERIFY_SECONDS / speed, usual)


def start(probe: float, usual: float, *, served: bool) -> float:
    """Of a start with a process. ``probe``: for how long the pod's startupProbe waits, 0: it has none. ``usual``: 0:
    nothing is known. ``served``: this pod has served before."""
    if probe:
        return probe + PROBE_MARGIN_SECONDS
    known = served and usual > 0
    return min(FIRST_START_SECONDS, max(START_FLOOR_SECONDS, LEARNED_TIMES * usual)) if known else FIRST_START_SECONDS


def is_late(age: float, usual: float, most: float | None) -> bool:
    """True past its end ``most``, or far beyond what is usual (0: not known)."""
    if usual > 0:
        beyond = usual + max(LATE_SECONDS, 2 * usual)
    else:
        beyond = UNKNOWN_LATE_SECONDS if most is not None else math.inf
    return age > beyond or (most is not None and age > most)


def age_text(age: float, usual: float, most: float | None, ends: str = "") -> str:
    """``for 92 s (usually 1.7 s; given up at 2 min 10 s)``. ``ends``: what happens at the end, or why there is none."""
    known = [f"usually {span(usual)}"] if usual else []
    known += [f"{ends or 'ends'} at {span(most)}"] if most is not None else [ends] if ends else []
    return f"for {span(age)}" + (f" ({'; '.join(known)})" if known else "")


def span(seconds: float) -> str:
    """``1.7 s``, ``92 s``, ``2 min 10 s``, ``3 h``."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.{int(0 < seconds < 10 and seconds != round(seconds))}f} s"
    if seconds >= 7200:
        return f"{seconds / 3600:.0f} h"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min" + (f" {rest} s" if rest else "")
