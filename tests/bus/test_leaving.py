"""A bus that is left while it connects ends, also where the client loses the stop."""

import asyncio

import pytest

from kybernate.bus import nats_connection
from kybernate.bus.nats import NatsBus


async def test_a_stop_that_the_client_loses_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    dials: list[str] = []

    async def dial(url: str, *_: object) -> None:
        dials.append(url)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # as wait_for of Python 3.11 does when both come at once
            raise ConnectionRefusedError("connection refused") from None

    monkeypatch.setattr(nats_connection, "dial", dial)

    async def visit() -> None:
        async with NatsBus("nats://127.0.0.1:9", source="test", name="test").opened():
            while not dials:
                await asyncio.sleep(0)

    visiting = asyncio.create_task(visit())
    done, _ = await asyncio.wait({visiting}, timeout=10)
    assert done
    assert len(dials) == 1
