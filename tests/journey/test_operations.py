"""Operators drain groups of a running stack, with the command line."""

import json

from tests.journey.conftest import Up
from tests.journey.seats import active, calm, complete, held, parked, typed, until_seats


async def test_a_group_is_drained_and_resumed_while_requests_go_on(up: Up) -> None:
    found = await held(up, "G1")
    holder, other = active(found, "G1"), parked(found, "G1")
    drained = await typed(up, "drain", "group", "G1", "--for", "upgrade", "--wait")

    try:
        assert drained.returncode == 0, drained.stderr
        assert "no seat holds a GPU of group G1" in drained.stdout
        assert holder in drained.stdout
        again = await typed(up, "drain", "group", "G1", "--for", "upgrade", "-o", "json")
        assert json.loads(again.stdout)["operation"]["outcome"] == "done"
        status, text, _ = await complete(up.url, other)
        assert status == 503
        assert "group G1 is drained for upgrade" in text
        assert "kyb resume group G1" in text
        assert "is drained for upgrade" in (await typed(up, "status")).stdout
        why = json.loads((await typed(up, "why", "G1", "-o", "json")).stdout)
        stages = [seat["stage"]["stage"] for node in why["nodes"] for one in node["groups"] for seat in one["seats"]]
        assert stages
        assert {*stages} == {"drained"}
        assert "drain G1 by operator: done: no seat holds a GPU" in (await typed(up, "why", "G1")).stdout
        refused = await typed(up, "pin", f"model/{other}")
        assert refused.returncode == 1
        assert "is drained for upgrade" in refused.stderr
    finally:
        resumed = await typed(up, "resume", "group", "G1", "--wait")
    assert resumed.returncode == 0, resumed.stderr

    await until_seats(
        up.console, lambda now: not any(seat["drained"] for seat in now.values()), what="nothing is drained"
    )
    status, text, _ = await complete(up.url, other)
    assert status == 200, text


async def test_what_cannot_be_done_is_named(up: Up) -> None:
    model = parked(await calm(up.console), "G0")
    for words, text in (
        (("migrate", model, "--to", "G1"), "has rebalance: false"),
        (("drain", "node", "nowhere"), "no node is called 'nowhere'; known: laptop"),
    ):
        refused = await typed(up, *words)
        assert refused.returncode == 1, refused.stdout
        assert text in refused.stderr, refused.stderr
