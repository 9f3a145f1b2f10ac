"""Whose start call waits is decided only by observations that prove the seat's owner (decision 021)."""

import json
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager.core.seat_pod import Owners, SeatPod
from tests.manager.test_manager import NoPods, running
from tests.manager.world import World
from tests.until import until


def test_a_copy_of_the_pods_that_may_lie_behind_confirms_no_owner(world: World) -> None:
    """The call may be that of a pod made again under the same name, while the first pod's processes still run."""
    (seat,) = world.fill("a")
    behind = replace(world.owners(), unproven=frozenset({seat}))

    world.call(seat)
    for _ in range(10):
        world.receive(behind)
    assert world.state(seat) is S.ACTIVE

    world.receive(world.owners())
    world.receive(behind)
    assert world.state(seat) is S.ACTIVE, "the first proven observation may have begun before the call"
    world.receive(world.owners())
    assert [event.state for event in world.events(seat)][-3:] == [S.BACKOFF, S.WAITING, S.STARTING]


def test_a_seat_left_out_of_an_observation_is_neither_missed_nor_confirmed(world: World) -> None:
    """The copy shows another state of its owner than the API server: the owner stays listed."""
    (seat,) = world.fill("a")
    left_out = replace(world.owners(), pods=())

    world.call(seat)
    for _ in range(10):
        world.receive(left_out)
    assert world.state(seat) is S.ACTIVE
    world.receive(world.owners())
    assert world.state(seat) is S.ACTIVE


async def test_the_manager_has_the_owner_of_a_called_seat_proven_until_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    seat, proofs = world.seat(0, 0), [frozenset[str]()]
    owner = SeatPod(seat, "d", "p0", "u0", "engine", container_id="process://1", running=True)

    async def seats(_: NoPods, prove: Collection[str] = ()) -> Owners:
        proofs.append(frozenset(prove))
        return Owners((owner,), frozenset({"u0"}), unproven=frozenset({seat}) - frozenset(prove))

    monkeypatch.setattr(NoPods, "seats", seats)
    async with running(world, tmp_path):
        await until(lambda: len(proofs) > 3, what="some observations")
        assert not any(proofs)
        folder = tmp_path / "seats" / seat
        folder.mkdir(parents=True)
        call = {"call": "c1", "since": time.time(), "until": time.time() + 25}
        (folder / "call.json").write_text(json.dumps(call))
        await until((folder / "ticket.json").exists, what="the call has a ticket")
        assert 2 <= proofs.count(frozenset({seat})) <= 5
