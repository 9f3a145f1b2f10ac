"""``GET /v1/seats`` of a large cluster: whole nodes, a page at a time, filtered."""

from typing import Any

import pytest

from kybernate.cli.router import Router
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.router.core.reports import Loads, SeatNameError, SeatQuery, overview, resolve
from services.router.core.upstreams import UpstreamTable

ROWS = [
    SeatRecord(node=f"n{node:02}", seat=f"s{node:02}-{number}", state=state, model=f"m{number}", group="G0")
    for node in range(30)
    for number, state in enumerate((SeatState.ACTIVE, SeatState.PARKED))
]


def all_rows() -> UpstreamTable:
    table = UpstreamTable()
    for row in ROWS:
        table.apply_record(row)
    return table


def page(**query: Any) -> dict[str, Any]:
    return overview(all_rows(), Loads(), 0.0, (), SeatQuery(**query))


def test_pages_have_whole_nodes_and_name_the_next_one() -> None:
    first = page(limit=3)
    assert [node["node"] for node in first["nodes"]] == ["n00", "n01"]
    assert (len(first["seats"]), first["next"]) == (4, "n01")
    last = page(limit=50, after="n27")
    assert [node["node"] for node in last["nodes"]] == ["n28", "n29"]
    assert "next" not in last


def test_filters_select_seats_on_all_pages() -> None:
    found = page(model="m1", state="parked", limit=20)
    assert {seat["model"] for seat in found["seats"]} == {"m1"}
    assert (len(found["seats"]), found["next"]) == (20, "n19")
    assert [seat["seat"] for seat in page(node="n07")["seats"]] == ["s07-0", "s07-1"]
    assert page(state="lost")["nodes"] == []


def test_a_node_whose_last_seat_is_dropped_is_on_no_page() -> None:
    table = all_rows()
    first, second = (seat for seat in table.upstreams.values() if seat.record.node == "n07")
    table.drop(first)
    assert [seat["seat"] for seat in overview(table, Loads(), 0.0)["seats"] if seat["node"] == "n07"] == ["s07-1"]
    table.drop(second)
    assert "n07" not in [node["node"] for node in overview(table, Loads(), 0.0)["nodes"]]


def test_the_command_line_reads_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(_: Router, verb: str, path: str) -> dict[str, Any]:
        return page(limit=7, after=path.partition("after=")[2])

    monkeypatch.setattr(Router, "_call", call)
    body = Router("http://router").seats()
    assert [seat["seat"] for seat in body["seats"]] == [row.seat for row in ROWS]
    assert [(model["model"], len(model["seats"])) for model in body["models"]] == [("m0", 30), ("m1", 30)]
    assert len(body["nodes"]) == 30


def test_an_error_lists_twenty_names_at_most() -> None:
    with pytest.raises(SeatNameError, match="and 42 more") as caught:
        resolve("nothing", ROWS)
    assert str(caught.value).count("s0") + str(caught.value).count("model/") < 25
    with pytest.raises(SeatNameError, match="and 10 more"):
        resolve("model/m1", ROWS)
