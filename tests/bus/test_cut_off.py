"""A nats-server that has lost its routes keeps its clients, and answers them."""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from nats.js.api import ClusterInfo, PeerInfo

from kybernate.bus import nats_connection
from kybernate.bus.credentials import NO_CREDENTIALS
from kybernate.bus.nats import NatsBus
from kybernate.bus.nats_connection import NatsConnection
from kybernate.bus.nats_link import LEADER_SECONDS, MAJORITY_SECONDS, NatsLink, dial, leader_seconds
from kybernate.bus.port import BusError
from kybernate.roster import BUCKET
from services.console import __main__ as console
from services.console.settings import ConsoleSettings
from services.router import __main__ as router
from services.router.settings import RouterSettings
from tests.bus.cut import three_servers
from tests.bus.worlds import connected
from tests.until import until

STREAM = f"KV_{BUCKET}"


def cut_off(logs: list[Any]) -> list[Any]:
    return [line for line in logs if line["event"] == "bus.cut_off"]


async def written(bus: NatsBus) -> bool:
    try:
        return await (await bus.bucket(BUCKET)).put("n1.s1", b"1") > 0
    except BusError:
        return False


@pytest.mark.timeout(180)
async def test_a_server_that_does_not_reach_the_rosters_leader_is_left_for_one_that_does(tmp_path: Path) -> None:
    async with (
        three_servers(tmp_path) as servers,
        connected(",".join(servers.urls), name="mover", follows=BUCKET) as bus,
    ):
        before = await servers.server_of("mover")
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


class Played:
    """A connection, in a time of its own, to a server of which one can say when it reaches the leader."""

    def __init__(self, time: list[float], seconds: Callable[[], float], *, server: str = "") -> None:
        self._time, self._seconds, self.server = time, seconds, server
        self.lost = asyncio.Event()
        self.client = SimpleNamespace(connected_url=None, close=self._close)

    @property
    def alive(self) -> bool:
        return self._time[0] < END

    async def leader_seconds(self, _: str, timeout: float = LEADER_SECONDS) -> float:
        if (seconds := self._seconds()) == inf:
            self._time[0] += timeout
        return seconds

    async def _close(self) -> None:
        pass


END = 60.0
ELECTED = [number / 10 for number in range(40, 200)]
"""When there is another leader, seconds after the one before was cut off: 4 to 9, and as long again where each of two
servers votes for itself."""


def from_then(elected: float) -> Callable[[float], float]:
    """Answers of a server that reaches the new leader."""
    return lambda now: 0.0 if now >= elected else inf


async def played(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[float], float], others: Callable[[float], float]
) -> tuple[float, bool]:
    """When a service that is at one server has left it, or ``END``, and whether it has; the functions: for how long
    servers have not reached a leader."""
    time = [0.0]

    async def dial(*_: object) -> Played:
        return Played(time, lambda: others(time[0]))

    async def wait(_: asyncio.Event, seconds: float) -> None:
        time[0] += max(0.01, seconds)

    monkeypatch.setattr(nats_connection, "dial", dial)
    monkeypatch.setattr(nats_connection, "wait_for", wait)
    monkeypatch.setattr(nats_connection, "time", SimpleNamespace(monotonic=lambda: time[0]))
    connection = NatsConnection("nats://b,nats://c", name="test", credentials=NO_CREDENTIALS, leader_of=STREAM)
    await connection._until_useless(cast(NatsLink, Played(time, lambda: own(time[0]))))
    return time[0], connection._next is not None


@pytest.mark.parametrize("leads", [True, False], ids=["a leader", "a follower"])
async def test_a_server_that_is_cut_off_is_left_soon_after_there_is_a_leader(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """Pauses between the searches had grown to 5 s when an election took long: requests waited for 20 s."""
    late = []
    for elected in ELECTED:
        at, left = await played(monkeypatch, lambda now: now if leads else inf, from_then(elected))
        assert left
        late.append((at - elected, elected))
    assert max(late)[0] < 4.5, max(late)


async def test_a_server_that_reaches_the_new_leader_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the election ended while the others were asked, it was: a manager then waits 3 s for its routers."""
    moved = []
    for elected in ELECTED:
        at, left = await played(monkeypatch, from_then(elected), from_then(elected))
        moved += [(elected, at)] * left
    assert not moved


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
    async with three_servers(tmp_path) as servers, connected(servers.urls[1], follows=BUCKET) as bus:
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
