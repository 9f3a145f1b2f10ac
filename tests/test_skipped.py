"""What is skipped in CI."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.skipped import reasons, refused_in_ci

HERE = Path(__file__).parent


def skip(reason: str) -> pytest.CollectReport:
    return pytest.CollectReport("tests/test_x.py", "skipped", (__file__, 1, f"Skipped: {reason}"), [])


@pytest.mark.parametrize(
    ("ci", "reason", "outcome"),
    [
        ("true", "nginx is not installed", "failed"),
        ("true", "only Linux has it", "skipped"),
        ("true", "not only Linux has it", "failed"),
        ("true", "git does not have release 1: fatal\nbad object", "skipped"),
        ("", "nginx is not installed", "skipped"),
    ],
)
def test_ci_skips_what_the_page_names_alone(
    ci: str, reason: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    report = skip(reason)
    refused_in_ci(report)
    assert report.outcome == outcome
    assert outcome == "skipped" or report.longrepr.startswith(reason)


def test_each_row_of_the_page_is_a_reason_of_a_test() -> None:
    listed = subprocess.run(["git", "ls-files", "."], cwd=HERE, check=True, capture_output=True, text=True).stdout
    texts = "\n".join(
        (HERE / name).read_text() for name in listed.split() if name.endswith(".py") and name != "test_skipped.py"
    )
    assert [row for row in reasons() if re.split("…", row)[0].strip() not in texts] == []
