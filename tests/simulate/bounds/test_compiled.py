"""Compiled functions where nothing can be kept, and where numba is not installed."""

import importlib.util
import sys

import pytest

from kybernate.lab import compiled as module
from kybernate.lab.compiled import compiled


def test_what_cannot_be_kept_is_compiled_all_the_same() -> None:
    # A function without a file is to numba what an install without any writable folder is: nowhere to keep the result.
    names: dict[str, object] = {}
    exec("def twice(x):\n    return 2 * x\n", names)
    assert compiled(names["twice"])(21) == 42  # type: ignore[type-var, operator]


def test_without_numba_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    spec = importlib.util.spec_from_file_location("compiled_without_numba", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kybernate\[lab\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
