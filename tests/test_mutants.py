"""The tables of mutations (tests/mutants) follow the code."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_name_tests_that_exist() -> None:
    """That each row is a mutation of this code is part of ``make check``."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutants  # dataclasses look their module up
    spec.loader.exec_module(mutants)

    found = mutants.read_tables(mutants.TABLE)

    assert len(found) >= 80
    missing = []
    for mutation in found:
        for test in mutation.tests:
            file, _, name = test.partition("::")
            path = ROOT / file
            if not path.is_file() or f"def {name.partition('[')[0].rpartition('::')[2]}(" not in path.read_text():
                missing.append((mutation.name, test))
    assert missing == [], "single tests, so that a run is short and shows which test notices what"
