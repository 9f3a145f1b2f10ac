"""The past that the page shows: blocks of groups, waiting requests."""

import itertools
from typing import Any

from kybernate.messages import EVENT_OF_STATE, GroupDecided, SeatEvent, SeatPinned
from kybernate.roster import SeatRecord
from kybernate.seat import SeatState as S
from services.console.core import timeline
from services.console.core.timeline import Timeline, WaitingLines

_SEQS = itertools.count(1)


def event(seat: str, state: S, at: float, **fields: Any) -> SeatEvent:
    values = {"cause": "c", "node": "n1", "group": "G0", "model": f"model-{seat}", "epoch": 1, "seq": next(_SEQS)}
    return EVENT_OF_STATE[state](**(values | {"seat": seat, "state": state, "at": at} | fields))


def shown(line: Timeline, since: float = 0.0) -> list[tuple[str, str, float, float | None]]:
    return [(block.seat, str(block.state), block.since, block.until) for block in line.blocks(since)]


def test_a_switch_is_four_blocks_with_the_reason_of_its_operation():
    line = Timeline(0.0)
    line.add(event("a", S.ACTIVE, 10.0))
    line.add(event("a", S.DRAINING, 20.0, op="op1", reason="b waits"))
    line.add(event("a", S.PARKING, 21.0, op="op1"))
    line.add(event("a", S.PARKED, 23.0, op="op1"))
    line.add(event("b", S.ACTIVATING, 23.0, op="op1"))
    ended = {"op": "op1", "previous": S.ACTIVATING, "seconds": {"park": 2.0, "total": 5.0}}
    line.add(event("b", S.ACTIVE, 25.0, **ended))
    assert shown(line) == [
        ("a", "active", 10.0, 20.0),
        ("a", "draining", 20.0, 21.0),
        ("a", "parking", 21.0, 23.0),
        ("b", "activating", 23.0, 25.0),
        ("b", "active", 25.0, None),
    ]
    last = list(line.blocks(0.0))[-1].as_json()
    assert (last["reason"], last["seconds"], "until" in last) == ("b waits", {"park": 2.0, "total": 5.0}, False)
    assert (line.switches["model-b"].seconds, line.switches["model-b"].reason) == (5.0, "b waits")


def test_a_start_on_another_group_is_a_switch_and_one_at_home_is_none():
    line = Timeline(0.0)
    line.add(event("a", S.STARTING, 10.0, previous=S.WAITING))
    line.add(event("a", S.ACTIVE, 14.0, previous=S.STARTING))
    assert line.switches == {}
    moved = {"group": "G1", "way": "restart", "came_from": "G0"}
    line.add(event("b", S.STARTING, 20.0, previous=S.WAITING, reason="G1 has room", **moved))
    line.add(event("b", S.ACTIVE, 32.0, previous=S.STARTING, **moved))
    assert line.switches["model-b"][:3] == (32.0, 12.0, "G1 has room")


def test_a_seat_that_held_its_group_before_what_is_known_holds_it_from_the_begin():
    line = Timeline(5.0)
    line.add(event("a", S.DRAINING, 20.0, previous=S.ACTIVE))
    line.add(event("b", S.ACTIVATING, 30.0, previous=S.PARKED))
    assert shown(line) == [("a", "active", 5.0, 20.0), ("a", "draining", 20.0, None), ("b", "activating", 30.0, None)]


def test_a_seat_that_displaces_none_has_the_reason_of_the_decision():
    line = Timeline(0.0)
    line.add(GroupDecided(cause="c", node="n1", group="G0", decision="switch", op="op1", reason="the slot is free"))
    line.add(event("b", S.ACTIVATING, 23.0, op="op1"))
    assert next(line.blocks(0.0)).reason == "the slot is free"


def test_an_event_that_comes_twice_or_late_changes_nothing():
    line, events = Timeline(0.0), [event("a", S.ACTIVE, 10.0), event("a", S.DRAINING, 20.0)]
    for each in (*events, *events):
        line.add(each)
    assert shown(line) == [("a", "active", 10.0, 20.0), ("a", "draining", 20.0, None)]


def test_a_pinned_seat_keeps_its_block():
    line = Timeline(0.0)
    line.add(event("a", S.ACTIVE, 10.0))
    line.add(SeatPinned(cause="c", node="n1", seat="a", group="G0", state=S.ACTIVE, at=12.0, epoch=1, seq=next(_SEQS)))
    assert shown(line) == [("a", "active", 10.0, None)]


def test_a_seat_that_moves_ends_its_block_on_the_old_group():
    line = Timeline(0.0)
    line.add(event("a", S.MIGRATING, 10.0, group="G1"))
    line.add(event("a", S.ACTIVE, 12.0, group="G1"))
    line.add(event("a", S.ACTIVE, 14.0, group="G2"))
    assert [(block.lane, block.until) for block in line.blocks(0.0)] == [
        ("n1/G1", 12.0),
        ("n1/G1", 14.0),
        ("n1/G2", None),
    ]


def test_a_releasing_seat_is_shown_only_if_it_held_gpus():
    line = Timeline(0.0)
    line.add(event("a", S.ACTIVE, 10.0))
    line.add(event("a", S.RELEASING, 11.0))
    line.add(event("b", S.PARKED, 10.0))
    line.add(event("b", S.RELEASING, 11.0))
    assert [block.seat for block in line.blocks(0.0)] == ["a", "a"]


def test_seats_without_events_are_taken_from_the_roster_once():
    line = Timeline(0.0)
    line.add(event("a", S.PARKED, 10.0))
    rows = [SeatRecord(node="n1", seat=name, state=S.ACTIVE, group="G0", since=5.0) for name in ("a", "b")]
    assert [line.adopt(row) for row in (*rows, *rows)] == [False, True, False, False]
    assert shown(line) == [("b", "active", 5.0, None)]


def test_blocks_that_ended_before_the_window_are_left_out():
    line = Timeline(0.0)
    for at, state in enumerate((S.ACTIVE, S.DRAINING, S.PARKING, S.PARKED)):
        line.add(event("a", state, float(at)))
    assert shown(line, since=2.5) == [("a", "parking", 2.0, 3.0)]


def test_a_full_timeline_says_since_when_it_is_complete(monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BLOCKS", 2)
    line = Timeline(0.0)
    for at, state in enumerate((S.ACTIVE, S.DRAINING, S.PARKING, S.PARKED), start=1):
        line.add(event("a", state, float(at)))
    assert line.full
    assert line.since == 2.0
    assert [block.state for block in line.blocks(0.0)] == [S.DRAINING, S.PARKING]


def test_waiting_lines_keep_changes_and_the_value_at_the_begin_of_the_window():
    lines = WaitingLines()
    assert lines.sample({"n1/G0": 2}, 1.0) == {"n1/G0": 2}
    assert lines.sample({"n1/G0": 2}, 2.0) == {}
    assert lines.sample({"n1/G0": 3}, 3.0) == {"n1/G0": 3}
    assert lines.sample({}, 4.0) == {"n1/G0": 0}
    assert dict(lines.lines(0.0)) == {"n1/G0": [(1.0, 2), (3.0, 3), (4.0, 0)]}
    assert dict(lines.lines(3.5)) == {"n1/G0": [(3.0, 3), (4.0, 0)]}
    assert dict(lines.lines(9.0)) == {"n1/G0": [(4.0, 0)]}
