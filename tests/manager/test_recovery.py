"""What a manager believes after its start, whatever happened before."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from kybernate.messages import (
    JobReply,
    JobStatus,
    KillJob,
    MigrateSeat,
    ReleaseJob,
    SeatActivated,
    SeatProgress,
    SeatQuarantined,
)
from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import (
    BusChanged,
    JobAnswered,
    JobsReported,
    Published,
    Recovered,
    RecoveryBegun,
    StartCalls,
    StartTicket,
)
from services.gpu_manager.core.seat_pod import Owners
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import record
from tests.facts import COPY
from tests.manager.world import World, booted, make_group, pooled, status


def restart(
    world: World,
    *,
    ledger: Ledger | None = None,
    jobs: tuple[object, ...] = (),
    gpus: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    **outcomes: str,
) -> None:
    """The manager dies and comes back; ``outcomes`` is what the checkpointer sees, by model (default: as it is), and
    ``gpus`` where it sees it."""
    kept = recovery.ledger(world.node, "boot") if ledger is None else ledger
    kept = Ledger.model_validate_json(kept.model_dump_json()).model_copy(update={"lost": kept.lost})
    old = world.node
    world.wall += 1
    seen = []
    for target in world.question(kept).targets:
        row = old.seats[target.seat]
        default = "parked" if row.state in (S.PARKED, S.ACTIVATING) else "active"
        asked = {"seat": target.seat, "pod_uid": target.pod_uid, "container_id": target.container_id}
        found = {"outcome": outcomes.get(row.model, default), "gpus": gpus.get(row.model, ())}
        keeper = target.seat in world.pods and world.pods[target.seat].restarts_inside
        seen.append(SeatProgress(**asked, **found, keeper=keeper))  # type: ignore[arg-type]
    reply = JobReply(accepted=True, highest_epoch=7, jobs=jobs, seats=tuple(seen))  # type: ignore[arg-type]
    begun = RecoveryBegun(world.owners(), kept, tickets=world.used_tickets() if kept.lost else ())
    world.receive(Recovered(begun, reply))


def test_seats_of_present_pods_stay_while_kubelet_that_starts_lists_no_devices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet and the manager are restarted together. A release would end the parked engine."""
    a, b = world.fill("a", "b")
    endpoint = record(world.node, world.managed(b), world.now).endpoint
    with monkeypatch.context() as kubelet:
        kubelet.setattr(world, "owners", lambda: Owners(listed=frozenset({"uid-a", "uid-b"})))
        before = len(world.effects)
        restart(world)
        world.look(2)
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)
    assert not [effect for effect in world.effects[before:] if isinstance(effect, ReleaseJob)]

    world.look()
    assert record(world.node, world.managed(b), world.now).endpoint == endpoint
    world.tick(30)
    world.traffic(a, waiting=1)
    world.finish()
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.PARKED)


def test_a_pod_that_neither_kubelet_nor_the_api_server_has_at_a_start_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = world.fill("a", "b", "c")
    with monkeypatch.context() as kubelet:
        kubelet.setattr(world, "owners", lambda: Owners(listed=frozenset({"uid-b"})))
        restart(world)
    assert [world.state(seat) for seat in (a, b, c)] == [S.RELEASING, S.PARKED, S.RELEASING]
    assert world.managed(c).lease
    world.look_at(c, "gone")
    assert world.state(c) is S.FREE


def test_a_drain_that_was_under_way_is_over_and_published_with_a_higher_epoch(world: World) -> None:
    _, b = world.draining()
    closed = world.managed(b).epoch

    restart(world)

    assert world.state(b) is S.ACTIVE
    event = world.events(b)[-1]
    assert isinstance(event, SeatActivated)
    assert event.epoch > closed


@pytest.mark.parametrize("half", ["park", "activate"])
def test_an_unfinished_job_is_adopted_and_ends_as_usual(world: World, half: str) -> None:
    a, b = world.drained_switch()
    job = world.job()
    far = status(job, "started" if half == "park" else "parked", "pending" if half == "park" else "started", done=False)

    restart(world, jobs=(far,))
    expected = (S.PARKING, S.PARKED) if half == "park" else (S.PARKED, S.ACTIVATING)
    assert (world.state(b), world.state(a)) == expected
    world.progress(job)

    assert (world.state(b), world.state(a)) == (S.PARKED, S.ACTIVE)
    assert not world.node.switches


@pytest.mark.parametrize("hours", [0, -1])
def test_events_and_roster_rows_after_a_restart_are_newer_than_those_before(world: World, hours: int) -> None:
    """Also with the clock set back: routers drop what is older within the epoch of a seat."""
    a, b = world.fill("a", "b")
    before = world.events(b)[-1]
    rows = [record(world.node, world.managed(seat), world.now).seq for seat in (a, b)]
    world.unix_offset = hours * 3600.0

    restart(world)

    assert world.managed(b).epoch == before.epoch
    assert all(
        record(world.node, world.managed(seat), world.now).seq >= row for seat, row in zip((a, b), rows, strict=True)
    )
    world.node.emit(world.managed(b), SeatActivated, world.now)
    after = world.node.effects[-1]
    assert isinstance(after, SeatActivated)
    assert (after.epoch, after.seq) > (before.epoch, before.seq)


def test_a_ledger_without_seq_counts_from_the_clock(world: World) -> None:
    """With neither ledger nor roster the clock alone keeps what is said from being older than what routers know."""
    world.fill("a", "b")

    restart(world, ledger=recovery.ledger(world.node, "boot").model_copy(update={"seq": 0}))
    world.node.emit(world.managed(world.seat(0, 0)), SeatActivated, world.now)

    assert world.node.seq == int(world.now.unix * 1_000_000)


def test_a_start_that_was_under_way_keeps_its_lease(world: World) -> None:
    seat, other = world.seat(0, 0), world.seat(0, 1)
    world.at_gate(seat, "a")
    world.pod(other, "b")

    restart(world)
    world.call(other)
    assert world.state(seat) is S.STARTING
    assert world.state(other) is S.WAITING
    world.start(seat)
    world.healthy(seat)

    assert world.state(seat) is S.ACTIVE


def test_a_taken_ticket_is_not_mistaken_for_a_new_call_after_a_restart(world: World, a: str) -> None:
    world.at_gate(a, "a")
    stale = dict(world.calls)
    world.start(a)
    world.healthy(a)

    restart(world)
    world.calls = stale
    world.receive(StartCalls(stale))

    assert world.state(a) is S.ACTIVE
    assert sum(isinstance(effect, StartTicket) for effect in world.effects) == 1


def test_nothing_is_decided_before_the_evidence_is_in(world: World) -> None:
    fresh = World()
    fresh.receive(BusChanged(True))
    fresh.at_gate(fresh.seat(0, 0), "a")

    assert not any(isinstance(effect, StartTicket) for effect in fresh.effects)


def test_a_lost_seat_is_killed_again_after_a_restart(world: World) -> None:
    _, b = world.fill("a", "b")
    restart(world, b="lost")
    assert world.state(b) is S.LOST

    kill = world.last(KillJob)
    assert (kill.target.seat, kill.epoch) == (b, world.managed(b).epoch)


def test_a_parked_seat_whose_pod_was_deleted_meanwhile_is_thawed(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.pods[a] = replace(world.pods[a], deleting=True)

    restart(world)

    assert (world.state(a), world.managed(a).lease) == (S.RELEASING, False)
    release = world.last(ReleaseJob)
    assert (release.target.seat, release.epoch) == (a, world.managed(a).epoch)


def test_both_seats_of_an_adopted_job_are_no_conflict(world: World) -> None:
    a, b = world.drained_switch()
    job = world.job()

    restart(world, jobs=(status(job, "started", "pending", done=False),), a="started", b="started")

    assert (world.state(b), world.state(a)) == (S.PARKING, S.PARKED)
    assert not world.managed(a).facts.conflict
    assert not world.managed(b).facts.conflict
    assert not world.managed(b).reason
    assert not any(isinstance(event, SeatQuarantined) for event in world.effects)


def test_a_router_that_the_last_manager_knew_must_still_say_that_it_is_quiet(world: World) -> None:
    a, b = world.fill("a", "b")
    world.router("router-1")
    restart(world)
    world.tick(4)
    world.router("router-0")
    world.traffic(a, waiting=1)
    assert world.state(b) is S.DRAINING
    world.quiet(b)
    assert world.state(b) is S.DRAINING, "router-1 may be there, only not known yet"

    for _ in range(8):
        world.tick(1)
        world.router("router-0")
    world.idle(b)

    assert world.state(b) is S.PARKING


@pytest.mark.parametrize("outcome", ["active", "started", "quarantined", "lost"])
def test_processes_that_the_driver_has_hold_although_the_pods_say_that_nothing_runs(world: World, outcome: str) -> None:
    (a,) = world.fill("a")
    rival = world.seat(0, 1)
    world.pod(rival, "b")
    world.pods[a] = replace(world.pods[a], running=False)  # the list is stale

    restart(world, a=outcome)
    world.call(rival)
    for _ in range(5):
        world.tick(1)
        world.look()

    assert world.managed(a).lease
    assert world.state(rival) is S.WAITING
    assert world.asked() == [a]
    world.end_processes(a)
    world.tick(1)
    assert not world.managed(a).lease
    assert world.state(rival) is S.STARTING


def test_the_first_question_fences_all_gpus_above_everything_that_the_ledger_knows(world: World) -> None:
    """Also with the clock set back, and GPUs on which no seat is known: seats may be on their way there."""
    world.fill("a", "b")
    kept = recovery.ledger(world.node, "boot")
    world.unix_offset = -3600.0

    question = world.question(kept)

    assert question.epoch > kept.epoch
    assert question.gpus == ("GPU-0", "GPU-2", "GPU-3")


def test_after_a_start_operations_are_above_what_the_checkpointer_has_seen(world: World) -> None:
    a, b = world.fill("a", "b")
    kept, highest = recovery.ledger(world.node, "boot"), 4_000_000_000_000
    seen = (world.seen(a, "parked"), world.seen(b, "gone"))
    world.board = world.new_board()
    world.receive(BusChanged(True))

    reply = JobReply(accepted=True, highest_epoch=highest, seats=seen)
    world.receive(Recovered(RecoveryBegun(world.owners(), kept), reply))
    world.tick(5)
    world.traffic(a, waiting=1)

    assert world.state(a) is S.ACTIVATING
    assert world.job().epoch > highest


def test_after_a_start_that_took_long_nothing_is_evicted_before_the_routers_are_known(world: World) -> None:
    a, b = world.fill("a", "b")
    kept = recovery.ledger(world.node, "boot").model_copy(update={"routers": {}, "more_routers": ()})
    seen = (world.seen(a, "parked"), world.seen(b, "active"))
    world.board = world.new_board()
    world.receive(BusChanged(True))
    world.tick(10)  # until the checkpointer answers; no message of a router was taken in

    world.receive(Recovered(RecoveryBegun(world.owners(), kept), JobReply(accepted=True, seats=seen)))
    world.traffic(a, waiting=1)
    world.tick(2.9)
    assert world.state(b) is S.ACTIVE
    world.router("router-0")
    world.tick(0.2)

    assert world.state(b) is S.DRAINING


def test_what_was_published_before_the_ledger_and_the_clock_were_lost_has_lower_epochs(world: World) -> None:
    a, b = world.fill("a", "b")
    world.exit(a)
    published = Published(max(world.managed(seat).epoch for seat in (a, b)), world.node.seq)
    older = recovery.ledger(world.new_board().node, "")
    world.unix_offset -= 3600
    world.effects.clear()

    question = world.question(older, published=published)
    world.receive(Recovered(RecoveryBegun(world.owners(), older, published), JobReply(accepted=True)))

    assert question.epoch > published.epoch
    for seat in (a, b):
        assert world.events(seat)[-1].epoch > published.epoch + 1000  # rows lie behind the events
        assert world.events(seat)[-1].seq > published.seq + 1_000_000


def test_a_seat_that_is_as_an_older_ledger_has_it_is_published_again(world: World) -> None:
    (a,) = world.fill("a")
    older = recovery.ledger(world.node, "")
    published = Published(world.managed(a).epoch + 7)  # it drained, and that record of the ledger is lost
    world.effects.clear()

    world.question(older, published=published)
    world.receive(Recovered(RecoveryBegun(world.owners(), older, published), JobReply(accepted=True)))

    assert [event.state for event in world.events(a)] == [S.ACTIVE]
    assert world.managed(a).epoch > published.epoch


def test_without_its_last_record_a_manager_fences_above_what_that_may_have_held(world: World) -> None:
    """The clock of the day was set back. A job of the lost record may arrive later, also if it is much younger."""
    world.fill("a", "b")
    kept = recovery.ledger(world.node, "boot")
    world.later(600)
    world.traffic(world.seat(0, 0), waiting=1)
    world.quiet(world.seat(0, 1))
    job = world.job()
    assert job.epoch > kept.epoch + 500_000
    world.unix_offset = -3600.0

    assert world.question(kept.model_copy(update={"lost": True})).epoch > job.epoch


def test_a_manager_whose_question_is_not_above_all_jobs_goes_above_what_may_be_on_its_way(world: World) -> None:
    """Two managers in a row start without their ledger and with the clock set back, and read the same roster."""
    world.fill("a", "b")
    published, world.unix_offset = Published(world.node.epoch, world.node.seq), -3600.0
    refused, lost = world.node.epoch + 5_000_000, Ledger(lost=True)
    asked = [world.question(lost, published=published, seen=seen).epoch for seen in (0, 0, refused)]

    assert asked[0] == asked[1], "the second one fences no job of the first one, and is refused"
    assert asked[2] > refused + 3_000_000


def test_every_seat_that_an_adopted_job_parks_is_leaving(world: World) -> None:
    """A job may park several seats: one that is not adopted would seem to hold the group beside the incoming one."""
    a, b = world.drained_switch()
    found = status(world.job(), "parked", "started", done=False)
    other = found.park[0].model_copy(
        update={"seat": a, "pod_uid": "uid-a", "container_id": world.pods[a].container_id, "outcome": "started"}
    )
    jobs = (found.model_copy(update={"park": (*found.park, other), "activate": None}),)

    restart(world, jobs=jobs, a="started", b="parked")

    assert (world.state(b), world.state(a)) == (S.PARKED, S.PARKING)
    assert (world.managed(b).lease, world.managed(a).lease) == (False, True)


def test_a_job_about_the_pod_before_says_nothing_about_the_one_that_has_its_seat_now(world: World) -> None:
    """The ledger was lost, and the seat was given to another pod while the switch ran."""
    a, _b = world.drained_switch()
    found = status(world.job(), "parked", "started", done=False)
    before = found.activate.model_copy(update={"pod_uid": "uid-before"})

    restart(world, jobs=(found.model_copy(update={"activate": before}),), a="parked", b="parked")

    assert world.state(a) is S.PARKED
    assert not world.managed(a).lease


def test_a_seat_that_a_job_has_begun_to_restore_holds_its_group_beside_whatever_else_seems_to(world: World) -> None:
    """Its victim ended, and the ledger knows a younger container of it: the job restores the other one all the same."""
    a, b = world.drained_switch()
    found = status(world.job(), "gone", "started", done=False)
    before = found.park[0].model_copy(update={"container_id": "engine-before"})

    restart(world, jobs=(found.model_copy(update={"park": (before,)}),), a="started", b="active")

    assert [world.managed(seat).lease for seat in (a, b)] == [True, True]
    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.QUARANTINED)


def test_a_conflict_quarantines_the_seats_without_evidence_and_not_the_one_that_the_driver_lists(world: World) -> None:
    a, b = world.fill("a", "b")
    b_is_on = world.managed(b).group.uuids

    restart(world, ledger=Ledger(), gpus={"b": b_is_on}, a="quarantined", b="active")

    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.ACTIVE)
    world.look_at(a, "parked")
    assert (world.state(a), world.state(b)) == (S.PARKED, S.ACTIVE)


@pytest.mark.parametrize(("outcome", "listed"), [("active", False), ("quarantined", False), ("active", True)])
def test_a_conflict_spares_no_seat_unless_the_driver_lists_it_alone(
    world: World, outcome: str, *, listed: bool
) -> None:
    a, b = world.fill("a", "b")
    on = world.managed(b).group.uuids

    restart(world, ledger=Ledger(), gpus={"a": on, "b": on} if listed else {}, a="active", b=outcome)
    world.traffic(a, waiting=1)
    world.tick(100)

    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.QUARANTINED)
    assert "delete the pods" in world.managed(a).reason


def test_seats_of_overlapping_groups_that_the_driver_lists_on_their_gpus_are_both_quarantined() -> None:
    world = booted(make_group("G0", [0], 2), make_group("G01", [0, 1], 2))
    (a,) = world.fill("a")
    world.pod(world.seat(1, 0), "big")
    both = {"a": ("GPU-0",), "big": ("GPU-0", "GPU-1")}
    big = world.seat(1, 0)
    world.pods[big] = replace(world.pods[big], container_id="process://9", running=True)

    restart(world, ledger=Ledger(), gpus=both, a="active", big="active")
    assert (world.state(a), world.state(big)) == (S.QUARANTINED, S.QUARANTINED)
    restart(world, ledger=Ledger(), gpus={"big": both["big"]}, a="active", big="active")

    assert (world.state(a), world.state(big)) == (S.QUARANTINED, S.ACTIVE)


def stale_start(world: World, *, driver_lists: bool) -> tuple[str, str]:
    """kyb-run of a was paused with a permission until it was over, b got the group, and a went on; the manager starts
    anew."""
    a, b = world.fill("a", "b", backend="restart")
    world.pods[a] = replace(world.pods[a], container_id="process://stale", running=True, restarts=1)
    on = {"a": world.groups[0].uuids, "b": world.groups[0].uuids} if driver_lists else {}
    restart(world, gpus=on, a="active", b="active")
    return a, b


@pytest.mark.parametrize("driver_lists", [True, False])
def test_an_engine_that_nothing_let_in_is_ended_beside_the_one_that_the_ledger_has(
    world: World, *, driver_lists: bool
) -> None:
    a, b = stale_start(world, driver_lists=driver_lists)

    assert (world.state(a), world.state(b)) == (S.LOST, S.ACTIVE)
    kill = world.last(KillJob)
    assert kill.target.container_id == "process://stale"
    assert "nothing let it in" in world.managed(a).reason
    assert "no room beside b" in world.managed(a).reason
    world.end_processes(a)
    world.tick(1)
    assert (world.state(a), world.managed(b).facts.conflict) == (S.WAITING, False)


def test_an_engine_that_a_job_brought_was_let_in_and_is_not_ended_beside_its_victim(world: World) -> None:
    """The job has ended while no manager ran, and the driver is silent about the victim."""
    a, b = world.drained_switch()
    done = status(world.job(), "parked", "active")

    restart(world, jobs=(done,), gpus={"a": world.groups[0].uuids}, a="active", b="quarantined")

    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.QUARANTINED)


def test_a_job_that_was_sent_again_under_a_higher_epoch_lets_in_what_it_brings(world: World) -> None:
    """Its victim is asked about by its name of then: the job was not in the answer, and what it brought was ended."""
    a, b = world.drained_switch()
    first = world.job()
    high = first.epoch + 1_000_000_000
    world.receive(JobAnswered(first, JobReply(accepted=False, code="stale-epoch", highest_epoch=high)))
    job, ledger = world.job(), recovery.ledger(world.node, "boot")
    before = world.board
    known = tuple(status(one) for one in (job,) if one.op in world.question(ledger).ops)
    world.board = before

    restart(world, ledger=ledger, jobs=known, gpus={"a": world.groups[0].uuids}, a="active", b="quarantined")

    assert (job.op != first.op, world.state(a), world.state(b)) == (True, S.ACTIVE, S.QUARANTINED)


def test_an_engine_that_was_found_beside_another_one_before_is_ended_by_the_next_manager(world: World) -> None:
    a, b = world.fill("a", "b")
    world.shows(a, container_id="process://999", restarts=1)
    assert world.managed(a).facts.conflict
    on = world.groups[0].uuids

    restart(world, gpus={"a": on, "b": on}, a="active", b="active")

    assert (world.state(a), world.state(b)) == (S.LOST, S.ACTIVE)


@pytest.mark.parametrize("missing", ["ledger", "records"])
def test_after_a_lost_ledger_no_engine_counts_as_let_in_by_nothing(world: World, missing: str) -> None:
    a, b = world.fill("a", "b")
    kept = recovery.ledger(world.node, "boot")
    entries = tuple(entry for entry in kept.seats if entry.seat != b)
    older = (
        kept.model_copy(update={"lost": True}) if missing == "ledger" else kept.model_copy(update={"seats": entries})
    )

    restart(world, ledger=older, a="active", b="active")

    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.QUARANTINED)


def test_a_group_fits_when_all_gpus_that_are_named_are_its_own() -> None:
    world = booted(make_group("G01", [0, 1], 2), make_group("G23", [2, 3], 2))
    (a,) = world.fill("a")

    restart(world, ledger=Ledger(), gpus={"a": ("GPU-2", "GPU-3")}, a="active")
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G23")
    restart(world, ledger=Ledger(), gpus={"a": ("GPU-3", "GPU-4")}, a="active")

    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G01"), "which is its home"


@pytest.mark.parametrize("known", ["nothing", "by-the-ledger", "by-the-driver"])
def test_a_parked_seat_that_may_be_on_any_group_starts_cold_unless_its_group_is_known(known: str) -> None:
    """Its copy would be restored to the GPUs that it was parked on, and another seat may have them."""
    world = pooled()
    a, b = world.fill("a", "b")
    ledger = None if known == "by-the-ledger" else Ledger()
    gpus = {"b": ("GPU-0",)} | ({"a": ("GPU-1",)} if known == "by-the-driver" else {})

    restart(world, ledger=ledger, gpus=gpus, a="parked", b="active")

    if known == "nothing":
        assert (world.state(a), world.managed(a).lease) == (S.LOST, False)
        assert world.state(b) is S.ACTIVE
        assert world.last(KillJob).target.seat == a
    else:
        assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G1" if known == "by-the-driver" else "G0")
    assert not world.managed(a).facts.conflict


@pytest.mark.parametrize(("container", "outcome"), [("engine-1", "gone"), ("engine-2", "started")])
def test_what_a_job_found_gone_is_gone_in_the_same_container_only(container: str, outcome: str) -> None:
    """The checkpointer does not look at the seats of a job under way, and says "started" of them."""
    gone = SeatProgress(seat="s1", pod_uid="u", container_id="engine-1", outcome="gone")
    seen = SeatProgress(seat="s1", pod_uid="u", container_id=container, outcome="started")
    job = JobStatus(op="G0-2", epoch=2, group="G0", park=(gone,), activate=None, journaled_at=1.0, done=False)
    reply = JobReply(accepted=True, highest_epoch=2, jobs=(job,), seats=(seen,))

    assert recovery.evidence_by_seat(reply)["s1", "u"].outcome == outcome


def test_a_seat_whose_move_fails_after_a_restart_is_where_its_copy_was_made() -> None:
    """Its home, to which the next job would restore it otherwise, may have another holder."""
    world = pooled(3)
    (a,) = world.fill("a")
    world.managed(a).group = world.managed(a).memory_on = world.groups[1]
    world.managed(a).know(COPY)
    world.order(MigrateSeat, seat=a, to="G2")
    job = world.job()
    assert (world.state(a), job.group) == (S.MIGRATING, "G2")

    restart(world, jobs=(status(job, "", "started", done=False),), a="started")
    assert (world.state(a), world.managed(a).group.name) == (S.MIGRATING, "G2")
    world.receive(JobsReported(JobReply(accepted=True, jobs=(status(job, "", "parked"),))))

    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G1")
    assert world.managed(a).target().parked_on == ("GPU-1",)


@pytest.mark.parametrize(("job_done", "back"), [(False, False), (True, False), (True, True)])
def test_a_move_that_a_restart_of_the_manager_interrupts_counts_once_it_serves_there(
    job_done: bool, back: bool
) -> None:
    world = pooled()
    (a,) = world.fill("a")
    world.managed(a).know(COPY)
    world.managed(a).group = world.managed(a).memory_on = world.groups[back]
    world.managed(a).durable.waited = 7.0
    world.order(MigrateSeat, seat=a, to=f"G{1 - back}")
    job = world.job()
    world.effects.clear()
    if job_done:
        restart(world, gpus={"a": (f"GPU-{1 - back}",)}, a="active")
    else:
        restart(world, jobs=(status(job, "", "started", done=False),), a="started")
        world.receive(JobsReported(JobReply(accepted=True, jobs=(status(job, "", "active"),))))
    moved = [event for event in world.events(a) if event.state is S.ACTIVE]
    assert [(event.previous, event.way, event.came_from, event.group) for event in moved] == [
        (S.MIGRATING, "map", f"G{back:d}", f"G{1 - back}")
    ]
    assert world.managed(a).durable.waited == 0.0
    world.managed(a).durable.waited = 9.0
    restart(world, gpus={"a": (f"GPU-{1 - back}",)}, a="active")
    assert (world.managed(a).durable.way, world.managed(a).durable.waited) == ("map", 9.0), "also without a move"


@pytest.mark.parametrize("again", [False, True])
def test_a_seat_that_had_moved_starts_at_home_when_its_container_ended_meanwhile(again: bool) -> None:
    world = pooled()
    (a,) = world.fill("a")
    world.managed(a).group = world.managed(a).memory_on = world.groups[1]
    world.managed(a).durable.way = "map"
    kept = recovery.ledger(world.node, "boot")
    world.pods[a] = replace(world.pods[a], container_id="process://99" if again else "process://1", running=again)

    restart(world, ledger=kept, a="active" if again else "gone")

    assert (world.state(a), world.managed(a).group.name) == (S.STARTING if again else S.BACKOFF, "G0")
    assert world.managed(a).durable.way == "", "a start at home is no move"


def test_a_quarantine_without_a_conflict_ends_beside_a_container_that_went_past_the_gate_later(world: World) -> None:
    """A conflict ends with a copy only, while another engine is on the group: both would be quarantined for ever."""
    a, b = world.fill("a", "b")
    restart(world, b="quarantined")
    world.pods[a] = replace(world.pods[a], container_id="process://999")
    world.look()
    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.QUARANTINED)
    assert [world.managed(seat).facts.conflict for seat in (a, b)] == [True, False]

    world.look_at(b, "active")

    assert (world.state(a), world.state(b)) == (S.QUARANTINED, S.ACTIVE)
