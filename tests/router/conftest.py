"""A router for the tests that need no settings of their own."""

from collections.abc import AsyncIterator

import pytest

from tests.router.world import World, world


@pytest.fixture
async def w() -> AsyncIterator[World]:
    async with world() as running:
        yield running
