import pytest

from tests.manager.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.boot()
    return world


@pytest.fixture
def a(world: World) -> str:
    return world.seat(0, 0)


@pytest.fixture
def b(world: World) -> str:
    return world.seat(0, 1)
