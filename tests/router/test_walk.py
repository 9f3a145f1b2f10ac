"""How often a plain HTTP request returns to a file of the router that it has left."""

from pathlib import Path

from kybernate.seat import SeatState
from services.router import service
from tests.router.world import world
from tests.walk import walking

MOST_RETURNS = 42
"""What it takes today; the aim is 20."""


async def test_a_plain_request_seldom_returns_to_a_file_that_it_has_left() -> None:
    async with world() as one:
        await one.seat("s1", "m1", SeatState.ACTIVE)
        await one.ready()

        with walking(Path(service.__file__).parent) as walk:
            answered = await one.ask("m1")

    assert answered.status == 200
    assert walk.files[0] == "front"
    assert walk.returns <= MOST_RETURNS, f"{walk.returns}: {' → '.join(walk.files)}"
