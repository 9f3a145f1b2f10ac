"""Seats that move: a group with a free or idle slot takes in the waiting seat of another one."""

from dataclasses import replace

import pytest

from kybernate.messages import (
    JobProgress,
    JobReply,
    JobStatus,
    MigrateSeat,
    ParkSeat,
    PinSeat,
    SeatActivated,
    SeatMoved,
    SeatProgress,
    SwitchJob,
)
from kybernate.node.known_gpus import KnownGpus
from kybernate.policy import Decision, GroupView, KybBalanced, PeerView, Stay
from kybernate.seat import SeatState as S
from services.gpu_manager.core import moves
from services.gpu_manager.core.inputs import (
    FaultyGpusSeen,
    ForeignProcess,
    ForeignProcessesSeen,
    JobAnswered,
    JobsReported,
)
from services.gpu_manager.core.seat_pod import with_owned
from services.gpu_manager.core.state import Lane
from services.gpu_manager.ledger import Ledger, LedgerEntry
from services.gpu_manager.publish import record
from tests.manager.pulling import By, Pulls
from tests.manager.world import World, make_gpu, make_group, pooled, status

RESTORED = "restore of pid 7 answered NOT_SUPPORTED (801): process 7 has no device node of GPU-1"


@pytest.fixture
def world() -> World:
    """Two groups of a GPU each; a (parked) and b (active) on G0, c (active and idle) on G1."""
    world = pooled(seats=3, policy=Pulls())
    world.fill("a", "b")
    world.fill("c", group=1)
    world.tick(20)
    return world


@pytest.fixture
def c(world: World) -> str:
    return world.seat(1, 0)


def demand(world: World, a: str, b: str) -> None:
    """A request for a waits while b is busy."""
    world.beat()
    world.traffic(b, in_flight=3)
    world.traffic(a, waiting=2, oldest=1.0)


def move(world: World, a: str, b: str) -> SwitchJob:
    """Begin the move of a to G1, as far as the job that was sent."""
    demand(world, a, b)
    world.quiet(world.seat(1, 0))
    return world.job()


def reported(world: World, job: SwitchJob, seat: str, outcome: str, **fields: object) -> None:
    """The checkpointer's last word about an activation."""
    reported = status(job, "parked", outcome)
    reported = reported.model_copy(update={"activate": reported.activate.model_copy(update=fields)})
    world.receive(JobProgress(cause="c", node="n1", status=reported))


def restarted(world: World, *jobs: JobStatus, **found: str) -> None:
    """A new manager; ``found``: by model, the GPU that the checkpointer finds its memory on and what it does there."""
    seats = []
    for pod in world.pods.values():
        gpu, _, outcome = found.get(pod.model, " started").partition(" ")
        known = {"seat": pod.seat, "pod_uid": pod.uid, "container_id": pod.container_id or ""}
        seats.append(SeatProgress(**known, outcome=outcome, gpus=(gpu,) if gpu else ()))  # type: ignore[arg-type]
    world.next_manager(None, *seats, jobs=jobs)


def test_a_group_sees_what_the_others_of_its_pool_hold(world: World, a: str, b: str, c: str) -> None:
    def seen(of: str) -> PeerView:
        (peer,) = moves.full_view(world.node, world.node.groups[of].group, world.now).peers
        return peer

    costs = world.managed(c).durable.costs
    assert seen("G0") == PeerView("G1", 0.0, free=False, frees_in=costs.park_seconds), "c is idle"
    world.traffic(a)
    world.traffic(b, in_flight=1)
    learned = world.node.learning.of(a, world.managed(a).model)
    learned.arrivals.add(float(world.now.model), 3)
    asked = learned.arrivals.at(float(world.now.model))
    assert seen("G1") == PeerView("G0", asked, free=False, frees_in=None), "b is busy"
    world.command(ParkSeat, c)
    assert seen("G0") == PeerView("G1", 0.0, free=True, frees_in=costs.park_seconds), "c leaves for no seat"
    world.quiet(c)
    world.progress(world.job(), "parked")
    assert world.state(c) is S.PARKED
    assert seen("G0").free
    assert seen("G0").frees_in == 0.0


def test_an_idle_seat_elsewhere_makes_room_for_one_that_waits(world: World, a: str, b: str, c: str) -> None:
    demand(world, a, b)
    assert (world.state(a), world.state(b), world.state(c)) == (S.PARKED, S.ACTIVE, S.DRAINING)
    assert world.managed(a).model in world.node.groups["G1"].why

    world.quiet(c)
    job = world.journaled()
    assert (job.group, job.activate.seat, job.activate.gpus) == ("G1", a, ("GPU-1",))
    world.progress(job, "parked", "started", done=False)
    assert (world.state(a), world.state(c)) == (S.MIGRATING, S.PARKED)
    moved = world.last(SeatMoved)
    assert (moved.seat, moved.group) == (a, "G1")

    world.progress(job)
    assert (world.state(a), world.state(b)) == (S.ACTIVE, S.ACTIVE)
    row = record(world.node, world.managed(a), world.now)
    assert (row.group, row.home_group, row.gpus) == ("G1", "G0", (1,))
    activated = world.last(SeatActivated)
    assert (activated.seat, activated.group, activated.previous) == (a, "G1", S.MIGRATING)


@pytest.mark.parametrize("lanes", [(), (Lane(frozenset({"GPU-1"}), 1),)], ids=["no lanes", "its switch has the lane"])
def test_a_seat_that_is_asked_for_while_it_is_parked_comes_back_at_home(
    world: World, b: str, c: str, lanes: tuple[Lane, ...]
) -> None:
    world.configure(lanes=lanes)
    world.command(ParkSeat, b)
    world.quiet(b)
    world.finish()
    world.command(ParkSeat, c)
    world.quiet(c)
    job = world.journaled()
    world.traffic(c, waiting=1)
    world.progress(job, done=False)  # it is off the GPUs; that the job is over is reported a moment later
    assert (world.state(c), world.managed(c).group.name) == (S.PARKED, "G1")
    world.progress(job)
    assert (world.state(c), world.managed(c).group.name) == (S.ACTIVATING, "G1")


def test_a_faulty_gpu_draws_no_seats_from_elsewhere(world: World, a: str, b: str, c: str) -> None:
    world.command(ParkSeat, c)
    world.quiet(c)
    world.finish()
    world.receive(FaultyGpusSeen({"GPU-1": "xid 79"}))
    demand(world, a, b)
    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G0")
    assert "G1" not in world.node.switches
    refused = world.order(MigrateSeat, seat=a, to="G1")
    assert (refused.accepted, "GPU 1 is faulty: xid 79" in refused.reason) == (False, True)


def test_what_a_move_costs_is_learned_apart_from_activating(world: World, a: str, b: str) -> None:
    before = world.managed(a).durable.costs.activate_seconds
    assert moves.as_guest(world.node, world.managed(a), world.groups[1], world.now).move_seconds == 3.0
    world.progress(move(world, a, b))
    assert world.managed(a).durable.costs.activate_seconds == before
    assert world.node.move_seconds < 3.0


def test_a_moved_seat_is_parked_where_it_is_and_is_pulled_home_again(world: World, a: str, b: str, c: str) -> None:
    world.progress(move(world, a, b))
    world.traffic(a)
    world.traffic(b)
    world.later(20)
    world.traffic(c, waiting=3, oldest=2.0)  # at home; a is idle
    world.quiet(a)
    job = world.job()
    assert [target.gpus for target in job.park] == [("GPU-1",)]
    world.progress(job)
    assert (world.state(a), world.managed(a).group.name, world.state(c)) == (S.PARKED, "G1", S.ACTIVE)

    world.traffic(c, in_flight=3)
    world.later(20)
    world.traffic(a, waiting=2, oldest=1.0)
    assert world.state(b) is S.DRAINING
    world.leaves(b)
    assert (world.state(a), world.managed(a).group.name, world.moved(a)) == (S.ACTIVE, "G0", False)


def test_a_deleted_pod_holds_the_group_that_it_moved_to(world: World, a: str, b: str) -> None:
    world.progress(move(world, a, b))
    world.delete(a)
    assert (world.state(a), world.managed(a).group.name, world.managed(a).lease) == (S.RELEASING, "G1", True)
    world.vanish(a)
    world.end_processes(a)
    assert (world.state(a), world.managed(a).group.name) == (S.FREE, "G0")


@pytest.mark.parametrize(
    ("how", "why"),
    [("annotation", "opted out (kyb.ai/rebalance)"), ("backend", "backend vllm cannot restore"), ("", "")],
)
def test_what_cannot_move_is_not_offered_and_says_why(world: World, a: str, b: str, c: str, how: str, why: str) -> None:
    notes = {"annotation": {"kyb.ai/rebalance": "false"}, "backend": {"kyb.ai/backend": "vllm"}}.get(how, {})
    world.shows(a, annotations=world.pods[a].annotations | notes)
    demand(world, a, b)
    assert (world.state(c) is S.DRAINING) == (how == "")
    assert why in record(world.node, world.managed(a), world.now).fixed


def test_after_a_move_that_failed_it_is_known_how_the_seat_had_come_to_its_group() -> None:
    """It counted as at home, and what it had waited was forgotten."""
    world = pooled(3)
    (seat,) = world.fill("a")
    world.order(MigrateSeat, seat=seat, to="G1")
    world.finish()
    moved = world.managed(seat)
    moved.durable.waited = 7.0
    world.order(MigrateSeat, seat=seat, to="G2")
    world.leaves(seat)
    world.tick()
    assert (moved.state, moved.group.name, moved.durable.came_from) == (S.MIGRATING, "G2", "G1")
    world.progress(world.job(), activate="parked")
    assert (moved.state, moved.group.name) == (S.PARKED, "G1")
    assert (moved.durable.way, moved.durable.came_from, moved.durable.waited) == ("map", "G0", 7.0)


def test_a_refused_move_is_remembered_and_the_seat_comes_back_at_home(world: World, a: str, b: str, c: str) -> None:
    job = move(world, a, b)
    reported(world, job, a, "parked", move_refused="seat", reason=RESTORED)
    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G0")
    assert record(world.node, world.managed(a), world.now).fixed.startswith(RESTORED)
    assert world.node.groups["G1"].backoff.until <= world.wall  # nothing is wrong with that group

    world.later(5)
    assert "G1" not in world.node.switches
    world.traffic(b)
    world.later(5)
    world.leaves(b)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G0")

    restarted(world, a="GPU-0 active", b="GPU-0 parked", c="GPU-1 parked")
    assert world.managed(a).durable.fixed == RESTORED


def test_a_driver_that_cannot_move_at_all_is_asked_once(world: World, a: str, b: str) -> None:
    reason = "restoring to another GPU needs driver 580 or newer, this is 570.1"
    reported(world, move(world, a, b), a, "parked", move_refused="node", reason=reason)
    fixed = [record(world.node, row, world.now).fixed for row in world.node.seats.values() if row.pod]
    assert all(one.startswith(reason) for one in fixed)


def test_a_seat_that_was_lost_on_the_way_is_not_moved_again(world: World, a: str, b: str) -> None:
    reported(world, move(world, a, b), a, "lost", reason="restore: OUT_OF_MEMORY")
    assert (world.state(a), world.managed(a).group.name, world.managed(a).lease) == (S.LOST, "G1", True)
    world.end_processes(a)
    assert (world.state(a), world.managed(a).group.name) == (S.WAITING, "G0")
    text = "its engine did not survive a move, so it stays until its pod is replaced: restore: OUT_OF_MEMORY"
    assert world.managed(a).durable.fixed == text


def test_an_engine_that_falls_idle_is_not_parked_for_a_seat_that_comes_at_home_meanwhile() -> None:
    """The group that drains steps before the one that takes the seat; the next message is the engine's answer."""
    world = pooled(seats=3, policy=Pulls())
    (c,) = world.fill("c")
    a, b = world.fill("a", "b", group=1)
    world.tick(20)
    demand(world, a, b)
    world.answered(c)
    assert world.state(c) is S.DRAINING
    world.exit(b)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVATING, "G1")

    world.idle(c)

    assert world.state(c) is S.ACTIVE
    jobs = [effect for effect in world.effects if isinstance(effect, SwitchJob)]
    assert c not in [target.seat for job in jobs for target in job.park]


def test_two_groups_do_not_bring_back_the_same_seat(world: World, a: str, b: str, c: str) -> None:
    move(world, a, b)
    world.exit(b)
    assert (world.state(a), world.state(c)) == (S.PARKED, S.PARKING)
    assert set(world.node.switches) == {"G1"}
    world.progress(world.job())
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G1")


def test_a_group_with_a_foreign_process_lets_its_seats_go_elsewhere(world: World, a: str, b: str, c: str) -> None:
    world.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 4711, "python3"),)))
    world.traffic(b)
    assert record(world.node, world.managed(a), world.now).blocked == ""
    demand(world, a, b)
    assert world.state(c) is S.DRAINING
    world.receive(
        ForeignProcessesSeen((ForeignProcess("GPU-0", 4711, "python3"), ForeignProcess("GPU-1", 4712, "python3")))
    )
    assert world.state(c) is S.ACTIVE, "else it would be evicted for nothing"


def test_a_pin_elsewhere_keeps_its_slot(world: World, a: str, b: str, c: str) -> None:
    world.command(PinSeat, c)
    demand(world, a, b)
    assert world.state(c) is S.ACTIVE
    world.command(PinSeat, b)
    assert "kept by pinned" in world.wish(a).reason


# --- after a crash --------------------------------------------------------------------------------------------------


def test_a_manager_that_dies_while_the_victim_is_parked_goes_on_with_both(world: World, a: str, b: str, c: str) -> None:
    job = move(world, a, b)
    restarted(world, status(job, "started", "pending", done=False), a="GPU-0 parked", b="GPU-0 active")
    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, "G0")
    assert (world.state(c), world.managed(c).group.name, world.managed(c).lease) == (S.PARKING, "G1", True)
    world.progress(job)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G1")


def test_a_seat_that_was_parked_and_then_moved_is_in_two_jobs_and_the_later_counts(
    world: World, a: str, b: str, c: str
) -> None:
    job = move(world, a, b)
    earlier = SwitchJob(cause="c", node="n1", epoch=job.epoch - 1, op="G0-x", group="G0", park=(job.activate,))  # type: ignore[arg-type]
    jobs = (status(job, "parked", "started", done=False), status(earlier, "parked", done=False))
    restarted(world, *jobs, b="GPU-0 active")
    assert (world.state(a), world.managed(a).group.name, world.managed(a).lease) == (S.MIGRATING, "G1", True)


def test_gpus_of_no_group_any_more_are_remembered_for_the_seat_that_is_on_them() -> None:
    before = (make_group("G0", [0], 2, rebalance=True), make_group("G1", [1], 2, rebalance=True))
    machine = KnownGpus(tuple(make_gpu(index) for index in range(4)), (), ())
    entry = LedgerEntry(
        seat=before[0].seat_ids[0],
        state=S.ACTIVE,
        epoch=1,
        lease=True,
        pod="default/p",
        pod_uid="u",
        gpus=("GPU-0",),
        on=("GPU-1",),
    )
    now = (before[0], make_group("G12", [1, 2], 2))
    groups = with_owned(now, Ledger(seats=(entry,)), machine)
    assert [([gpu.uuid for gpu in group.gpus], group.seat_ids) for group in groups[2:]] == [(["GPU-1"], ())]
    assert with_owned(before, Ledger(seats=(entry,)), machine) == before


def back_while_its_successor_comes(world: World, a: str, b: str, c: str) -> None:
    """b was parked on G0 for a, which takes its time; meanwhile b went to G1, and is to leave there now, for c."""
    world.beat()
    world.traffic(a, waiting=2, oldest=1.0)
    world.quiet(b)
    slow = world.job()
    world.receive(JobAnswered(slow, JobReply(accepted=True)))
    world.progress(slow, "parked", "started", done=False)
    world.switch(c, b)
    world.progress(world.job())
    assert (world.state(b), world.managed(b).group.name) == (S.ACTIVE, "G1")
    world.traffic(b)
    world.later(5)
    world.traffic(c, waiting=1)
    assert (world.state(a), world.state(b), slow.group in world.node.switches) == (S.ACTIVATING, S.DRAINING, True)


def test_a_seat_leaves_again_although_its_successor_at_home_is_not_there_yet(
    world: World, a: str, b: str, c: str
) -> None:
    back_while_its_successor_comes(world, a, b, c)

    world.quiet(b)

    assert world.state(b) is S.PARKING
    assert (world.job().group, [target.seat for target in world.job().park]) == ("G1", [b])


def test_its_pod_may_go_meanwhile(world: World, a: str, b: str, c: str) -> None:
    back_while_its_successor_comes(world, a, b, c)
    world.delete(b)

    assert world.state(b) is S.RELEASING
    assert "G1" not in world.node.switches
    world.tick(100)


def test_other_groups_look_when_more_wait_and_not_at_every_signal(world: World, a: str, b: str) -> None:
    """Each router repeats each level; with many seats that move, looking everywhere each time would take the node."""
    looked: list[str] = []

    def looks(view: GroupView) -> Decision:
        looked.append(view.group)
        return Stay(None, "")

    world.configure(policy=By(looks))
    for seat, waiting in ((a, 2), (a, 2), (b, 0), (b, 0), (a, 3)):
        world.traffic(seat, waiting=waiting, in_flight=int(seat == b))
        looked.append(";")

    assert "".join(looked) == "G0G1;G0;G0;G0;G0G1;"


def test_a_move_that_fails_again_and_again_leaves_the_group_to_its_own_seats(
    world: World, a: str, b: str, c: str
) -> None:
    """The one that waits longest would be tried first each time, and pause the group with each failure."""
    reported(world, move(world, a, b), a, "parked", reason="it took too long", failed=True)
    assert (world.state(a), world.managed(a).group.name, world.managed(a).durable.fixed) == (S.PARKED, "G0", "")
    world.tick(1.0)
    assert "G1" not in world.node.switches

    world.traffic(c, waiting=1)
    assert world.state(c) is S.ACTIVATING
    world.progress(world.job())
    world.traffic(c)
    world.tick(40.0)
    world.router("router-0")
    demand(world, a, b)
    world.tick(1.0)
    assert world.node.switches["G1"].incoming == a, "later it is tried again"


@pytest.mark.parametrize("how", ["wish", "pin"])
def test_an_operators_wish_is_met_on_another_group_while_its_own_is_busy(
    world: World, a: str, b: str, c: str, how: str
) -> None:
    world.configure(policy=KybBalanced())
    world.beat()
    world.command(PinSeat, b)
    world.traffic(b, in_flight=3)

    reply = world.wish(a) if how == "wish" else world.command(PinSeat, a)

    assert reply.accepted
    assert world.state(c) is S.DRAINING
    world.leaves(c)
    assert (world.state(a), world.managed(a).group.name, world.state(b)) == (S.ACTIVE, "G1", S.ACTIVE)
    assert world.managed(a).usage.wanted_since is None


def spilled_guest_starts_at_home(world: World, a: str, b: str, c: str, *, journaled: bool = True) -> SwitchJob:
    """The guest a leaves G1 by a restart, for c, and starts at home as the next container. Returns the job of G1."""
    world.progress(move(world, a, b))
    assert (world.state(a), world.moved(a)) == (S.ACTIVE, True)
    world.managed(a).durable.spilled = "host memory is short"
    world.later(20)
    world.traffic(a)
    world.traffic(b, in_flight=3)
    job = world.switch(a, c, oldest=1.0)
    assert (job.group, job.park[0].seat, job.park[0].backend) == ("G1", a, "restart")
    if journaled:
        world.receive(JobAnswered(job, JobReply(accepted=True)))
        world.progress(job, "parked", "started", done=False)
    world.exit(a)
    world.traffic(b)
    world.traffic(a, waiting=1, oldest=1.0)
    world.later(20)
    world.call(a)
    world.quiet(b)
    world.progress(world.job_of(world.node.switches["G0"].op))
    world.start(a)
    assert (world.state(a), world.managed(a).lease) == (S.STARTING, True)
    return job


def test_a_guest_that_starts_at_home_keeps_no_successor_from_its_group(world: World, a: str, b: str, c: str) -> None:
    job = spilled_guest_starts_at_home(world, a, b, c, journaled=False)
    world.progress(job, "parked", "pending", done=False)
    assert world.state(c) is S.ACTIVATING


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_job_that_is_sent_again_does_not_park_the_next_container_of_its_victim(
    world: World, a: str, b: str, c: str, forgotten: bool
) -> None:
    job = spilled_guest_starts_at_home(world, a, b, c, journaled=forgotten)
    if forgotten:
        world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))
    world.tick(1.0)
    again = world.job_of(job.op)
    assert again is not job
    assert again.park == ()
    assert again.activate.seat == c


@pytest.mark.parametrize(("gpu", "group"), [("GPU-0", "G0"), ("GPU-1", "G1")])
def test_a_copy_whose_move_failed_is_where_the_driver_names_it(
    world: World, a: str, b: str, gpu: str, group: str
) -> None:
    job = move(world, a, b)
    reported(world, job, a, "quarantined")
    assert world.state(a) is S.QUARANTINED

    world.look_at(a, "parked", gpu)

    assert (world.state(a), world.managed(a).group.name) == (S.PARKED, group)
    assert world.managed(a).target().parked_on == (gpu,)


def test_each_group_of_a_pool_sees_what_is_said_of_itself() -> None:
    world = pooled(3)
    a, _ = world.fill("a", "b")
    world.tick(30)
    seat = world.managed(a)
    seat.pod = replace(seat.pod, annotations={"kyb.ai/prefer-group": "G2"})
    world.node.moved_views.clear()
    seen = [moves.full_view(world.node, group, world.now).elsewhere for group in world.groups[1:]]
    assert not any(seen), "nothing asks for it"
    seat.usage.wanted_since = world.now.model
    world.node.moved_views.clear()
    (first,), (second,) = (moves.full_view(world.node, group, world.now).elsewhere for group in world.groups[1:])
    assert (first.prefers, second.prefers) == (False, True)


def test_a_call_that_is_closed_to_one_group_is_seen_by_the_others() -> None:
    world = pooled(3)
    a, b = world.seat(0, 0), world.seat(0, 1)
    world.pod(a, "a")
    world.pod(b, "b")
    world.call(a)
    world.start(a)
    world.call(b)
    seat = world.managed(b)
    seat.gate.call = replace(seat.gate.call, inside=True, closed=frozenset({"G1"}))
    world.node.moved_views.clear()
    seen = [moves.full_view(world.node, group, world.now).elsewhere for group in world.groups[1:]]
    assert [[one.seat for one in each] for each in seen] == [[], [b]]


def test_a_group_that_is_cleared_for_a_seat_is_not_seen_as_one_that_gets_free(
    world: World, a: str, b: str, c: str
) -> None:
    """A seat that waits on another group would wait for it in vain."""
    demand(world, a, b)
    switch = world.node.switches["G1"]
    assert (switch.victim, switch.beneficiary, world.state(c)) == (c, a, S.DRAINING)

    (peer,) = moves.full_view(world.node, world.node.groups["G0"].group, world.now).peers

    assert (peer.group, peer.free, peer.frees_in) == ("G1", False, None)
