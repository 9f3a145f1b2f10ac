"""What it costs to park and activate a seat: from a table of hardware, from measurements, or given in seconds. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to park and to activate one seat, by how much VRAM it holds."""

    name: str
    out_bytes_per_second: float
    in_bytes_per_second: float
    fixed_seconds: float
    """Part of each that does not depend on size."""
    source: str
    activate_fixed_seconds: float | None = None
    """Of activating, where it differs."""

    def park_seconds(self, vram_bytes: int) -> float:
        """VRAM out to host memory."""
        return self.fixed_seconds + vram_bytes / self.out_bytes_per_second

    def activate_seconds(self, vram_bytes: int) -> float:
        """And back."""
        fixed = self.fixed_seconds if self.activate_fixed_seconds is None else self.activate_fixed_seconds
        return fixed + vram_bytes / self.in_bytes_per_second


HARDWARE: dict[str, Cost] = {
    cost.name: cost
    for cost in (
        Cost("stock-slow", 2 * GB, 5 * GB, 1.0, "cuda-checkpoint as it comes, pessimistic: 2 GB/s out, 5 GB/s in"),
        Cost("stock", 4 * GB, 7 * GB, 1.0, "cuda-checkpoint as it comes: 4 GB/s out, 7 GB/s in"),
        Cost("fast", 12 * GB, 12 * GB, 0.5, "half of PCIe 4.0 x16, both ways: the main table of the research"),
        Cost("pinned", 48 * GB, 48 * GB, 0.5, "pinned host memory over PCIe 5.0 x16"),
    )
}
"""By name, slowest first. Assumptions until measured on the machine in question: ``kyb doctor`` and the checkpointer's
learned seconds are the facts."""


def parse(text: str) -> Cost:
    """A cost as people write it: a name of ``HARDWARE``, ``4/7`` (GB/s out/in, plus 1 s each), or ``2.5s/3s`` (seconds
    to park and to activate, whatever the size). Raises ValueError with what to write instead.
    """
    if text in HARDWARE:
        return HARDWARE[text]
    seconds = text.endswith("s") and "s/" in text
    parts = [part.removesuffix("s") if seconds else part for part in text.split("/")]
    try:
        first, second = (float(part) for part in parts)
    except ValueError:
        first = second = -1.0
    if first < 0 or second < 0 or (not seconds and min(first, second) == 0):
        raise ValueError(
            f"cost {text!r} is neither a name ({', '.join(HARDWARE)}) nor GB/s out/in like 4/7 nor seconds to "
            f"park/activate like 2.5s/3s"
        )
    if seconds:
        return Cost(text, float("inf"), float("inf"), first, "as given", activate_fixed_seconds=second)
    return Cost(text, first * GB, second * GB, 1.0, "as given")


def fitted(rows: Sequence[tuple[int, float, float]], name: str = "measured") -> Cost:
    """The cost that fits (vram_bytes, park_seconds, activate_seconds) best, by least squares through a common fixed
    part. Needs at least one row; with one size alone all of it counts as proportional. Raises ValueError.
    """
    if not rows:
        raise ValueError("no measured seat with VRAM, park and activate seconds; park and activate one first")
    fixed = min(max(0.0, (_intercept(rows, 1) + _intercept(rows, 2)) / 2), min(min(row[1], row[2]) for row in rows))
    speeds = []
    for column in (1, 2):
        moved = sum(row[column] - fixed for row in rows)
        speeds.append(sum(row[0] for row in rows) / moved if moved > 0 else float("inf"))
    return Cost(name, speeds[0], speeds[1], fixed, f"fitted to {len(rows)} measured seats")


def measured(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Rows for ``fitted`` from seats of the GPU manager's ledger: what parking and activating them took there."""
    found = []
    for record in records:
        row = (record.get("vram_bytes"), record.get("park_seconds"), record.get("activate_seconds"))
        if all(isinstance(value, int | float) and value > 0 for value in row):
            found.append((int(row[0] or 0), float(row[1] or 0), float(row[2] or 0)))
    return found


def _intercept(rows: Sequence[tuple[int, float, float]], column: int) -> float:
    """Where the least-squares line meets no VRAM; 0 when all seats are equally large."""
    count = len(rows)
    mean_x = sum(row[0] for row in rows) / count
    mean_y = sum(row[column] for row in rows) / count
    spread = sum((row[0] - mean_x) ** 2 for row in rows)
    if spread == 0:
        return 0.0
    return mean_y - sum((row[0] - mean_x) * (row[column] - mean_y) for row in rows) / spread * mean_x
