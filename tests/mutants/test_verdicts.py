"""scripts/mutants.py: a mutant that survives, a row that is stale, and a mutation that only breaks the code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # each starts Python anew and imports what all tests need

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "mutants.py"
FACTS = ROOT / "services" / "gpu_manager" / "core" / "facts.py"
TESTS = ["tests/manager/test_facts.py"]
ARRIVES = '"promise": Promise.ARRIVES'


def run(folder: Path, rows: dict[str, dict[str, object]], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a table of these rows: name → what differs from a mutation that is killed."""
    table = []
    for name, changes in rows.items():
        row = {"rule": "r", "in": "gpu_manager: TABLE", "tests": TESTS, **changes}
        if not {"replace", "always"} & set(changes):
            row["drop"] = changes.get("drop", ARRIVES)
        table.append("\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in row.items())]))
    (folder / "table.toml").write_text("\n".join(table))
    command = [sys.executable, str(SCRIPT), "--table", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_each_mutant_has_a_verdict_and_the_checkout_stays_as_it_is(tmp_path: Path) -> None:
    before = FACTS.read_bytes()

    found = run(
        tmp_path,
        {
            "unseen": {
                "in": "kybernate: SeatState",
                "replace": ['BACKOFF = "backoff"', 'BACKOFF = "back-off"'],
                "tests": ["tests/test_extras.py"],
            },
            "seen": {},
            "no-import": {
                "in": "kybernate.seat: SeatState.LOST",
                "replace": ['LOST = "lost"', "import no_such_module"],
            },
            "no-name": {"in": "gpu_manager: _state", "replace": ["_SERVING", "_serving"]},
        },
    )

    assert found.returncode == 1, found.stdout + found.stderr
    verdicts = {line.split()[1]: line for line in found.stdout.splitlines() if line[:1].strip() and "  " in line}
    assert verdicts["unseen"].startswith("survived")
    assert verdicts["seen"].startswith("killed")
    assert "tests/manager/test_facts.py::" in verdicts["seen"]
    assert verdicts["no-import"].startswith("error")
    assert "no_such_module" in verdicts["no-import"]
    assert verdicts["no-name"].startswith("error")
    assert "3 of 4 mutations are not killed" in found.stderr
    assert FACTS.read_bytes() == before


def test_a_row_that_is_no_mutation_of_the_code_is_an_error_also_where_it_is_not_drawn(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        {
            "seen": {},
            "gone": {"drop": '"promise": Promise.ABSENT'},
            "twice": {"drop": "S.PARKED"},
            "no-function": {"in": "gpu_manager: no_such_function"},
            "same": {"in": "gpu_manager: _state", "replace": ["_SERVING[facts.promise]"] * 2},
            "syntax": {"replace": [ARRIVES, "("]},
            "statement": {
                "in": "gpu_manager: _state",
                "always": "return next((state for fits, state in rules if fits), None) or _SERVING[facts.promise]",
            },
        },
        "--only",
        "seen",
    )

    assert found.returncode == 1
    assert [line.split()[1].rstrip(":") for line in found.stdout.splitlines()] == [
        *("gone", "twice", "no-function", "same", "syntax", "statement")
    ]
    assert "6 of 7 rows are no mutations of this code" in found.stderr


def test_a_test_that_fails_without_a_mutation_proves_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, {"seen": {"tests": ["tests/manager/test_facts.py::test_that_does_not_exist"]}})

    assert found.returncode == 1
    assert "a test fails without a mutation" in found.stderr
    assert "killed" not in found.stdout


def test_a_sample_has_the_number_of_mutations_that_is_asked_for(tmp_path: Path) -> None:
    found = run(tmp_path, {f"seen-{number}": {} for number in range(4)}, "--sample", "2", "--seed", "7")

    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("2 of 4 mutations")
    assert sum(line.startswith("killed") for line in found.stdout.splitlines()) == 2
