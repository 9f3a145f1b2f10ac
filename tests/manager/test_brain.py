"""The live policy: failures, recording and replaying."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kybernate.lab.baselines import LongestQueue
from kybernate.lab.simulate.replay import RecordingError, main, replay
from kybernate.policy import Decision, GroupView, KybBalanced, Park, SeatView, Stay, Switch
from kybernate.policy.recording import encode, heading
from kybernate.seat import SeatState as S
from services.gpu_manager.live_policy import GuardedPolicy, ViewRecorder
from tests.manager.world import World


def seat(name: str, state: S = S.PARKED, **fields: object) -> SeatView:
    costs = {"park_seconds": 2.0, "activate_seconds": 3.0, "service_seconds": 5.0}
    return SeatView(name, state, "G0", **{**costs, **fields})  # type: ignore[arg-type]


def group(*seats: SeatView, now: float = 0.0) -> GroupView:
    return GroupView("G0", 1, seats, now=now)


IDLE = seat("i", S.ACTIVE, active_seconds=60.0, idle_seconds=9.0)
TWO = group(
    IDLE,
    seat("few", waiting=1, ages=((9.0, 1),), oldest_wait_seconds=9.0),
    seat("many", waiting=8, ages=((4.0, 1), (2.0, 7)), oldest_wait_seconds=4.0),
)


@dataclass(frozen=True)
class Says:
    """A policy that always says the same, or raises it."""

    answer: object

    def decide(self, view: GroupView) -> Decision:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


BAD = {
    "it raises": ZeroDivisionError("division by zero"),
    "an unknown seat arrives": Switch("who?", None, ""),
    "an unknown seat leaves": Switch("few", "who?", ""),
    "an unknown seat is parked": Park("who?", ""),
    "it comes itself": Switch("few", "few", ""),
    "no time": Stay(float("nan"), ""),
    "no decision": None,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_policy_that_fails_is_replaced_for_that_look(kind: str) -> None:
    brain = GuardedPolicy("mine", Says(BAD[kind]))

    decision = brain.decide(TWO)

    assert isinstance(decision, Switch)
    assert (decision.activate, decision.evict) == ("few", "i")
    assert "policy mine failed" in decision.reason
    assert brain.errors == 1
    assert "group G0" in brain.last_error


@pytest.mark.parametrize("answer", [Switch("few", "i", ""), Park("i", "")])
def test_a_policy_that_names_a_pinned_holder_is_replaced_for_that_look(answer: Decision) -> None:
    pinned = replace(TWO, seats=tuple(replace(seat, pinned=seat.seat == "i") for seat in TWO.seats))
    brain = GuardedPolicy("mine", Says(answer))

    assert isinstance(brain.decide(pinned), Stay)
    assert "pinned" in brain.last_error


def test_where_the_plain_rule_fails_too_nothing_is_done_for_a_moment() -> None:
    brain = GuardedPolicy("mine", Says(KeyError("x")), Says(KeyError("y")))

    assert brain.decide(TWO) == Stay(1.0, brain.decide(TWO).reason)


def test_a_node_goes_on_with_a_policy_that_always_fails() -> None:
    brain = GuardedPolicy("broken", Says(RuntimeError("no")))
    world = World(policy=brain)
    world.boot()
    seats = world.fill("a", "b")

    world.tick(10)
    world.traffic(seats[0], waiting=1)
    world.finish()

    assert world.state(seats[0]) is S.ACTIVE
    assert brain.errors
    assert "policy broken failed" in world.node.groups["G0"].why


# --- recording ----------------------------------------------------------------------------------------------------


def test_what_a_board_decided_is_decided_again(tmp_path: Path) -> None:
    file = tmp_path / "views" / "n1.jsonl"
    recorder = ViewRecorder(file, "kyb-balanced", {"min_visit_seconds": 3.0}, "n1")
    world = World(policy=GuardedPolicy("kyb-balanced", KybBalanced(min_visit_seconds=3.0), recorder=recorder))
    world.boot()
    seats = world.fill("a", "b", "c")
    for number in range(40):
        seat = seats[number * 7 % 3]
        world.traffic(seat, waiting=number % 3, in_flight=number % 2, oldest=number / 3)
        world.tick(1.0)
        world.finish()
    recorder.close()

    result = replay(file.read_text().splitlines())

    assert result.policies == ["kyb-balanced"]
    assert (result.share, result.different) == (1.0, [])
    assert result.looks == recorder.written > 50
    assert replay(file.read_text().splitlines(), Says(Stay(None, ""))).share < 1.0
    assert main([str(file)]) == 0
    assert main(["--policy", "longest-queue", str(file)]) == 1, "the difference to another policy"


def test_failures_replay_as_failures(tmp_path: Path) -> None:
    recorder = ViewRecorder(tmp_path / "r", "longest-queue", {})
    wrong = GuardedPolicy("longest-queue", Says(Switch("who?", None, "")), recorder=recorder)
    wrong.decide(TWO)
    recorder.close()

    lines = (tmp_path / "r").read_text().splitlines()
    assert replay(lines, wrong.live).share == 1.0
    assert replay(lines).share == 0.0
    assert main([str(tmp_path / "r")]) == 1


def test_a_recording_has_a_largest_size_and_each_file_can_be_replayed(tmp_path: Path) -> None:
    policy = LongestQueue()
    for number in range(4):  # a manager that begins again, the later times with a file that is full
        recorder = ViewRecorder(tmp_path / "r", "longest-queue", {}, most_bytes=2000)
        for look in range(10):
            recorder.observe(replace(TWO, now=float(10 * number + look)), policy.decide(TWO))
        recorder.close()

    assert {part.name for part in tmp_path.iterdir()} == {"r", "r.1"}
    for part in tmp_path.iterdir():
        found = replay(part.read_text().splitlines())
        assert (found.share, found.looks > 0) == (1.0, True)  # how many: as the writing thread got its turns


def test_a_recorder_without_disk_leaves_out_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = ViewRecorder(tmp_path / "file" / "below", "longest-queue", {})
    recorder.observe(TWO, Stay(None, ""))
    recorder.close()

    assert (recorder.written, recorder.left_out) == (0, 1)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["hello"], "line 1 is no recorded look"),
        ([json.dumps(encode(TWO, Stay(None, "")))], "before any line that names the policy"),
        ([json.dumps(heading("unknown", {}))], "which this version does not have"),
        ([json.dumps(heading("longest-queue", {"color": 1}))], "another version of policy 'longest-queue'"),
    ],
)
def test_what_is_no_recording_is_refused(lines: list[str], reason: str) -> None:
    with pytest.raises(RecordingError, match=reason):
        replay(lines)


def test_a_look_that_cannot_be_written_does_not_end_the_recording(tmp_path: Path) -> None:
    recorder = ViewRecorder(tmp_path / "r", "longest-queue", {})
    recorder.observe(TWO, None)  # type: ignore[arg-type]
    recorder.close()

    assert (recorder.written, recorder.left_out) == (0, 1)
