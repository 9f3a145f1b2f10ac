"""The main table of the research that the policy was built on (its section 4.1): another simulator, four windows each.

Its policies map to ours by rule. Those called KYB there had other constants and another rule for closing than ours.
"""

from dataclasses import dataclass

CLAIRVOYANT = ("clairvoyant-reactive", "clairvoyant", "clairvoyant-reactive-slo", "clairvoyant-slo")
"""Schedulers that know the future: for the mean wait restoring on demand, for it freely; the same for the SLO."""


@dataclass(frozen=True, slots=True)
class Row:
    """Waits in seconds, attainment of 20 s in percent."""

    mean: float
    p99: float
    most: float
    attainment: float


def _column(*cells: tuple[float, float, float, float]) -> dict[str, Row]:
    names = (
        "fifo-switch", "exhaustive", "idle-timeout", "quantum", "longest-queue", "cmu-setup", "kyb-balanced",
        "kyb-bounded", "kyb-slo", *CLAIRVOYANT[:2],
    )  # fmt: skip
    return {name: Row(*cell) for name, cell in zip(names, cells, strict=True)}


PUBLISHED: dict[str, dict[str, Row]] = {
    "S1": _column(
        (15.9, 51, 74, 68.2), (12.2, 47, 77, 77.8), (29.3, 102, 141, 44.6), (20.4, 71, 89, 56.2), (12.7, 72, 154, 80.0),
        (12.5, 74, 136, 81.0), (11.4, 52, 81, 81.3), (11.6, 63, 81, 81.9), (11.9, 79, 97, 85.3), (8.8, 52, 104, 86.1),
        (8.1, 53, 118, 87.3),
    ),
    "S2": _column(
        (14.1, 59, 72, 69.6), (10.3, 82, 152, 81.7), (24.6, 185, 416, 65.5), (15.6, 83, 112, 68.5),
        (10.3, 71, 193, 79.7), (10.0, 98, 250, 83.7), (9.5, 81, 161, 83.3), (9.9, 75, 103, 81.7), (10.8, 93, 112, 83.5),
        (7.5, 56, 157, 86.3), (7.4, 57, 159, 86.2),
    ),
    "S3": _column(
        (13.4, 50, 61, 75.6), (11.9, 49, 61, 79.3), (32.7, 120, 150, 44.9), (21.1, 86, 125, 57.7),
        (12.6, 82, 191, 85.1), (12.1, 67, 173, 85.1), (11.0, 54, 100, 83.0), (10.6, 65, 79, 85.5),
        (11.3, 83, 103, 89.2), (8.4, 58, 261, 90.8), (6.7, 57, 181, 91.3),
    ),
    "S4": _column(
        (31.1, 108, 142, 41.8), (24.3, 110, 148, 57.4), (101.9, 856, 969, 44.9), (39.6, 154, 193, 42.4),
        (22.4, 217, 717, 66.9), (22.0, 262, 873, 72.9), (20.4, 133, 281, 65.9), (21.3, 102, 144, 64.9),
        (23.8, 111, 182, 65.5), (16.7, 167, 617, 75.4), (16.7, 163, 689, 75.2),
    ),
}  # fmt: skip
"""By scenario and policy."""
