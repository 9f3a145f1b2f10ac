"""The backend of a seat: rehearsed before it serves, demoted after two failures, remembered in the ledger."""

from typing import Any

import pytest

from kybernate.engines import next_backend
from kybernate.messages import JobReply, JobStatus, SeatActivated, SeatProgress, SwitchJob
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.inputs import JobAnswered, JobsReported, Recovered, RecoveryBegun, WallTime
from services.gpu_manager.core.obstacles import of_group
from services.gpu_manager.core.riders.rehearsal import Rehearsals, halves
from services.gpu_manager.ledger import Ledger
from tests.manager.world import World, status


def starting(world: World, backend: str = "vllm") -> str:
    """A seat whose engine is healthy for the first time."""
    seat = world.seat(0, 0)
    world.loads(seat, "a", backend=backend)
    world.healthy(seat)
    return seat


def rehearsals(world: World) -> list[SwitchJob]:
    return [e for e in world.effects if isinstance(e, SwitchJob) and e.op.startswith("rehearsal-")]


def next_job(world: World, seat: str) -> SwitchJob:
    """The job of the next switch that parks this seat, drained as obedient routers do."""
    known = {effect.op for effect in world.effects if isinstance(effect, SwitchJob)}
    for _ in range(2000):
        world.later(0.5)
        world.drains_end()
        job = world.last(SwitchJob)
        if job.op not in known:
            assert [one.seat for one in job.park] == [seat]
            return job
    raise AssertionError("it is not parked")


def parked(job: SwitchJob, outcome: str, activate: str, **fields: object) -> JobStatus:
    """The end of a job; ``fields``: what is said of its park."""
    report = status(job, outcome, activate)
    return report.model_copy(update={"park": tuple(one.model_copy(update=fields) for one in report.park)})


def not_parked(world: World, job: SwitchJob, **fields: object) -> None:
    found = parked(job, "active", "pending", **fields)
    world.receive(JobAnswered(job, JobReply(accepted=True, jobs=(found,))))


def failing(world: World, seat: str, *, refused: bool = False) -> None:
    """A park of this active seat fails."""
    world.traffic(world.seat(0, 1), waiting=1)
    not_parked(world, next_job(world, seat), failed=not refused, refused=refused)


def serving(world: World, **annotations: str) -> str:
    """A seat that is active, beside one that is parked."""
    seat, _ = world.fill("a", "b", **annotations)
    world.tick(10)
    world.traffic(seat, waiting=1)
    world.settle()
    world.traffic(seat)
    assert world.state(seat) is S.ACTIVE
    return seat


def test_an_engine_that_sleeps_rehearses_before_its_seat_serves(world: World) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    assert (job.park, job.activate) == ((world.managed(seat).target(),), world.managed(seat).target())
    world.healthy(seat)
    assert world.state(seat) is S.STARTING
    assert len(rehearsals(world)) == 1, "asked again only after a while"

    world.progress(job)
    assert world.state(seat) is S.STARTING
    world.healthy(seat)
    assert world.state(seat) is S.ACTIVE
    assert isinstance(world.last(SeatActivated), SeatActivated)
    assert world.managed(seat).durable.measured, "what it keeps while it is parked is known"


def test_a_rehearsal_is_sent_again_under_its_name_and_its_answer_is_its_status(world: World) -> None:
    seat = starting(world)
    world.receive(JobAnswered(rehearsals(world)[0], None))
    world.tick(1.5)
    world.healthy(seat)
    first, second = rehearsals(world)
    assert first.op == second.op
    world.receive(JobAnswered(first, JobReply(accepted=True, jobs=(status(first),))))
    world.healthy(seat)
    assert world.state(seat) is S.ACTIVE


@pytest.mark.parametrize(
    ("code", "state"),
    [("", S.STARTING), ("busy", S.STARTING), ("stale-epoch", S.STARTING), ("unsupported", S.ACTIVE)],
)
def test_a_rehearsal_that_is_not_taken_is_asked_again_unless_it_never_will_be(
    world: World, code: str, state: S
) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    another = job.model_copy(update={"op": "rehearsal-of-another-seat"})
    world.receive(JobAnswered(another, JobReply(accepted=False, code="unsupported")))
    world.receive(JobAnswered(job, JobReply(accepted=not code, code=code, highest_epoch=job.epoch + 50)))
    world.tick(1.5)
    world.healthy(seat)
    assert world.state(seat) is state
    if code == "stale-epoch":
        assert rehearsals(world)[-1].epoch > job.epoch + 50


@pytest.mark.parametrize("again", [False, True], ids=["same manager", "next manager"])
def test_a_seat_whose_rehearsal_left_its_engine_parked_is_parked_and_activated_on_demand(
    world: World, again: bool
) -> None:
    """A frozen engine never says that it is healthy: its seat would start for ever, and hold its group."""
    seat = starting(world)
    (job,) = rehearsals(world)
    if again:
        world.next_manager(jobs=(status(job, "parked", "started", done=False),))
        assert world.state(seat) is S.STARTING
    world.progress(job, "parked", "parked")
    assert (world.state(seat), world.managed(seat).lease) == (S.PARKED, False)
    for _ in range(3):  # the next manager waits for routers first
        world.later(1)
        world.traffic(seat, waiting=1)
    world.settle()
    assert world.state(seat) is S.ACTIVE


@pytest.mark.parametrize("journal_lost", [False, True])
def test_an_engine_that_its_rehearsal_left_frozen_is_parked_although_no_report_came(
    world: World, *, journal_lost: bool
) -> None:
    """It is never healthy, so its job was not sent again: its seat started for ever, and no other had the group."""
    seat = starting(world, "vllm")
    (job,) = rehearsals(world)
    for _ in range(2):
        world.tick(view.LATE_START_SECONDS)
    questions = view.checkpointer_questions(world.node, world.now, world.now.wall)
    assert job.op in {op for question in questions for op in question.ops}
    known = () if journal_lost else (status(job, "parked", "parked"),)
    world.receive(JobsReported(JobReply(accepted=True, jobs=known), asked=(job.op,)))
    world.look_at(seat, "parked")
    assert world.state(seat) is S.PARKED


def test_the_checkpointer_is_not_asked_about_a_rehearsal_that_may_be_on_its_way_to_it(world: World, a: str) -> None:
    """It did not know the job yet, which counted as a lost journal: the engine rehearsed a second time."""
    world.loads(a, "a", backend="vllm")
    world.tick(view.LATE_START_SECONDS)
    world.healthy(a)

    def asked() -> set[str]:
        before = WallTime(world.now.wall - 1.0)
        return {op for one in view.checkpointer_questions(world.node, world.now, before) for op in one.ops}

    assert asked() == set()
    world.tick(view.LATE_START_ASK_SECONDS)
    (job,) = rehearsals(world)
    assert asked() == {job.op}
    world.progress(job)
    world.tick(view.LATE_START_ASK_SECONDS)
    assert (world.state(a), asked()) == (S.STARTING, set()), "it is over"


def test_a_rehearsal_that_left_an_earlier_container_parked_tells_nothing(world: World) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    world.managed(seat).durable.container_id = "process://next"
    world.progress(job, "parked", "parked")
    assert world.state(seat) is S.STARTING


def test_a_manager_that_starts_during_a_rehearsal_goes_on_with_the_start(world: World) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    world.next_manager(jobs=(status(job, "started", "pending", done=False),))
    assert world.state(seat) is S.STARTING
    assert not world.node.switches


def test_an_engine_whose_rehearsal_goes_on_serves_only_after_it_also_if_the_ledger_was_lost(world: World) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    under_way, seen = status(job, "parked", "started", done=False), world.seen(seat, "started")
    world.next_manager(Ledger(lost=True), seen, jobs=(under_way,), tickets=world.used_tickets())
    assert (world.state(seat), world.managed(seat).lease) == (S.STARTING, True)


def test_a_pod_gets_engine_keys_of_no_other_namespace(world: World, a: str) -> None:
    world.pod(a, "a", backend="vllm", **{"engine-key": "team-b.k"})
    world.shows(a, namespace="team-a")
    assert world.managed(a).target().engine_key == "team-a.team-b.k"
    world.pod(a, "a", backend="vllm")
    assert world.managed(a).target().engine_key == ""


def test_a_backend_that_fails_twice_is_demoted_also_after_a_restart(world: World) -> None:
    seat = serving(world)
    failing(world, seat)
    assert (world.managed(seat).backend, halves(world.managed(seat)).failures) == ("fake", 1)
    failing(world, seat)
    assert world.managed(seat).backend == "restart"
    assert halves(world.managed(seat)).demoted.startswith("fake failed 2 times in a row: made active")
    assert world.managed(seat).target().backend == "restart"

    again = Ledger.model_validate_json(recovery.ledger(world.node, "boot").model_dump_json())
    assert next(one for one in again.seats if one.seat == seat).durable.backend == "restart"


def test_a_seat_whose_engine_cannot_be_asked_is_shown_until_it_can(world: World) -> None:
    seat = serving(world)
    for unverified in ("GET /health: refused", ""):
        world.traffic(world.seat(0, 1), waiting=1)
        not_parked(world, next_job(world, seat), unverified=unverified)
        assert halves(world.managed(seat)).unverified == unverified


def test_a_success_between_two_failures_demotes_nothing(world: World) -> None:
    seat = serving(world)
    failing(world, seat)
    assert halves(world.managed(seat)).failures == 1
    world.progress(next_job(world, seat))
    assert world.state(seat) is S.PARKED
    assert halves(world.managed(seat)).failures == 0


@pytest.mark.parametrize(("backend", "below"), [("fake", "restart"), ("cuda", "restart"), ("sglang", "cuda")])
def test_two_refused_parks_in_a_row_lead_to_the_next_way(world: World, backend: str, below: str) -> None:
    """Before, a refusal by a rule of the driver kept its neighbours waiting for ever."""
    seat = serving(world, backend=backend)
    failing(world, seat, refused=True)
    assert world.managed(seat).backend == backend
    world.traffic(world.seat(0, 1), waiting=1)
    text = next(one.text for one in of_group(world.node, world.groups[0], world.now))
    assert text.startswith("group G0 pauses: a was not parked: ")
    failing(world, seat, refused=True)
    assert world.managed(seat).backend == below


@pytest.mark.parametrize(
    ("backend", "mig", "below"),
    [
        ("vllm", False, "cuda"),
        ("vllm", True, "restart"),
        ("cuda", False, "restart"),
        ("restart", False, ""),
    ],
)
def test_the_floor_of_all_backends_is_a_restart(backend: str, mig: bool, below: str) -> None:
    assert next_backend(backend, mig=mig) == below


def test_a_seat_that_is_parked_keeps_the_backend_that_parked_it(world: World) -> None:
    seat = world.managed(starting(world, "sglang"))
    for outcome, backend in (("parked", "sglang"), ("parked", "sglang"), ("lost", "cuda")):
        judged(world, seat.id, outcome, failed=True)
        assert seat.backend == backend


def judged(world: World, seat: str, outcome: str, times: int = 1, **more: Any) -> None:
    for _ in range(times):
        progress = SeatProgress(seat=seat, pod_uid="u", container_id="c", outcome=outcome, **more)
        Rehearsals().reported(world.node, world.managed(seat), S.PARKING, progress)


def test_a_failed_rehearsal_demotes_at_once(world: World) -> None:
    seat = starting(world)
    (job,) = rehearsals(world)
    not_parked(world, job, failed=True, reason="it kept its memory")
    assert (world.managed(seat).backend, halves(world.managed(seat)).failures) == ("cuda", 0)


def test_a_demotion_ends_after_twenty_good_activations_and_one_failure_renews_it(world: World) -> None:
    seat = starting(world)
    judged(world, seat, "active", 2, failed=True)
    assert world.managed(seat).backend == "cuda"
    judged(world, seat, "parked", 30)
    judged(world, seat, "active", 19)
    assert world.managed(seat).backend == "cuda"
    judged(world, seat, "active")
    assert (world.managed(seat).backend, halves(world.managed(seat)).demoted) == ("vllm", "")
    judged(world, seat, "active", failed=True)
    assert world.managed(seat).backend == "cuda"


def test_a_seat_that_was_demoted_to_a_restart_rehearses_again_at_its_fourth_start(world: World) -> None:
    seat = starting(world)
    judged(world, seat, "active", 4, failed=True)
    assert world.managed(seat).backend == "restart"
    for start in range(4):
        assert len(rehearsals(world)) == 1
        world.managed(seat).rehearsal = None
        assert Rehearsals().before_serving(world.node, world.managed(seat), world.now) is (start < 3)
    assert world.managed(seat).backend == "vllm"


def test_a_failed_park_counts_also_where_it_ended_while_no_manager_ran(world: World) -> None:
    """Three parks of an engine that kept its memory took 20 s each, for the first one was not counted."""
    seat = serving(world, backend="sglang")
    world.traffic(world.seat(0, 1), waiting=1)
    job = next_job(world, seat)
    ledger = recovery.ledger(world.node, "boot")
    report = parked(job, "active", "pending", failed=True)
    other = world.seen(world.seat(0, 1), "parked")
    for _ in range(2):
        assert world.question(ledger).ops == (job.op,)
        reply = JobReply(accepted=True, jobs=(report,), seats=(*report.park, other))
        world.receive(Recovered(RecoveryBegun(world.owners(), ledger), reply))
        assert world.state(seat) is S.ACTIVE
        assert halves(world.managed(seat)).failures == 1, "once: the ledger has not seen it end"
    ledger = recovery.ledger(world.node, "boot")
    assert world.question(ledger).ops == (), "the ledger has seen it end"
    world.receive(Recovered(RecoveryBegun(world.owners(), ledger), reply))
    assert halves(world.managed(seat)).failures == 1


def test_what_a_park_has_left_is_known_also_where_it_ended_while_no_manager_ran(world: World) -> None:
    """An engine of four GPUs whose first park kept 2.4 GiB on each was ended as one that was called past the router."""
    seat = serving(world, backend="sglang")
    world.traffic(world.seat(0, 1), waiting=1)
    job = next_job(world, seat)
    ledgers = [recovery.ledger(world.node, "boot")]
    report = parked(job, "parked", "parked", vram_bytes=48, residue_bytes=3)
    comes = report.activate.model_copy(update={"outcome": "started", "reason": ""})
    under_way = report.model_copy(update={"activate": comes, "done": False})
    world.receive(JobAnswered(job, JobReply(accepted=True, jobs=(under_way,))))
    assert world.state(comes.seat) is S.ACTIVATING
    ledgers.append(recovery.ledger(world.node, "boot"))
    back = report.activate.model_copy(update={"residue_bytes": 1})
    reply = JobReply(accepted=True, jobs=(report.model_copy(update={"activate": back}),), seats=(*report.park, back))
    for ledger in ledgers:
        world.question(ledger)
        world.receive(Recovered(RecoveryBegun(world.owners(), ledger), reply))
        assert world.state(seat) is S.PARKED
        durable = world.managed(seat).durable
        assert (durable.vram_bytes, durable.residue_bytes, durable.measured) == (48, 3, True)
        assert world.managed(comes.seat).durable.residue_bytes == 0, "only a park tells what it leaves"
