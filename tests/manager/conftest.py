import pytest

from tests.manager.world import World


@pytest.fixture
def world() -> World:
    world = World()
    world.boot()
    return world
