"""How long a phase has gone on, how long it usually takes, and when it is late."""

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager import publish
from services.gpu_manager.core import obstacles
from services.gpu_manager.core.demand import MOST_DURATIONS
from services.gpu_manager.core.phases import clock
from services.gpu_manager.core.stage import Clock
from services.gpu_manager.metrics import _seats
from tests.manager.world import World


def parks(world: World, victim: str, incoming: str, seconds: float) -> None:
    """One switch, in which the park takes so long."""
    world.tick(30.0)
    world.traffic(victim)
    world.switch(victim, incoming)
    job = world.journaled()
    assert world.state(victim) is S.PARKING
    world.tick(seconds)
    world.progress(job)
    world.traffic(incoming)


def test_what_is_usual_is_the_median_of_the_last_nine_of_the_model(world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.learning.durations.clear()
    for number in range(MOST_DURATIONS + 1):
        parks(world, b, a, 1.0 if number < 5 else 4.0)
        parks(world, a, b, 100.0 if number == 0 else 7.0)

    learning = world.node.learning
    assert learning.usual("b", "fake", S.PARKING) == 4.0
    assert learning.usual("a", "fake", S.PARKING) == 7.0
    assert len(learning.durations["a fake parking"]) == MOST_DURATIONS


def test_a_seat_that_was_never_parked_takes_as_long_as_others_of_its_backend(world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.learning.durations.clear()
    parks(world, b, a, 4.0)

    learning = world.node.learning
    assert (learning.usual("a", "fake", S.PARKING), learning.learned("a", "fake", S.PARKING)) == (4.0, 0.0)
    assert learning.usual("a", "cuda", S.PARKING) == 0.0


def test_why_and_the_row_have_the_clock_of_a_park(world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.learning.durations["b fake parking"] = [3.0, 4.0, 30.0]
    world.tick(30.0)
    world.switch(b, a)
    began = world.now.unix
    world.tick(12.0)

    found = world.stage(a).as_json(world.now)
    why = "the checkpointer has to take the job"
    assert found["text"].endswith(f"has not confirmed the job, for 12 s (usually 4 s; {why})")
    assert found["clock"] == {"since": began, "usual_seconds": 4.0, "deadline_at": None, "late": False, "ends": why}
    row = publish.record(world.node, world.managed(b), world.now)
    assert (row.since, row.usual_seconds, row.deadline_at) == (began, 4.0, 0.0)

    world.tick(0.5)
    assert world.stage(a).as_json(world.now)["clock"]["late"], "more than 4 s + max(5 s, 2 × 4 s)"


def test_a_start_without_a_process_and_a_drain_have_deadlines(world: World) -> None:
    a, b = world.fill("a", "b")
    late = world.seat(1, 0)
    world.at_gate(late, "c")
    assert world.state(late) is S.STARTING
    given = world.now.unix
    world.tick(30.0)
    assert publish.record(world.node, world.managed(late), world.now).deadline_at == given + 270.0

    world.traffic(a, waiting=1)
    assert clock(world.node, world.managed(b), world.now).deadline is None, "its time begins when it is announced"
    world.answered(b, 1)
    announced = world.wall
    world.tick(12.0)
    assert clock(world.node, world.managed(b), world.now).deadline == announced + 60.0
    assert world.stage(a).as_json(world.now)["text"].endswith(", for 12 s (cut at 60 s)")


def test_the_gate_text_has_no_seconds_that_pass(world: World) -> None:
    """Kubernetes counts equal Events as one."""
    world.drained_switch()
    late = world.seat(0, 2)
    world.at_gate(late, "c")
    before = publish.gate_texts(world.node, world.now)[late]
    world.tick(3.0)

    assert "is being parked" in before
    assert publish.gate_texts(world.node, world.now)[late] == before
    assert world.stage(late).as_json(world.now)["text"].endswith(", for 3 s (the checkpointer has to take the job)")


@pytest.mark.parametrize(
    ("taken", "usual", "most", "late", "text"),
    [
        (4.0, 0.0, None, False, ", for 4 s"),
        (5.4, 0.4, None, False, ", for 5.4 s (usually 0.4 s)"),
        (5.5, 0.4, None, True, ", for 5.5 s (usually 0.4 s)"),
        (90.0, 30.0, None, False, ", for 90 s (usually 30 s)"),
        (91.0, 30.0, None, True, ", for 91 s (usually 30 s)"),
        (61.0, 0.0, 60.0, True, ", for 61 s (ends at 60 s)"),
        (60.0, 20.0, 60.0, False, ", for 60 s (usually 20 s; ends at 60 s)"),
        (300.0, 0.0, 3600.0, False, ", for 5 min (ends at 60 min)"),
        (301.0, 0.0, 3600.0, True, ", for 5 min 1 s (ends at 60 min)"),
        (301.0, 0.0, None, False, ", for 5 min 1 s"),
    ],
)
def test_a_phase_is_late(world: World, taken: float, usual: float, most: float | None, late: bool, text: str) -> None:
    since = world.now.wall
    found = Clock(since, usual, None if most is None else since + most)
    world.wall += taken

    assert (found.late(world.now), found.text(world.now)) == (late, text)


def test_a_late_phase_has_a_sample(world: World) -> None:
    a, b = world.fill("a", "b")
    world.node.learning.durations["b fake parking"] = [1.0]
    world.tick(30.0)
    world.switch(b, a)
    values = []
    for _ in range(2):
        named = [one for one in _seats(world.node, world.now) if one.name == "kybernate_phase_late"]
        found = [one for one in named if one.value is not None]
        values.append([one.value for one in found])
        world.tick(6.1)

    assert values == [[0.0], [1.0]]
    assert found[0].labels["phase"] == "parking"


def test_why_shows_what_else_keeps_a_seat_waiting(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.traffic(world.seat(0, 1), in_flight=1)
    found = world.why()[a]
    assert (found["stage"]["stage"], found["also"]) == ("idle", []), "nothing asks for it"
    world.node.groups["G0"].picked = a
    assert world.stage(a).stage == "room", "the policy fetches it ahead of requests"

    world.traffic(a, waiting=1)
    rows = [one.row.nr for one in obstacles.also(world.node, world.managed(a), world.now)]
    assert rows == sorted(rows)
    assert rows == [370]
