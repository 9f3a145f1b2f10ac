"""scripts/mutation.py: what a row of tests/mutants names, and what becomes of the code."""

import ast
from pathlib import Path

import pytest

from scripts.mutation import find, read_tables

ROOT = Path(__file__).parent.parent
CODE = """
def send(job, seat, *, late=False):
    # a comment
    if (
        job.sent  # another one
        and seat.free and not late
    ):
        log(job, epoch=1)
        return {"a": 1, "b": [2, 3]}
    elif late:
        log(job, epoch=2)
    else:
        seat.note("x")
    return None
"""


@pytest.mark.parametrize(
    ("change", "old", "new", "line"),
    [
        ("drop", "seat.free", "", "if job.sent and (not late):"),
        ("drop", "job.sent and seat.free", "", "if not late:"),
        ("replace", "seat.free and not late", "late", "if job.sent and late:"),
        ("negate", "seat.free", "", "if job.sent and (not seat.free) and (not late):"),
        ("always", "not late", "", "if job.sent and seat.free and True:"),
        ("never", "job.sent", "", "if False and seat.free and (not late):"),
        ("replace", "if late:", "while late:", "while late:"),
        ("replace", "epoch=1", "epoch=3", "log(job, epoch=3)"),
        ("replace", "'b': [2, 3]", "'c': 4", "return {'a': 1, 'c': 4}"),
        ("drop", "'a': 1", "", "return {'b': [2, 3]}"),
        ("drop", "3", "", "return {'a': 1, 'b': [2]}"),
        ("drop", "log(job, epoch=2)", "", "pass"),
        ("drop", "elif late:", "", "else:"),
        ("move", "log(job, epoch=2)", "seat.note('x')", "pass"),
        ("replace", "log(job,\n  epoch=1)", "log(seat)\nlog(job)", "log(seat)"),
    ],
)
def test_a_fragment_is_found_whatever_its_layout_and_only_it_is_changed(
    change: str, old: str, new: str, line: str
) -> None:
    top = ast.parse(CODE)
    [place] = find(top, old)

    place.apply(change, new)

    before, after = ([one.strip() for one in ast.unparse(tree).splitlines()] for tree in (ast.parse(CODE), top))
    assert line in after
    assert len(after) - len(before) in (-2, -1, 0, 1), after


def test_a_fragment_that_is_there_twice_is_found_twice_and_what_is_no_code_is_an_error() -> None:
    top = ast.parse(CODE)

    assert len(find(top, "late")) == 2
    assert len(find(top, "log(job)")) == 0
    with pytest.raises(ValueError, match="is no code"):
        find(top, "if (")


def test_the_tables_name_tests_that_exist() -> None:
    """That each row is a mutation of this code is part of ``make check``."""
    found = read_tables(ROOT / "tests" / "mutants")

    assert len(found) >= 80
    missing = []
    for mutation in found:
        for test in mutation.tests:
            file, _, name = test.partition("::")
            path = ROOT / file
            if not path.is_file() or f"def {name.partition('[')[0].rpartition('::')[2]}(" not in path.read_text():
                missing.append((mutation.name, test))
    assert missing == [], "single tests, so that a run is short and shows which test notices what"
