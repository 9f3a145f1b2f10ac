"""A nats-server, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kybernate.bus.nats import NatsBus
from kybernate.bus.setup import init
from kybernate.dev.nats_server import NatsServer
from tests.bus.guarded import certificates
from tests.bus.worlds import connected


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path / "nats") as running:
        yield running


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates."""
    certificates(folder := tmp_path_factory.mktemp("pki"))
    return folder


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    """Connected to a server with streams and buckets."""
    await init(server.url)
    async with connected(server.url) as opened:
        yield opened
