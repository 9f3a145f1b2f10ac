"""A console for the tests that need no settings of their own, with a port for its page."""

from collections.abc import AsyncIterator

import pytest

from kybernate.dev.nats_server import free_port
from tests.console.world import Shown, shown


@pytest.fixture
async def w() -> AsyncIterator[Shown]:
    async with shown(health_port=free_port()) as running:
        yield running


@pytest.fixture
def url(w: Shown) -> str:
    """Of the page."""
    return f"{w.console.page_url}/ui/"
