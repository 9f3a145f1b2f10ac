"""``kyb migrate``, ``kyb drain`` and ``kyb resume`` against a router whose answers are written down."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kybernate.cli import operations
from kybernate.cli.show import event_line, open_console, seat_tree
from kybernate.health import HttpServer
from kybernate.messages import OrderStatus

if TYPE_CHECKING:
    from conftest import Kyb


def answer(phase: str, text: str = "", outcome: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    order = OrderStatus(op="x", verb="drain", target="G0", phase=phase, text=text, outcome=outcome)  # type: ignore[arg-type]
    return 202, {"accepted": True, "op": "x", "operation": order.model_dump(), "dry_run": False, "plan": [], **more}


def refusal(status: int, code: str, text: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": text, "type": "error", "code": code}}


@dataclass
class OrderRouter:
    """Gives its answers in order, the last one again and again; keeps what was asked."""

    url: str = ""
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(body, status=status)


@pytest.fixture
async def orders(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OrderRouter]:
    monkeypatch.setattr(operations, "POLL_SECONDS", 0.01)
    router, app = OrderRouter(), web.Application()
    app.router.add_post("/{path:.+}", router.handle)
    async with HttpServer(app, "127.0.0.1", 0) as server:
        router.url = server.url
        yield router


@pytest.mark.parametrize(
    ("words", "path", "fields"),
    [
        (("drain", "group", "G0"), "/v1/groups/G0/drain", {"purpose": "maintenance"}),
        (("drain", "node", "gpu-7", "--for", "upgrade"), "/v1/nodes/gpu-7/drain", {"purpose": "upgrade"}),
        (("resume", "group", "n1/G0"), "/v1/groups/n1/G0/resume", {}),
        (("migrate", "model/qwen", "--to", "G1"), "/v1/seats/model/qwen/migrate", {"to": "G1"}),
    ],
)
async def test_what_is_asked(
    kyb: "Kyb", orders: OrderRouter, words: tuple[str, ...], path: str, fields: dict[str, str]
) -> None:
    orders.answers = [answer("queued")]
    assert (await kyb(*words, "--op", "x", "--url", orders.url)).code == 0
    assert orders.asked == [(path, {**fields, "op": "x", "dry_run": False})]


async def test_each_call_without_a_name_begins_another_operation(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [answer("queued")]
    for _ in range(2):
        await kyb("drain", "group", "G0", "--url", orders.url)
    first, second = (body["op"] for _, body in orders.asked)
    assert first != second


async def test_waiting_prints_each_phase_once_and_goes_on_over_a_restart_of_the_manager(
    kyb: "Kyb", orders: OrderRouter
) -> None:
    draining = answer("draining", "router-0 has 2 in flight")
    away = refusal(503, "manager_unanswered", "the manager did not answer")
    orders.answers = [answer("queued"), draining, draining, away, refusal(503, "not-ready", "just started"),
                      answer("parking"), answer("done", "no seat holds it", "done")]  # fmt: skip
    result = await kyb("drain", "group", "G0", "--op", "x", "--wait", "--url", orders.url)
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "drain x  queued",
        "drain x  draining  router-0 has 2 in flight",
        "drain x  parking",
        "drain x  done  no seat holds it",
    ]
    assert {body["op"] for _, body in orders.asked} == {"x"}


async def test_waiting_as_json_has_a_line_per_phase(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [answer("draining", "2 in flight"), answer("draining", "1 in flight"), answer("done", "", "done")]
    result = await kyb("drain", "group", "G0", "--wait", "-o", "json", "--url", orders.url)
    assert [json.loads(line)["operation"]["phase"] for line in result.out.splitlines()] == ["draining", "done"]


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
async def test_an_operation_that_fails_ends_with_code_1_and_its_reason(
    kyb: "Kyb", orders: OrderRouter, outcome: str
) -> None:
    orders.answers = [answer("queued"), answer(outcome, "the pod is gone", outcome)]
    result = await kyb("migrate", "qwen", "--to", "G1", "--wait", "--url", orders.url)
    assert result.code == 1
    assert f"{outcome}: the pod is gone" in result.err


async def test_waiting_ends_after_its_time_and_says_how_to_ask_again(
    kyb: "Kyb", orders: OrderRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.answers = [answer("draining")]
    monkeypatch.setattr(operations, "WAIT_SECONDS", 0.0)
    result = await kyb("drain", "group", "G0", "--op", "x", "--wait", "--url", orders.url)
    assert result.code == 1
    assert "it goes on: --op x asks again" in result.err


async def test_a_dry_run_prints_the_plan_and_a_refusal_the_reason(kyb: "Kyb", orders: OrderRouter) -> None:
    plan = ["no seat is started", "park qwen"]
    orders.answers = [(202, {"accepted": True, "op": "x", "operation": None, "dry_run": True, "plan": plan}),
                      refusal(409, "pinned", "pinned 1x-a.s00 would stay")]  # fmt: skip
    result = await kyb("drain", "node", "n1", "--dry-run", "--url", orders.url)
    assert (result.code, result.out.splitlines()) == (0, plan)
    assert orders.asked[0][1]["dry_run"] is True
    refused = await kyb("drain", "node", "n1", "--dry-run", "--wait", "--url", orders.url)
    assert refused.code == 1
    assert "pinned 1x-a.s00 would stay" in refused.err


async def test_a_final_refusal_while_waiting_ends_it(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [answer("queued"), refusal(409, "op-conflict", "operation x is another one")]
    result = await kyb("drain", "group", "G0", "--op", "x", "--wait", "--url", orders.url)
    assert result.code == 1
    assert "another one" in result.err


def test_status_shows_a_drained_group_also_without_pods_and_events_show_operations() -> None:
    drained = "node n1 is drained for upgrade by alice; it ends with: kyb resume node n1"
    rows = [
        {"node": "n1", "group": "G0", "seat": "s0", "state": "free", "gpus": [0], "drained": drained},
        {"node": "n1", "group": "G1", "seat": "s1", "state": "parked", "model": "qwen", "gpus": [1],
         "drained": drained, "blocked": drained},
    ]  # fmt: skip
    console = open_console()
    with console.capture() as captured:
        console.print(seat_tree(rows, now=0.0))
    lines = captured.get().splitlines()
    assert [line for line in lines if drained in line] == [line for line in lines if "G0" in line or "G1" in line]
    assert not any("s0" in line for line in lines)
    order = OrderStatus(op="op-1", verb="migrate", target="s1", to="G0", phase="failed", text="the pod is gone")
    event = {"type": "ai.kyb.v1.order-changed", "node": "n1", "op": "op-1", "at": 0, "order": order.model_dump()}
    assert event_line(event).plain.split("  ", 1)[1] == "migrate     s1 → G0  failed  op op-1  the pod is gone"


def test_status_names_the_namespace_of_a_pod() -> None:
    """Two namespaces may have pods of one model."""
    row = {"seat": "s00", "state": "active", "group": "G0", "node": "n", "model": "m"}
    rows = [{**row, "pod": "llms/a"}, {**row, "seat": "s01", "pod": "default/b"}]
    console = open_console()
    with console.capture() as shown:
        console.print(seat_tree(rows, now=0.0))
    lines = shown.get().splitlines()
    assert [line.split("s0")[1].split() for line in lines[-2:]] == [["0", "llms"], ["1"]]
