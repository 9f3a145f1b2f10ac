"""What a check found. Pure."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How a check ended."""

    OK = "OK"
    WARN = "WARN"
    """It works, with a limit that a person should know."""
    FAIL = "FAIL"
    """Parking will not work, or not for what the finding names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    check: str
    """What was looked at: libcuda, nvml, mig …"""
    level: Level
    finding: str
    remedy: str = ""
    """What to do; empty when there is nothing to do."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def ok(check: str, finding: str) -> Finding:
    """All is well."""
    return Finding(check, Level.OK, finding)


def warn(check: str, finding: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(check, Level.WARN, finding, remedy)


def fail(check: str, finding: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, Level.FAIL, finding, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 unless something fails, then 1; warnings do not count. (2 is wrong usage, as everywhere in ``kyb``.)"""
    return int(any(finding.level is Level.FAIL for finding in findings))
