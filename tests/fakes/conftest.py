"""A fake driver for tests of its daemon and of engines."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kybernate.dev.fakes.gpu.client import FakeDriverClient
from tests.fakes.daemons import driver


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    """A driver with four GPUs at speed 100."""
    socket = tmp_path / "driver.sock"
    async with driver(socket, "--speed", "100") as daemon, await FakeDriverClient.connect(socket) as client:
        gpus = [gpu["uuid"] for gpu in (await client.call("devices"))["gpus"]]
        yield SimpleNamespace(socket=socket, daemon=daemon, client=client, gpus=gpus)
