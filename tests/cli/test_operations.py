"""``kyb migrate``, ``kyb drain`` and ``kyb resume`` against a router whose answers are written down."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kybernate.cli import operations
from kybernate.cli.show import LONGEST_NAME, open_console, seat_tree
from kybernate.http.server import HttpServer
from kybernate.messages import OrderStatus

if TYPE_CHECKING:
    from tests.command import Kyb


def answer(text: str = "", outcome: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    order = OrderStatus(**{"verb": "drain", "target": "G0", "text": text, "outcome": outcome, **more})
    return 202, {"accepted": True, "node": "n1", "group": "G0", "operation": order.model_dump()}


def shows(text: str = "", outcome: str = "", **more: Any) -> tuple[int, dict[str, Any]]:
    """What ``GET /v1/why`` says."""
    order = answer(text, outcome, **more)[1]["operation"]
    return 200, {"nodes": [{"node": "n1", "operations": [order], "groups": []}]}


def refusal(status: int, code: str, text: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": text, "type": "error", "code": code}}


@dataclass
class OrderRouter:
    """Gives its answers in order, the last one again and again; keeps what was ordered."""

    url: str = ""
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.asked.append((request.path, await request.json()))
        else:
            assert request.path_qs == "/v1/why?node=n1"
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(body, status=status)


@pytest.fixture
async def orders(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OrderRouter]:
    monkeypatch.setattr(operations, "POLL_SECONDS", 0.01)
    router, app = OrderRouter(), web.Application()
    app.router.add_route("*", "/{path:.+}", router.handle)
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
    orders.answers = [answer("b is to be parked")]
    assert (await kyb(*words, "--url", orders.url)).code == 0
    assert orders.asked == [(path, fields)]


async def test_waiting_prints_what_it_waits_for_once_and_goes_on_over_restarts(kyb: "Kyb", orders: OrderRouter) -> None:
    draining = shows("router-0 has 2 in flight")
    away, unanswered = refusal(503, "unreachable", "no console"), (200, {"nodes": [{"node": "n1", "unanswered": "no"}]})
    forgot = 200, {"nodes": list[Any]()}
    orders.answers = [answer("b is to be parked"), draining, draining, away, forgot, unanswered,
                      shows("b is parking"), shows("no seat holds it", "done")]  # fmt: skip
    result = await kyb("drain", "group", "G0", "--wait", "--url", orders.url)
    assert result.code == 0, result.err
    assert result.out.splitlines() == [
        "drain G0: b is to be parked",
        "drain G0: router-0 has 2 in flight",
        "drain G0: b is parking",
        "drain G0: no seat holds it",
    ]
    assert len(orders.asked) == 1


async def test_waiting_as_json_has_a_line_per_change(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [answer("2 in flight"), shows("2 in flight"), shows("no seat holds it", "done")]
    result = await kyb("drain", "group", "G0", "--wait", "-o", "json", "--url", orders.url)
    assert [json.loads(line)["operation"]["outcome"] for line in result.out.splitlines()] == ["", "done"]


MOVE = {"verb": "migrate", "target": "s0", "to": "G1", "model": "qwen"}


async def test_a_move_that_fails_ends_with_code_1_and_its_reason(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [answer("it drains", **MOVE), shows("the pod is gone", "failed", **MOVE)]
    result = await kyb("migrate", "qwen", "--to", "G1", "--wait", "--url", orders.url)
    assert result.code == 1
    assert "failed: the pod is gone" in result.err


def without_orders(group: str, state: str) -> tuple[int, dict[str, Any]]:
    groups = [{"group": group, "seats": [{"seat": "s0", "state": state}]}]
    return 200, {"nodes": [{"node": "n1", "operations": [], "groups": groups}]}


@pytest.mark.parametrize(("on", "code"), [("G1", 0), ("G0", 1)])
async def test_a_move_that_is_not_listed_any_more_is_over_or_was_taken_back(
    kyb: "Kyb", orders: OrderRouter, on: str, code: int
) -> None:
    coming = without_orders("G1", "migrating")
    orders.answers = [answer("it drains", **MOVE), coming, coming, without_orders(on, "parked")]
    result = await kyb("migrate", "qwen", "--to", "G1", "--wait", "--url", orders.url)
    assert result.code == code
    assert ("migrate qwen was taken back" in result.err) is bool(code)
    assert ("migrate qwen: qwen is parked on group G1" in result.out) is not bool(code)


async def test_waiting_ends_after_its_time_and_says_how_to_look(
    kyb: "Kyb", orders: OrderRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.answers = [answer("it drains")]
    monkeypatch.setattr(operations, "WAIT_SECONDS", 0.0)
    result = await kyb("drain", "group", "G0", "--wait", "--url", orders.url)
    assert result.code == 1
    assert "it goes on: kyb why shows it" in result.err


async def test_a_refusal_is_told_with_its_reason(kyb: "Kyb", orders: OrderRouter) -> None:
    orders.answers = [refusal(409, "pinned", "pinned qwen would stay")]
    refused = await kyb("drain", "node", "n1", "--wait", "--url", orders.url)
    assert refused.code == 1
    assert "pinned qwen would stay" in refused.err


def test_status_shows_a_drained_group_also_without_pods() -> None:
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


def test_status_names_the_gpus_of_each_node() -> None:
    rows = [
        {"seat": f"s{node}", "state": "active", "group": "G0", "gpus": [0], "node": node, "model": "m"} for node in "ab"
    ]
    made_up, real = {"name": "Fake GPU", "healthy": True}, {"name": "NVIDIA L40S", "healthy": True}
    console = open_console()
    with console.capture() as shown:
        console.print(
            seat_tree(rows, nodes=[{"node": "a", "gpus": [made_up] * 2}, {"node": "b", "gpus": [real]}], now=0.0)
        )
    assert {"a  2 × Fake GPU", "b  1 × NVIDIA L40S"} <= {line.strip() for line in shown.get().splitlines()}


def test_status_names_the_namespace_of_a_pod() -> None:
    """Two namespaces may have pods of one model."""
    row = {"seat": "s00", "state": "active", "group": "G0", "node": "n", "model": "m"}
    rows = [{**row, "pod": "llms/a"}, {**row, "seat": "s01", "pod": "default/b"}]
    console = open_console()
    with console.capture() as shown:
        console.print(seat_tree(rows, now=0.0))
    lines = shown.get().splitlines()
    assert [line.split("s0")[1].split() for line in lines[-2:]] == [["0", "llms"], ["1"]]


def test_a_long_name_of_a_model_is_cut_in_status_and_widens_no_other_row() -> None:
    row = {"state": "active", "group": "G0", "node": "n"}
    rows = [{**row, "seat": "s00", "model": "m" * LONGEST_NAME}, {**row, "seat": "s01", "model": "n" * 512}]
    console = open_console()
    with console.capture() as shown:
        console.print(seat_tree(rows, now=0.0))
    names = [line.split()[-4] for line in shown.get().splitlines()[-2:]]
    assert names == ["m" * LONGEST_NAME, f"{'n' * (LONGEST_NAME - 1)}…"]
