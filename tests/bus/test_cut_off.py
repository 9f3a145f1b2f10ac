"""A nats-server that has lost its routes keeps its clients, and answers them."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from math import inf
from pathlib import Path
from typing import Any

import pytest
import structlog
from nats.js.api import ClusterInfo, PeerInfo

from kybernate.bus.credentials import NO_CREDENTIALS
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_link import MAJORITY_SECONDS, dial, leader_seconds
from kybernate.bus.port import BusError
from kybernate.roster import BUCKET
from services.console import __main__ as console
from services.console.settings import ConsoleSettings
from services.router import __main__ as router
from services.router.settings import RouterSettings
from tests.bus.cut import Servers, three_servers
from tests.bus.worlds import within
from tests.until import until

STREAM = f"KV_{BUCKET}"


async def server_of(servers: Servers, name: str) -> int:
    found = await servers.server_of(name)
    assert found is not None
    return found


def cut_off(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "bus.cut_off"]


async def written(bus: NatsBus) -> bool:
    try:
        return await (await bus.bucket(BUCKET)).put("n1.s1", b"1") > 0
    except BusError:
        return False


@pytest.mark.timeout(180)
async def test_a_server_that_does_not_reach_the_rosters_leader_is_left_for_one_that_does(tmp_path: Path) -> None:
    async with three_servers(tmp_path) as servers:
        url = ",".join(servers.urls)
        async with NatsBus(url, source="test", name="mover", follows=BUCKET).opened() as bus:
            await within(bus.until_connected())
            before = await server_of(servers, "mover")
            with structlog.testing.capture_logs() as logs:
                servers.isolate(before)

                def left() -> list[Any]:
                    return [line for line in cut_off(logs) if line["next"]]

                await until(left, what="it leaves the server", timeout=30)
            # The server that was cut off may have led: then the others elect another leader first.
            await until(lambda: written(bus), what="the roster can be written there", timeout=40, interval=0.2)
            (line,) = left()
            assert line["server"] == servers.names[before]
            assert line["next"] in {*servers.names} - {servers.names[before]}


class OpenedError(Exception):
    """A service opens its bus."""


@pytest.mark.parametrize(
    ("service", "settings"), [(console, ConsoleSettings), (router, RouterSettings)], ids=["console", "router"]
)
async def test_what_reads_the_roster_leaves_such_a_server(
    service: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(*_: object, follows: str = "", **__: object) -> None:
        raise OpenedError(follows)

    monkeypatch.setattr(service, "NatsBus", opens)
    with pytest.raises(OpenedError, match=BUCKET):
        await service.serve(settings())


@pytest.mark.timeout(180)
async def test_without_another_server_it_stays_and_says_so(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(three_servers(tmp_path))
        bus = NatsBus(servers.urls[1], source="test", name="stays", follows=BUCKET)
        await stack.enter_async_context(bus.opened())
        await within(bus.until_connected())
        losses: list[bool] = []
        bus.on_change(losses.append)
        with structlog.testing.capture_logs() as logs:
            servers.isolate(1)
            await until(lambda: cut_off(logs), what="it says so", timeout=40)
            with pytest.raises(BusError, match=r"no leader|no answer|temporarily unavailable"):
                await bus.bucket(BUCKET)
        assert "no server of 127.0.0.1 reaches the leader" in cut_off(logs)[0]["meaning"]

        servers.heal()

        await until(lambda: written(bus), what="the roster can be written again", timeout=40, interval=0.2)
        assert bus.connected
        assert not losses


@pytest.mark.timeout(180)
async def test_a_leader_that_is_cut_off_leads_on_and_is_not_taken_for_one(tmp_path: Path) -> None:
    """For 10 to 20 s, in which the others have another one: callers waited for as long."""
    async with three_servers(tmp_path) as servers:
        old = await servers.leader(STREAM, seen_by=0)
        assert old is not None
        errors: list[Exception] = []
        link = await dial(servers.urls[old], "asks", NO_CREDENTIALS, errors.append)
        try:
            assert await link.leader_seconds(STREAM) <= MAJORITY_SECONDS
            servers.isolate(old)

            async def noticed() -> bool:
                return await link.leader_seconds(STREAM) > MAJORITY_SECONDS

            await until(noticed, what="its leader has no majority", timeout=40, interval=0.2)
            assert await servers.leader(STREAM, seen_by=old) == old, "it leads on by its own word"
        finally:
            await link.client.close()


@pytest.mark.parametrize(
    ("ages", "seconds"), [((), 0), ((9,), 9), ((1, 9), 1), ((8, 9), 8), ((1, 2, 9), 2), ((1, 2, 8, 9), 2)]
)
def test_a_leader_counts_by_the_answers_of_a_majority(ages: Sequence[int], seconds: float) -> None:
    replicas = [PeerInfo(name=f"n{number}", active=age * 10**9) for number, age in enumerate(ages)]
    assert leader_seconds(ClusterInfo(leader="n", replicas=replicas)) == seconds
    assert leader_seconds(ClusterInfo(leader="", replicas=replicas)) == inf
    assert leader_seconds(None) == 0
