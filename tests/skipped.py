"""In CI nothing is skipped without a row in docs/dev/skipped.md."""

import os
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/dev/skipped.md"


def reasons() -> list[str]:
    """The first column of the page's table."""
    return re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)


def refused_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where CI is set and the page does not have its reason."""
    if not report.skipped or hasattr(report, "wasxfail") or not os.environ.get("CI"):
        return
    found = report.longrepr
    reason = (found[2] if isinstance(found, tuple) else str(found)).removeprefix("Skipped: ")
    if not any(re.fullmatch(".*".join(map(re.escape, row.split("…"))), reason, re.DOTALL) for row in reasons()):
        report.outcome = "failed"
        report.longrepr = f"{reason}: CI has what tests need; let .ci/run install it, or name it in docs/dev/skipped.md"
