"""``kyb events --since``, ``kyb why --last-switch``, ``kyb why request`` and ``kyb report usage``."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kybernate.clock import Clock
from kybernate.http.server import HttpServer
from kybernate.messages import GroupDecided, SeatActivated, SeatEvent, SeatParked, SeatStarted
from kybernate.seat import SeatState
from services.router.core.tenants import Used
from services.router.metrics import Metrics
from tests.cli.conftest import DECIDED

if TYPE_CHECKING:
    from tests.cli.conftest import SmallRouter
    from tests.command import Kyb


async def test_stored_events_and_decisions_of_a_model_are_shown(kyb: "Kyb", router: "SmallRouter") -> None:
    shown = await kyb("events", "--since", "10m", "--model", "gemma-3-27b", "--url", router.url)
    assert shown.code == 0, shown.err
    activated, switch = shown.out.splitlines()
    assert "activated" in activated
    assert "switch" in switch
    assert "gemma-3-27b in the place of qwen3-32b" in switch
    assert switch.endswith("0.7 > 0.2")
    [line] = (
        await kyb("events", "--since", "7d", "--kind", "switch", "-o", "json", "--url", router.url)
    ).out.splitlines()
    assert json.loads(line)["op"] == "G0-7"
    for argv, remedy in (
        (("events", "--since", "yesterday"), "10m"),
        (("events", "--since", "8d"), "7d at most"),
        (("why", "request"), "why request ID"),
        (("why", "G0", "qwen3-32b"), "one group"),
    ):
        wrong = await kyb(*argv, "--url", router.url)
        assert (wrong.code, remedy in wrong.err) == (2, True), argv
    none = await kyb("events", "--since", "10m", "--model", "gema", "--url", router.url)
    assert (none.code, none.out, "nothing of the last 10m fits" in none.err) == (0, "", True)


async def test_a_kind_that_does_not_exist_is_refused_before_anything_is_followed(
    kyb: "Kyb", router: "SmallRouter"
) -> None:
    wrong = await kyb("events", "-f", "--kind", "swich", "--url", router.url)
    assert (wrong.code, "kind: 'swich'" in wrong.err) == (2, True)


async def test_live_events_of_a_kind_need_no_history(kyb: "Kyb", router: "SmallRouter") -> None:
    router.history_unavailable = True
    live = await kyb("events", "--kind", "parked", "-o", "json", "--url", router.url)
    assert json.loads(live.out)["state"] == "parked", live.err


async def test_following_goes_on_after_the_last_stored_event_that_was_shown(kyb: "Kyb", router: "SmallRouter") -> None:
    shown = await kyb("events", "--since", "10m", "--kind", "parked", "-o", "json", "--url", router.url)
    assert shown.out == ""
    live = await kyb("events", "--kind", "parked", "-o", "json", "--url", router.url)
    assert json.loads(live.out)["state"] == "parked"
    live = await kyb("events", "--model", "gemma-3-27b", "-o", "json", "--url", router.url)
    assert live.out == ""  # the one live event is about another model


async def test_the_last_switch_of_a_model_has_its_reason_its_numbers_and_its_seconds(
    kyb: "Kyb", router: "SmallRouter"
) -> None:
    text = (await kyb("why", "model/gemma-3-27b", "--last-switch", "--url", router.url)).out
    for part in ("0.7 > 0.2", "3 waiting (oldest 8.2 s)", "took: park 1.250 s"):
        assert part in text
    body = json.loads((await kyb("why", "gemma-3-27b", "--last-switch", "-o", "json", "--url", router.url)).out)
    assert (body["decision"]["op"], body["seconds"]) == ("G0-7", {"park": 1.25})
    none = await kyb("why", "--last-switch", "--url", router.url)
    assert (none.code, "name a model" in none.err) == (2, True)


def later(kind: type[SeatEvent], state: SeatState, at: float, seat: str = "moved", **more: Any) -> SeatEvent:
    return kind(
        cause="c", at=at, node="laptop", seat=seat, model="gemma-3-27b", state=state, group="G1", epoch=9, **more
    )


@pytest.mark.parametrize("name", ["gemma-3-27b", "group/G1"])
async def test_a_start_on_another_group_after_the_last_switch_is_the_last_one(
    kyb: "Kyb", router: "SmallRouter", name: str
) -> None:
    at = DECIDED.at + 60.0
    start = GroupDecided(
        cause="c", at=at, node="laptop", group="G1", decision="start", model="gemma-3-27b", incoming="moved",
        reason="G0 is full; G1 is free",
    )  # fmt: skip
    story = [
        later(SeatStarted, SeatState.STARTING, at + 0.1),
        later(SeatActivated, SeatState.ACTIVE, at + 40.0, seconds={"start": 39.5}),
    ]
    others = [
        later(SeatActivated, SeatState.ACTIVE, at - 0.5),
        later(SeatActivated, SeatState.ACTIVE, at + 1.0, "replica"),
        later(SeatParked, SeatState.PARKED, at + 90.0),
    ]
    router.past += sorted([start, *story, *others], key=lambda event: event.at)
    text = (await kyb("why", name, "--last-switch", "--url", router.url)).out
    assert "G0 is full; G1 is free" in text
    assert text.splitlines()[-1] == "  took: start 39.500 s"
    body = json.loads((await kyb("why", name, "--last-switch", "-o", "json", "--url", router.url)).out)
    assert body["decision"]["group"] == "G1"
    assert [event["id"] for event in body["events"]] == [start.id, *(event.id for event in story)]
    earlier = await kyb("why", "group/G0", "--last-switch", "-o", "json", "--url", router.url)
    assert json.loads(earlier.out)["decision"]["op"] == "G0-7"


async def test_the_story_of_one_request_is_shown_in_steps(kyb: "Kyb", router: "SmallRouter") -> None:
    lines = (await kyb("why", "request", "req/7", "--url", router.url)).out.splitlines()
    assert lines[0] == "request req/7 for gemma-3-27b, by router router-0"
    assert lines[2].split(maxsplit=2)[2] == "decided: switch gemma-3-27b in the place of qwen3-32b; 0.7 > 0.2"
    assert lines[4].split() == ["3.500", "s", "ended", "with", "200"]
    assert lines[5].strip() == "hold 2.500 s, drain 0.400 s"
    missing = await kyb("why", "request", "x", "--url", router.url)
    assert (missing.code, "no record" in missing.err) == (1, True)


@asynccontextmanager
async def counting(used: dict[tuple[str, str], Used] | None, status: int = 200) -> AsyncIterator[str]:
    """The operations port of a router on which tenants have used this; None: it does not show that."""
    registry = CollectorRegistry()
    table: Any = SimpleNamespace(upstreams={}, models={})
    rest: Any = SimpleNamespace(connected=True, total=0, open=0, dropped=0)
    tenants: Any = None if used is None else SimpleNamespace(used=used)
    Metrics(registry, Clock(), rest, table, rest, rest, rest, tenants)
    Gauge("process_start_time_seconds", "", registry=registry).set(1.7e9)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), status=status)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    async with HttpServer(app, "127.0.0.1", 0) as server:
        yield server.url


async def test_usage_is_summed_over_routers_by_tenant_and_model(kyb: "Kyb") -> None:
    red, blue = {("red", "llama"): Used(3, 20, 40)}, {("red", "llama"): Used(1, 5, 6), ("blue", "phi"): Used(1, 2, 3)}
    async with counting(red) as one, counting(blue) as other:
        shown = await kyb("report", "usage", one, other)
        assert shown.out.splitlines()[1:] == [
            "blue  phi: 1 request, 2 + 3 tokens", "red  llama: 4 requests, 25 + 46 tokens"
        ]  # fmt: skip
        body = json.loads((await kyb("report", "usage", one, "-o", "json")).out)
        row = {"tenant": "red", "model": "llama", "requests": 3, "prompt_tokens": 20, "completion_tokens": 40}
        assert body == {"since": 1.7e9, "usage": [row]}
    async with counting({}) as none:
        shown = await kyb("report", "usage", none)
        assert shown.out.splitlines()[1:] == ["nothing: only requests with an API key count (docs/security.md#tenants)"]


async def test_what_one_router_does_not_tell_is_no_zero(kyb: "Kyb") -> None:
    async with (
        counting({("red", "llama"): Used(3, 20, 40)}) as good,
        counting(None) as hidden,
        counting({}, 401) as shut,
    ):
        for other, why in (
            (shut, "cannot be read: HTTP Error 401: Unauthorized"),
            (hidden, "name a router's operations port (KYB_HEALTH_PORT)"),
            ("http://127.0.0.1:1", "cannot be read: [Errno 111] Connection refused"),
        ):
            result = await kyb("report", "usage", good, other)
            assert (result.code, result.out) == (1, ""), other
            assert f"{other}/metrics" in result.err
            assert why in result.err
    nothing = await kyb("report", "usage")
    assert (nothing.code, "no stack runs on this machine" in nothing.err) == (1, True)
