import pytest

from tests.manager.packed import PackedWorld, make_packed
from tests.manager.world import World, booted


@pytest.fixture
def world() -> World:
    return booted()


@pytest.fixture
def a(world: World) -> str:
    return world.seat(0, 0)


@pytest.fixture
def b(world: World) -> str:
    return world.seat(0, 1)


@pytest.fixture
def packed() -> PackedWorld:
    """A group of one 80 GiB GPU with four seats, and one of both GPUs over it."""
    made = PackedWorld(groups=(make_packed("G0", [0], 4), make_packed("G01", [0, 1], 2)))
    made.boot()
    return made
