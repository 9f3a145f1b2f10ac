from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kybernate.cli import uninstall
from kybernate.cli.output import CliError
from kybernate.cli.uninstall import Cluster, Look, check_rollback, owners, refusal, sure_look
from kybernate.http.server import HttpServer
from kybernate.kube import Kube
from kybernate.seat import LEDGER_FORMAT

SEAT = {"kyb.ai/gpu-1x-seat": "1"}


def pod(name: str, *, limits: dict[str, str] | None = None, **status: Any) -> dict[str, Any]:
    state = {"phase": "Running", "hostIP": "127.0.0.1"} | status
    running = [{"name": "engine", "state": {"running": {}}}]
    return {
        "metadata": {"name": name, "namespace": "demo", "uid": f"u-{name}"},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": SEAT if limits is None else limits}}]},
        "status": {"containerStatuses": running if state["phase"] == "Running" else []} | state,
    }


def row(name: str, state: str, group: str = "G0") -> dict[str, Any]:
    return {"pod_uid": f"u-{name}", "seat": f"s-{name}", "node": "n", "group": group, "state": state}


def look(*rows: dict[str, Any]) -> Look:
    names = [one["pod_uid"].removeprefix("u-") for one in rows]
    return Look(owners([pod(name) for name in names], ["kyb.ai/"]), {one["pod_uid"]: one for one in rows})


@pytest.mark.parametrize(
    ("states", "held"),
    [
        (("active", "draining", "starting", "waiting", "backoff"), 0),
        (("parked", "parking", "activating", "migrating", "quarantined"), 5),
    ],
)
def test_frozen_engines_refuse_the_uninstall(states: tuple[str, ...], held: int) -> None:
    assert len(look(*(row(f"p{n}", state) for n, state in enumerate(states))).held) == held


def test_what_is_parked_without_an_engine_is_not_frozen() -> None:
    assert not look({**row("p", "parked"), "cold": True}).held


def test_pods_that_are_over_or_request_no_seat_are_ignored() -> None:
    every = [pod("over", phase="Succeeded"), pod("plain", limits={"nvidia.com/gpu": "1"}), pod("own", limits={})]
    assert owners(every, ["kyb.ai/"]) == ()
    assert [one.name for one in owners(every, ["nvidia.com/"], ["u-own"])] == ["own", "plain"]


@dataclass
class World:
    """An API server, a router and a manager on one port."""

    pods: list[dict[str, Any]] = field(default_factory=list)
    seats: list[dict[str, Any]] = field(default_factory=list)
    router: bool = True
    manager: bool = True
    late: int = 0
    """The manager answers only after this many requests."""
    why: dict[str, Any] = field(default_factory=dict)
    """The manager's explanation."""
    forbidden: bool = False

    async def list(self, request: web.Request) -> web.Response:
        if self.forbidden:
            return web.json_response({}, status=403)
        at = int(request.query.get("continue", 0))  # one pod per page
        more = {"continue": str(at + 1)} if at + 1 < len(self.pods) else {}
        return web.json_response({"items": self.pods[at : at + 1], "metadata": more})

    async def reasons(self, _: web.Request) -> web.Response:
        return web.json_response(self.why if self.manager else {}, status=200 if self.manager else 503)

    async def roster(self, _: web.Request) -> web.Response:
        if not self.router:
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"seats": self.seats})

    async def pod(self, request: web.Request) -> web.Response:
        found = [one for one in self.seats if one["pod_uid"] == request.match_info["uid"]]
        self.late -= 1
        answers = found and self.manager and self.late < 0
        return web.json_response(found[0]) if answers else web.json_response({}, status=503)


@pytest.fixture
def world() -> World:
    return World([pod("a"), pod("b"), pod("c")], [row("a", "active"), row("b", "parked"), row("c", "parked", "G1")])


@pytest.fixture
async def cluster(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr(uninstall, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(uninstall, "UNSURE_SECONDS", 0.05)
    app = web.Application()
    app.add_routes(
        [
            web.get("/api/v1/pods", world.list),
            web.get("/v1/seats", world.roster),
            web.get("/v1/pods/{uid}", world.pod),
            web.get("/v1/why", world.reasons),
        ]
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(HttpServer(app, "127.0.0.1", 0))
        kube = Kube(server.url, tmp_path)
        stack.push_async_callback(kube.close)
        yield Cluster(kube, server.url, server.port, ("kyb.ai/",))


@pytest.mark.parametrize("router", [True, False])
async def test_parked_seats_refuse_the_uninstall_known_from_router_or_manager(
    cluster: Cluster, world: World, router: bool
) -> None:
    world.router = router
    why = refusal(await cluster.look())
    assert "2 pods" in why
    assert "demo/b (its seat is parked), demo/c (its seat is parked)" in why
    assert "scale their Deployments to 0" in why
    assert "\n       helm rollback RELEASE" in why
    world.pods = world.pods[:1]
    assert refusal(await cluster.look()) == ""  # the pods of the parked seats are gone


async def test_without_any_answer_the_error_says_how_to_go_on(cluster: Cluster, world: World) -> None:
    world.router = world.manager = False
    why = refusal(await cluster.look())
    assert "demo/a (its seat's state is unknown)" in why
    assert "no key" in why
    assert "helm uninstall --no-hooks" in why
    world.forbidden = True
    with pytest.raises(CliError, match=r"(?s)HTTP 403.*--no-hooks"):
        await cluster.look()
    world.forbidden, world.pods = False, []
    assert refusal(await cluster.look()) == ""


async def test_a_manager_that_has_just_started_is_queried_again(cluster: Cluster, world: World) -> None:
    world.router, world.late, uninstall.UNSURE_SECONDS = False, 5, 30.0
    assert "its seat is parked" in refusal(await sure_look(cluster))


def explained(written: int, peers: tuple[str, ...] = ("G1",), *, cold: bool = False) -> dict[str, Any]:
    """The explanation of a manager with one parked seat."""
    seat = {"seat": "s0", "model": "m0", "state": "parked", "cold": cold}
    return {"node": "n", "ledger_format": written, "groups": [{"group": "G0", "peers": list(peers), "seats": [seat]}]}


NEWER = LEDGER_FORMAT + 1


@pytest.mark.parametrize(
    ("why", "stopped"),
    [
        pytest.param(explained(LEDGER_FORMAT), "", id="all are known"),
        pytest.param(explained(NEWER), f"is in a ledger of format {NEWER}, of which", id="newer"),
        pytest.param(explained(NEWER, peers=()), "", id="newer, without pools"),
        pytest.param(explained(NEWER, cold=True), "", id="newer, parked without a process"),
    ],
)
async def test_a_rollback_is_refused_while_it_would_stop_seats(
    cluster: Cluster, world: World, why: dict[str, Any], stopped: str
) -> None:
    world.why = why
    if not stopped:
        assert check_rollback(await cluster.managers()) == "this release can go on with the seats of 1 node(s)"
        return
    with pytest.raises(CliError) as refused:
        check_rollback(await cluster.managers())
    assert str(refused.value).count(stopped) == 1
    assert "\n       helm rollback --no-hooks" in str(refused.value)


async def test_a_manager_that_does_not_answer_refuses_no_rollback(cluster: Cluster, world: World) -> None:
    world.manager = False
    assert "not known, since no manager answers: 127.0.0.1" in check_rollback(await cluster.managers())
    world.forbidden = True
    with pytest.raises(CliError, match=r"(?s)HTTP 403.*helm rollback --no-hooks"):
        await cluster.managers()
