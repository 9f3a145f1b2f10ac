"""The suite itself: every rule has a test or a reason, and the page has the measured results."""

import json
from pathlib import Path

from tests.conformance.items import ITEMS, REASONS
from tests.conformance.table import RESULTS, page, shown

ROOT = Path(__file__).parents[2]


def test_every_rule_has_a_test_or_a_reason_and_not_both() -> None:
    tests = shown()
    assert list(ITEMS) == list(range(1, 62))
    assert set(tests) | set(REASONS) == set(ITEMS)
    assert not set(tests) & set(REASONS)
    assert len(REASONS) <= 12


def test_the_results_on_the_fake_are_there_for_every_rule_with_a_test() -> None:
    results = json.loads((ROOT / RESULTS).read_text())
    assert {int(number) for number in results["fake"]["items"]} == set(shown())
    assert set(results["fake"]["items"].values()) == {"passed"}


def test_the_page_shows_rule_test_and_both_results() -> None:
    text = page({"fake": {"items": {"1": "passed", "2": "failed", "3": "skipped"}}, "real": {"items": {"1": "passed"}}})
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert rows["1"].endswith("| pass | pass |")
    assert rows["2"].endswith("| **fail** | not run |")
    assert rows["3"].endswith("| skipped | not run |")
    assert "[registering](../../tests/conformance/test_registering.py) 2" in rows["5"]
    assert rows["43"].endswith("| – | – |")
    assert REASONS[43] in rows["43"]
