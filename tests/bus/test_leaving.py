"""A bus that is left while it connects ends, and a task that is cancelled while it asks, also where the client loses
the stop."""

import asyncio
import contextlib
from pathlib import Path

import nats.errors
import pytest

from kybernate.bus import nats_connection
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_link import NatsLink, failures
from kybernate.bus.port import BusError
from kybernate.dev.nats_server import NatsServer


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


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_comes_with_the_answer_ends_the_task(*, fails: bool) -> None:
    """Seen on a stack: a manager that was to start again with another configuration looked at the roster for ever."""
    answer = asyncio.get_running_loop().create_future()

    async def looks() -> None:
        while True:
            with contextlib.suppress(BusError), failures("the roster"):
                await asyncio.wait_for(answer, 5)  # as nats-py does
            await asyncio.sleep(3600)

    task = asyncio.create_task(looks())
    for _ in range(3):
        await asyncio.sleep(0)
    if fails:
        answer.set_exception(nats.errors.Error())
    else:
        answer.set_result(None)
    task.cancel()
    await asyncio.wait([task], timeout=1)
    lost = not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert not lost


async def test_a_stop_that_is_lost_while_the_leader_is_asked_for_is_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def leader_seconds(*_: object) -> float:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return 0.0

    monkeypatch.setattr(NatsLink, "leader_seconds", leader_seconds)
    monkeypatch.setattr(nats_connection, "LEADER_SECONDS", 0.1)

    async def visit() -> None:
        async with NatsBus(server.url, source="test", name="test", follows="rows").opened():
            await asked.wait()

    async with NatsServer(tmp_path) as server:
        visiting = asyncio.create_task(visit())
        done, _ = await asyncio.wait({visiting}, timeout=10)
    assert done
