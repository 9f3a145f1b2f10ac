"""Each state that hangs has an end that is known beforehand, for each backend, and others are served meanwhile."""

from dataclasses import replace

import pytest

from kybernate import deadlines
from kybernate.engines import BACKENDS, RESTART
from kybernate.messages import ActivateSeat, JobReply, KillJob, SeatTarget
from kybernate.seat import SeatState as S
from services.gpu_manager.core.inputs import EngineSeen, JobAnswered
from services.gpu_manager.core.obstacles import rest, stage
from services.gpu_manager.core.phases import clock, going_on
from services.gpu_manager.core.view import engine_probes, start_deadline
from services.gpu_manager.pods import _probe_seconds
from services.gpu_manager.publish import record
from tests.manager.world import World

GIB = 2**30


def begins(world: World, seat: str, model: str, *, probe: float = 0.0, backend: str = "cuda") -> None:
    """The container of a pod runs, and its engine is not healthy."""
    world.pod(seat, model, backend=backend)
    world.pods[seat] = replace(world.pods[seat], probe_seconds=probe)
    again(world, seat)


def again(world: World, seat: str) -> None:
    world.call(seat)
    world.start(seat)
    assert world.state(seat) is S.STARTING


def silent(world: World, seat: str, said: str = "") -> None:
    """Its engine was asked now, and is not healthy."""
    world.receive(EngineSeen(seat, world.managed(seat).durable.container_id, False, None, world.now.wall, said))


def ended(world: World, seat: str) -> None:
    """The kill is done, and kubelet sees it."""
    assert world.state(seat) is S.LOST
    kill = world.last(KillJob)
    assert kill.target.seat == seat
    world.end_processes(seat)
    world.tick()
    world.exit(seat)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_that_is_never_healthy_ends_and_rests_and_another_seat_serves(world: World, backend: str) -> None:
    a, b = world.seat(0, 0), world.seat(0, 1)
    begins(world, a, "never", probe=600.0, backend=backend)
    world.at_gate(b, "good")
    for number in range(3):
        world.tick(640.0)
        silent(world, a)
        assert world.state(a) is S.STARTING, "kubelet ends it first, with its grace period"
        world.tick(6.0)
        silent(world, a)
        ended(world, a)
        assert world.state(a) in (S.WAITING, S.BACKOFF)
        if number == 0:
            world.call(a)
            world.call(b)
            assert world.state(b) is S.STARTING, "the other seat has the group"
            world.start(b)
            world.healthy(b)
            world.traffic(b, in_flight=1)
            reason = rest(world.managed(a), world.now).reason
            assert reason == "has failed once: its engine was not healthy within 10 min 46 s"
        if number < 2:
            world.tick(330.0)
            world.traffic(b)
            world.traffic(a, waiting=1)
            world.call(a)
            world.tick(0.5)
            world.finish()
            world.start(a)
            assert world.state(a) is S.STARTING
    world.call(a)
    world.traffic(a, waiting=1)
    world.tick(300.0)
    world.call(a)
    assert world.state(a) is S.WAITING
    found = world.stage(a)
    assert found.stage == "failed"
    assert "never has failed 3 times in a row" in found.text
    assert "not healthy within 10 min 46 s" in found.text
    assert world.node.seats[b].state in (S.ACTIVE, S.PARKED)

    world.command(ActivateSeat, a)
    assert world.managed(a).durable.failed.count == 0
    assert world.stage(a).stage != "failed"


def test_an_engine_that_comes_late_but_before_its_end_serves_and_counts_as_well(world: World, a: str) -> None:
    begins(world, a, "slow")
    world.tick(deadlines.FIRST_START_SECONDS - 1)
    silent(world, a)
    world.healthy(a)
    assert world.state(a) is S.ACTIVE
    assert world.managed(a).durable.failed.count == 0


def test_what_an_engine_answers_while_it_is_not_healthy_is_told_everywhere(world: World, a: str) -> None:
    begins(world, a, "wrong")
    before = world.managed(a).told
    silent(world, a, "/health: connection refused")
    silent(world, a, "/health answered 401")
    assert stage(world.node, world.managed(a), world.now).text.endswith(": /health answered 401")
    assert record(world.node, world.managed(a), world.now).reason == f"{before}; /health answered 401".lstrip("; ")
    (line,) = going_on(world.node, world.groups[0], world.now)
    assert "starting wrong (/health answered 401)" in line["text"]
    world.tick(deadlines.FIRST_START_SECONDS + 1)
    silent(world, a, "/health answered 401")
    assert "was not healthy within 60 min 1 s: /health answered 401" in world.managed(a).reason
    assert world.managed(a).durable.failed.why.endswith(": /health answered 401")
    ended(world, a)
    again(world, a)
    assert world.managed(a).told == before


def test_an_answer_to_a_question_from_before_the_end_ends_nothing(world: World, a: str) -> None:
    """A manager that was suspended for an hour has asked nothing meanwhile."""
    begins(world, a, "slow")
    asked = world.now.wall
    world.tick(deadlines.FIRST_START_SECONDS + 1000)
    world.receive(EngineSeen(a, world.managed(a).durable.container_id, False, None, asked))
    assert world.state(a) is S.STARTING
    (probe,) = engine_probes(world.node)
    assert probe.since == start_deadline(world.node, world.managed(a)), "its silence is reported from then on"


@pytest.mark.parametrize(
    ("probe", "usual", "served", "seconds"),
    [
        (0.0, 0.0, False, 3600.0),
        (0.0, 40.0, False, 3600.0),
        (0.0, 40.0, True, 900.0),
        (0.0, 200.0, True, 2000.0),
        (0.0, 1000.0, True, 3600.0),
        (30.0, 1000.0, True, 75.0),
        (7200.0, 0.0, False, 7245.0),
    ],
)
def test_a_start_ends_by_its_probe_else_by_what_its_pod_took_before(
    probe: float, usual: float, served: bool, seconds: float
) -> None:
    assert deadlines.start(probe, usual, served=served) == seconds


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [
        (None, 0.0),
        ({"httpGet": {}}, 30.0),
        ({"failureThreshold": 60, "periodSeconds": 20, "initialDelaySeconds": 5}, 1205.0),
        ({"failureThreshold": "odd"}, 0.0),
    ],
)
def test_a_startup_probe_is_read_with_the_defaults_of_kubernetes(
    probe: dict[str, object] | None, seconds: float
) -> None:
    assert _probe_seconds(probe) == seconds


def test_of_a_container_that_kubelet_ended_by_its_probe_the_reason_says_so(world: World, a: str) -> None:
    begins(world, a, "never", probe=60.0)
    world.tick(30.0)
    world.exit(a)
    assert world.managed(a).durable.failed.why == "exited with code 1"
    world.tick(16.0)
    again(world, a)
    world.tick(61.0)
    world.exit(a)
    assert world.managed(a).durable.failed.count == 2
    assert world.managed(a).durable.failed.why == "its engine was not healthy within 61 s"
    assert "was not healthy within 61 s" in world.managed(a).reason


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != RESTART])
def test_a_park_and_an_activation_end_by_what_was_learned_and_the_checkpointer_is_informed(
    world: World, backend: str
) -> None:
    """Of a hang the checkpointer makes an ending: what follows is in ``test_reports``, and the hang itself in
    ``tests/checkpointer/test_hazards.py`` and ``test_engines.py``."""
    a, b = world.fill("a", "b", vram="60GiB")
    for seat in (a, b):
        world.annotate(seat, backend=backend)  # after their starts, as some rehearse
    durations = world.node.learning.durations
    durations.clear()
    durations[f"b {backend} parking"] = durations[f"a {backend} activating"] = [1.7]
    world.tick(30.0)
    world.traffic(a, waiting=29)
    world.quiet(b)
    job = world.job()
    assert [target.usual_seconds for target in job.park] == [1.7]
    assert job.activate.usual_seconds == 1.7
    began = world.now.wall
    assert clock(world.node, world.managed(b), world.now).ends == "the checkpointer has to take the job"
    world.receive(JobAnswered(job, JobReply(accepted=True)))
    world.tick(19.0)
    (found,) = going_on(world.node, world.groups[0], world.now)
    assert found["text"] == "G0: parking b, for 19 s (usually 1.7 s; given up at 20 s); 29 requests wait"
    assert found["late"]
    assert clock(world.node, world.managed(b), world.now).deadline == began + 20.0

    world.progress(job, activate="pending", done=False)
    assert world.state(a) is S.ACTIVATING
    assert clock(world.node, world.managed(a), world.now).deadline == world.now.wall + 40.0, "and its answers"


@pytest.mark.parametrize("learned", [0.0, 0.4, 4.0, 400.0])
@pytest.mark.parametrize("gib", [1, 60])
def test_manager_and_checkpointer_mean_the_same_end(learned: float, gib: int) -> None:
    from services.checkpointer.backends.driver_calls import Timeouts
    from services.checkpointer.backends.port import Member, SeatProcesses
    from services.checkpointer.processes import ProcessIdentity

    target = SeatTarget(seat="s", pod_uid="u", container_id="c", gpus=("g0", "g1"), usual_seconds=learned)
    member = Member(who=ProcessIdentity(pid=1, start=1), gpu_bytes={"g0": gib * GIB})
    seat = SeatProcesses(target=target, group="G", epoch=1, members=(member,))
    longest = 30.0 + 3.0 * gib + 60.0
    known = {0.0: longest, 0.4: 20.0, 4.0: 40.0, 400.0: longest}
    assert deadlines.half(gib * GIB, 2, learned, 1.0) == known[learned]
    assert Timeouts().half(seat) == known[learned]


ENDLESS = {
    S.RELEASING: "its container ends",
    S.BACKOFF: "its container starts again",
    S.QUARANTINED: "evidence or an operator ends it",
}


def test_what_has_no_end_says_why(world: World) -> None:
    a, b = world.drained_switch()
    found = {}

    def note(seat: str) -> None:
        time = clock(world.node, world.managed(seat), world.now)
        assert time.ends
        found[world.state(seat)] = (time.deadline, time.ends)

    note(b)
    world.progress(world.job(), park="quarantined", activate="pending")
    note(b)
    world.exit(a)
    note(a)
    world.vanish(b)
    note(b)
    assert {state: ends for state, (deadline, ends) in found.items() if state in ENDLESS} == ENDLESS
    assert found[S.PARKING] == (None, "the checkpointer has to take the job")
