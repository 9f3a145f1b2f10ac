"""How often a request returns to a file of the router, or of its port, that it has left."""

from pathlib import Path

import pytest

from kybernate.http import server
from kybernate.seat import SeatState
from services.router import level_publisher, roster_sync, service
from tests.router.world import world
from tests.walk import walking

MOST_RETURNS = {"plain": 9, "streamed": 13, "held": 20}
"""By kind of call, with its connection. A held one waits for a switch: the command to the manager, its reply, and two
events of the seat. Levels are left out: a timer publishes them, on a busy machine anywhere in the walk."""


@pytest.mark.parametrize("kind", MOST_RETURNS)
async def test_a_request_seldom_returns_to_a_file_that_it_has_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_sync, "PRESENCE_SECONDS", 60.0)  # no part of a request
    monkeypatch.setattr(level_publisher.LevelPublisher, "touch", lambda *_: None)
    async with world() as one:
        await one.seat("s1", "m1", SeatState.PARKED if kind == "held" else SeatState.ACTIVE)
        await one.ready()

        with walking(Path(service.__file__).parent, Path(server.__file__).parent) as walk:
            answered = await one.ask("m1", stream=kind == "streamed")

    assert answered.status == 200
    assert walk.files[0] == "server"
    assert walk.returns <= MOST_RETURNS[kind], f"{walk.returns}: {' → '.join(walk.files)}"
