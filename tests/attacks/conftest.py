"""One router for the tests of a module that need no settings of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.stack import RawEngine, Stack, serving

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, RawEngine]]:
    """A router with default settings, and the engine of its model ``llama``."""
    with serving(tmp_path_factory.mktemp("stack")) as both:
        yield both


@pytest.fixture
def stack(shared: tuple[Stack, RawEngine], engine: RawEngine) -> Stack:
    assert engine is shared[1]
    return shared[0]


@pytest.fixture
def engine(shared: tuple[Stack, RawEngine]) -> RawEngine:
    """The engine, with nothing recorded and its usual answer."""
    found = shared[1]
    fresh = RawEngine()
    found.answer = fresh.answer
    found.heads.clear()
    found.bodies.clear()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes start slowly on a busy machine."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stack"
