"""``GET /v1/seats`` of a large cluster: whole nodes, a page at a time, filtered."""

import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from kybernate.cli.console import Console
from kybernate.levels import Loads
from kybernate.messages import SeatClosed
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState
from services.console.core.cluster import Cluster
from services.console.core.overview import SeatNameError, SeatQuery, overview, resolve

ROWS = [
    SeatRecord(node=f"n{node:02}", seat=f"s{node:02}-{number}", state=state, model=f"m{number}", group="G0")
    for node in range(30)
    for number, state in enumerate((SeatState.ACTIVE, SeatState.PARKED))
]


def all_rows() -> Cluster:
    cluster = Cluster()
    for row in ROWS:
        cluster.seats.put(row.key, row)
    return cluster


def page(**query: Any) -> dict[str, Any]:
    return read(all_rows(), query=SeatQuery(**query))


def read(cluster: Cluster, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(overview(cluster, 0.0, **more)))
    return body


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
    cluster = all_rows()
    first, second = list(cluster.seats.nodes["n07"])
    cluster.seats.drop(first)
    assert [seat["seat"] for seat in read(cluster)["seats"] if seat["node"] == "n07"] == ["s07-1"]
    cluster.seats.drop(second)
    assert "n07" not in [node["node"] for node in read(cluster)["nodes"]]


def test_the_command_line_reads_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(_: Console, verb: str, path: str) -> dict[str, Any]:
        return page(limit=7, after=path.partition("after=")[2])

    monkeypatch.setattr(Console, "_call", call)
    body = Console("http://router").seats()
    assert [seat["seat"] for seat in body["seats"]] == [row.seat for row in ROWS]
    assert [(model["model"], len(model["seats"])) for model in body["models"]] == [("m0", 30), ("m1", 30)]
    assert len(body["nodes"]) == 30


def test_a_command_reaches_the_replicas_of_a_model_on_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(_: Console, verb: str, path: str) -> dict[str, Any]:
        if verb == "POST":
            return {"path": path}
        return page(limit=7, **dict(parse_qsl(urlsplit(path).query)))

    monkeypatch.setattr(Console, "_call", call)
    done = Console("http://router").commands("model/m1", "park")
    assert [one["path"] for one in done] == [f"/v1/seats/seat/{row.seat}/park" for row in ROWS if row.model == "m1"]


def test_an_error_lists_twenty_names_at_most() -> None:
    many = [row.model_copy(update={"model": f"m-{number}"}) for number, row in enumerate(ROWS)]
    with pytest.raises(SeatNameError, match=f"and {len(ROWS) - 20} more") as caught:
        resolve("nothing", many)
    assert str(caught.value).count("m-") == 20
    with pytest.raises(SeatNameError, match="and 10 more"):
        resolve("model/m1", ROWS)


def test_a_page_looks_at_its_own_seats_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def selects(_: SeatQuery, __: SeatRecord) -> bool:
        nonlocal looked_at
        looked_at += 1
        return True

    cluster = all_rows()
    monkeypatch.setattr(SeatQuery, "selects", selects)
    dumped, asked = list[str](), list[str | None]()
    dump, of = SeatRecord.model_dump, Loads.of
    monkeypatch.setattr(SeatRecord, "model_dump", lambda self, **how: dumped.append(self.seat) or dump(self, **how))
    monkeypatch.setattr(Loads, "of", lambda self, *a, **more: asked.append(a[1]) or of(self, *a, **more))
    body = overview(cluster, 0.0, SeatQuery(after="n10", limit=4))
    assert dumped == ["s11-0", "s11-1", "s12-0", "s12-1"]
    assert looked_at == 6, "and the next node's, to know that there is one"
    assert [seat for seat in asked if seat] == dumped
    assert len(asked) == 6, "a sum for each seat and each model"
    assert len(body["seats"]) == 4


def test_rows_that_were_replaced_or_dropped_are_noted() -> None:
    seats, row = all_rows().seats, ROWS[7]
    seats.take()
    seats.put(row.key, row.model_copy(update={"pinned": True}))
    seats.drop(ROWS[9].key)
    assert seats.take() == {row.key, ROWS[9].key}
    assert seats.take() == set()


def test_a_seat_belongs_to_the_model_of_its_last_row() -> None:
    seats, row = all_rows().seats, ROWS[0]
    seats.put(row.key, row.model_copy(update={"model": "other"}))
    assert [one.key for one in seats.of_model("other")] == [row.key]
    assert row.key not in {one.key for one in seats.of_model("m0")}
    seats.put(row.key, row.model_copy(update={"model": "other", "state": SeatState.FREE}))
    assert "other" not in seats.models


def test_an_event_changes_a_row_before_the_roster_does_and_an_older_row_does_not_undo_it() -> None:
    seats, row = all_rows().seats, ROWS[0].model_copy(update={"epoch": 3, "seq": 1})
    seats.read(row.key, row)
    fields = {"cause": "c", "node": row.node, "seat": row.seat, "epoch": 3, "state": SeatState.DRAINING}
    seats.take_event(SeatClosed.model_validate(fields | {"seq": 3}))
    seats.read(row.key, row.model_copy(update={"seq": 2}))
    assert seats.rows[row.key].state is SeatState.DRAINING
    seats.take_event(SeatClosed.model_validate(fields | {"seq": 1, "state": SeatState.ACTIVE}))
    assert seats.rows[row.key].state is SeatState.DRAINING, "an older event changes nothing"
    seats.take_event(SeatClosed.model_validate(fields | {"seq": 9, "group": "G1", "state": SeatState.ACTIVE}))
    assert seats.rows[row.key].group == "G0", "only the roster names the GPUs of another group"
    lost = row.model_copy(update={"epoch": 1, "state": SeatState.LOST})
    seats.read(row.key, lost)
    assert seats.rows[row.key].state is SeatState.LOST, "a manager without its ledger begins at lower epochs"
