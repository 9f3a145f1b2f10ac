"""What operators order: moves, drains, their end. Each is a level: set, taken away, and it survives the manager."""

import pytest

from kybernate.messages import (
    ActivateSeat,
    DrainNode,
    JobReply,
    MigrateSeat,
    ParkSeat,
    PinSeat,
    ResumeNode,
)
from kybernate.seat import SeatState as S
from services.gpu_manager import publish
from services.gpu_manager.core import recovery
from services.gpu_manager.core.inputs import (
    BusChanged,
    ForeignProcess,
    ForeignProcessesSeen,
    JobAnswered,
    JobsReported,
    StartTicket,
)
from services.gpu_manager.core.obstacles import ordered_to
from services.gpu_manager.core.riders.operations import KEPT_SECONDS, MOVE_SECONDS, drain_on
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import record
from tests.manager.test_recovery import restart
from tests.manager.world import World, booted, make_group, nested, pooled


@pytest.fixture
def soft() -> World:
    """a is parked and b active on G0; c is active on G1. Seats may move between the two."""
    world = pooled()
    world.fill("a", "b", group=0)
    world.fill("c", group=1)
    world.later(10)
    return world


def waits_to_move(soft: World) -> tuple[str, str]:
    """b, parked, is ordered to G1, whose c is busy."""
    b, c = soft.seat(0, 1), soft.seat(1, 0)
    soft.traffic(c, in_flight=1)
    soft.order(MigrateSeat, seat=b, to="G1")
    soft.finish()
    assert soft.state(b) is S.PARKED
    return b, c


def holders(world: World) -> set[str]:
    return {seat.model for seat in world.node.seats.values() if seat.lease}


# --- drain ------------------------------------------------------------------------------------------------------------


def test_a_drained_group_parks_its_seat_and_starts_and_activates_nothing_until_it_is_resumed(world: World) -> None:
    a, b = world.fill("a", "b")
    world.traffic(b, in_flight=1)

    drain = world.ordering(DrainNode, group="G0")

    assert (drain.text, drain.actor) == ("b is to be parked", "alice")
    assert world.state(b) is S.DRAINING
    world.traffic(b)
    world.finish()
    assert (world.state(a), world.state(b)) == (S.PARKED, S.PARKED)
    assert world.ordered().outcome == "done"
    world.traffic(a, waiting=3)
    c = world.seat(0, 2)
    world.at_gate(c, "c")
    world.tick(30)
    assert holders(world) == set()
    assert "group G0 is drained for maintenance by alice" in publish.gate_texts(world.node, world.now)[c]
    assert "kyb resume group G0" in record(world.node, world.managed(a), world.now).blocked

    resumed = world.ordering(ResumeNode, group="G0")

    assert (resumed.outcome, resumed.text) == ("done", "group G0: seats are started and activated again")
    world.beat()
    world.tick(1)
    assert holders(world) != set()


def test_a_request_for_a_drained_seat_is_refused_with_the_reason_and_taken_after_the_resume(world: World) -> None:
    a, _ = world.fill("a", "b")
    world.order(DrainNode, group="G0", purpose="upgrade")
    for kind in (ActivateSeat, PinSeat):
        refused = world.command(kind, a)
        assert (refused.accepted, refused.code) == (False, "drained")
        assert "group G0 is drained for upgrade by alice; it ends with: kyb resume group G0" in refused.reason
    assert world.command(ParkSeat, a).accepted
    world.order(ResumeNode, group="G0")
    assert world.command(ActivateSeat, a).accepted


def test_a_seat_that_may_move_is_not_refused_and_is_activated_on_another_group(soft: World) -> None:
    b, c = soft.seat(0, 1), soft.seat(1, 0)
    soft.order(DrainNode, group="G0")
    soft.finish()
    assert soft.state(b) is S.PARKED
    assert soft.command(ActivateSeat, b, actor="router").accepted
    soft.traffic(b, waiting=1, oldest=30.0)
    soft.finish()
    assert (soft.state(b), soft.managed(b).group.name) == (S.ACTIVE, "G1")
    assert soft.state(c) is S.PARKED
    assert record(soft.node, soft.managed(b), soft.now).drained == ""


def test_all_groups_of_a_drained_node_are_empty_and_a_group_alone_cannot_be_resumed(world: World) -> None:
    world.fill("a", "b")
    world.fill("p", group=1)
    world.order(DrainNode, purpose="upgrade")
    world.finish()
    assert holders(world) == set()
    refused = world.order(ResumeNode, group="G0")
    assert (refused.accepted, refused.code) == (False, "drained")
    assert "kyb resume node n1" in refused.reason
    world.order(DrainNode, group="G0")
    assert "still drained: group G0" in world.ordering(ResumeNode).text


def test_the_gpus_of_a_drained_group_are_empty_whatever_group_uses_them() -> None:
    world = nested()
    (pair,) = world.fill("p", group=2)
    world.order(DrainNode, group="G0")
    world.finish()
    assert world.state(pair) is S.PARKED
    world.traffic(pair, waiting=1)
    single = world.seat(1, 0)
    world.at_gate(single, "s")
    assert world.state(single) is S.STARTING, "GPU 1 is free for its own group"
    world.tick(60)
    assert world.state(pair) is S.PARKED
    assert not world.node.claims


def test_pinned_seats_are_named_and_only_an_upgrade_parks_them(world: World) -> None:
    (a,) = world.fill("a")
    world.command(PinSeat, a)
    refused = world.order(DrainNode, group="G0")
    assert (refused.accepted, refused.code) == (False, "pinned")
    assert refused.reason.startswith("pinned a would stay")
    assert world.order(DrainNode, group="G0", purpose="upgrade").accepted
    world.finish()
    assert world.state(a) is S.PARKED
    world.order(ResumeNode, group="G0")
    world.tick(1)
    world.finish()
    assert world.state(a) is S.ACTIVE, "it is still pinned"


def test_a_seat_whose_pod_is_pinned_during_a_drain_stays_unless_it_is_for_an_upgrade(world: World) -> None:
    (a,) = world.fill("a")
    world.receive(BusChanged(False))
    assert world.order(DrainNode, group="G0").accepted
    world.annotate(a, pin="true")
    world.receive(BusChanged(True))
    world.tick(5)
    assert world.state(a) is S.ACTIVE
    again = world.ordering(DrainNode, group="G0")
    assert (again.outcome, again.text) == ("", "a is pinned")
    assert world.order(DrainNode, group="G0", purpose="upgrade").accepted
    assert world.state(a) is S.DRAINING


def test_a_drain_that_is_ordered_again_goes_on_as_it_was(world: World) -> None:
    world.fill("a")
    world.order(DrainNode, group="G0")
    first = world.node.drains["G0"]
    world.tick()

    again = world.ordering(DrainNode, group="G0")

    assert again.text.startswith("a drains")
    assert world.node.drains == {"G0": first}


def test_a_seat_that_starts_while_its_group_is_drained_is_parked_once_it_serves(world: World, a: str) -> None:
    world.at_gate(a, "a")
    world.order(DrainNode, group="G0")
    assert "a starts on group G0" in world.ordered().text
    world.start(a)
    world.healthy(a)
    world.finish()
    assert world.state(a) is S.PARKED
    assert world.ordered().outcome == "done"


@pytest.mark.parametrize("drained", [True, False], ids=["drained", "foreign process"])
def test_a_start_that_is_called_again_gets_no_second_ticket_on_a_drained_group(
    world: World, a: str, *, drained: bool
) -> None:
    world.at_gate(a, "a")
    assert world.state(a) is S.STARTING
    if drained:
        world.order(DrainNode, group="G0")
    else:
        world.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 7, "python3"),)))
    world.call(a)
    world.look(2)
    assert len([effect for effect in world.effects if isinstance(effect, StartTicket)]) == 1


def test_a_switch_under_way_goes_on_without_its_incoming_seat(world: World) -> None:
    a, b = world.draining()
    world.order(DrainNode, group="G23")
    assert world.node.switches["G0"].incoming == a
    world.order(DrainNode, group="G0")
    world.finish()
    assert world.job().activate is None
    assert (world.state(a), world.state(b)) == (S.PARKED, S.PARKED)


def test_a_drain_waits_for_the_seat_that_a_job_under_way_brings(world: World) -> None:
    """The checkpointer activates it in any case, also before the manager has given it the lease."""
    a, b = world.drained_switch()
    job = world.job()
    world.order(DrainNode, group="G0")
    assert world.node.switches["G0"].incoming == a

    world.progress(job, activate="pending", done=False)

    assert world.state(b) is S.PARKED
    assert world.managed(a).lease
    assert world.ordered().outcome != "done"
    world.progress(job)
    world.traffic(a)
    world.finish()
    assert (holders(world), world.ordered().outcome) == (set(), "done")


def test_a_job_that_the_checkpointer_forgot_is_sent_again_without_the_seat_that_was_to_come(world: World) -> None:
    _a, b = world.drained_switch()
    job = world.journaled()
    assert job.activate is not None
    world.order(DrainNode, group="G0")
    world.receive(JobsReported(JobReply(accepted=True), asked=(job.op,)))
    assert [target.seat for target in world.job().park] == [b]
    assert world.job().activate is None


@pytest.mark.parametrize("refused", [False, True])
def test_a_park_that_fails_is_tried_again_after_its_back_off(world: World, *, refused: bool) -> None:
    (a,) = world.fill("a")
    world.order(DrainNode, group="G0")
    world.quiet(a)
    if refused:
        world.receive(JobAnswered(world.job(), JobReply(accepted=False, code="unsupported")))
    else:
        world.progress(world.job(), "active")
    assert world.state(a) is S.ACTIVE
    assert not world.ordered().outcome
    for _ in range(100):
        world.later(1.0)
        if world.state(a) is S.DRAINING:
            break
    world.finish()
    assert world.ordered().outcome == "done"


def test_an_upgrade_names_the_pods_whose_parked_engines_still_use_the_driver(world: World) -> None:
    world.fill("a", "b")
    world.order(DrainNode, purpose="upgrade")
    world.finish()
    asked = world.ordering(DrainNode, purpose="upgrade")
    assert "2 pods still use the driver until they are removed: default/a, default/b" in asked.text


# --- levels -----------------------------------------------------------------------------------------------------------


def test_a_second_drain_of_the_same_group_takes_over(world: World) -> None:
    (a,) = world.fill("a")
    world.traffic(a, in_flight=1)
    world.order(DrainNode, group="G0")
    world.order(DrainNode, group="G0", purpose="upgrade")
    assert [one.purpose for one in world.node.drains.values()] == ["upgrade"]
    for text in ("seats are started and activated again", "it was not drained"):
        assert text in world.ordering(ResumeNode, group="G0").text
    assert not world.node.drains


def test_a_dry_run_of_an_older_release_is_refused_and_changes_nothing(soft: World) -> None:
    for refused in (
        soft.order(DrainNode, group="G0", dry_run=True),
        soft.order(MigrateSeat, seat=soft.seat(0, 1), to="G1", dry_run=True),
    ):
        assert (refused.accepted, refused.code) == (False, "unsupported")
    assert (soft.node.drains, soft.node.moves) == ({}, {})
    assert "it has G0, G1" in soft.order(DrainNode, group="G7").reason


def test_a_move_that_is_ordered_again_goes_on_and_is_called_off_by_the_group_that_the_seat_is_on(soft: World) -> None:
    b, c = waits_to_move(soft)
    first = soft.node.moves[b]
    soft.tick()
    again = soft.ordering(MigrateSeat, seat=b, to="G1")
    assert (again.outcome, again.begun_at, soft.node.moves) == ("", first.begun, {b: first})
    off = soft.ordering(MigrateSeat, seat=b, to="G0")
    assert (off.outcome, off.text, soft.node.moves) == ("done", "b is parked on group G0", {})
    soft.traffic(c)
    for _ in range(5):
        soft.later(5)
        soft.finish()
    assert soft.managed(b).group.name == "G0"


# --- the manager dies -------------------------------------------------------------------------------------------------


def test_a_manager_that_dies_in_the_middle_of_a_drain_goes_on_with_it(world: World) -> None:
    a, b = world.fill("a", "b")
    world.order(DrainNode, group="G0")
    world.announce(b)
    assert world.state(b) is S.DRAINING

    restart(world)

    world.later(5)
    world.traffic(a, waiting=1)
    world.finish()
    assert holders(world) == set()
    assert world.ordering(DrainNode, group="G0").outcome == "done"
    assert world.command(ActivateSeat, a).code == "drained"


def test_a_manager_that_dies_in_the_middle_of_a_move_goes_on_with_it(soft: World) -> None:
    b, _ = waits_to_move(soft)

    restart(soft)

    arrives(soft, b)


def test_a_drain_outlives_a_change_of_the_groups(world: World) -> None:
    world.order(DrainNode, group="G0")
    kept = Ledger.model_validate_json(recovery.ledger(world.node, "boot").model_dump_json())
    other = World(groups=(make_group("G01", [0, 1], 2), make_group("G2", [2], 1)))
    restart(other, ledger=kept)
    assert [drain_on(other.node, group) is not None for group in other.groups] == [True, False]
    other.tick(5)
    assert other.order(ResumeNode, group="G0").accepted
    assert not other.node.drains


def test_a_drain_that_is_ordered_again_is_about_the_gpus_that_the_group_has_now(world: World) -> None:
    """Its GPUs are known by their UUIDs: those that the group had when it was ordered."""
    world.order(DrainNode, group="G0")
    kept = Ledger.model_validate_json(recovery.ledger(world.node, "boot").model_dump_json())
    other = World(groups=(make_group("G0", [2], 1), make_group("G1", [3], 1)))
    restart(other, ledger=kept)
    other.routers["router-0"] = "a"
    other.beat()
    (a,) = other.fill("a")
    assert other.state(a) is S.ACTIVE

    again = other.ordering(DrainNode, group="G0")

    assert (again.outcome, again.text) == ("", "a is to be parked")
    other.later(5)
    other.finish()
    assert (other.state(a), other.ordered().outcome) == (S.PARKED, "done")


def test_orders_of_an_older_manager_go_on_and_those_that_are_over_are_forgotten(soft: World) -> None:
    """It named each, and kept 32 that were over."""
    b = soft.seat(0, 1)
    drain = {"verb": "drain", "target": "G1", "purpose": "upgrade", "gpus": ["GPU-1"], "actor": "bob", "begun": 5.0}
    old = recovery.ledger(soft.node, "boot").model_dump(mode="json") | {
        "orders": [
            {"op": "one", **drain, "outcome": "done", "reason": "no seat holds a GPU of group G1"},
            {"op": "two", **drain, "target": "G0", "outcome": "cancelled", "reason": "resumed by three"},
            {"op": "three", "verb": "resume", "target": "G0", "outcome": "done"},
            {"op": "four", "verb": "migrate", "target": b, "to": "G1", "actor": "eve", "begun": float(soft.now.unix)},
            {"op": "five", "verb": "migrate", "target": "s-gone", "to": "G1", "begun": float(soft.now.unix)},
            {"op": "six", "verb": "migrate", "target": soft.seat(0, 0), "to": "G1", "outcome": "done"},
        ],
        "drains": ["one"],
    }
    restart(soft, ledger=Ledger.model_validate(old))
    assert {name: (one.purpose, one.actor, one.begun) for name, one in soft.node.drains.items()} == {
        "G1": ("upgrade", "bob", 5.0)
    }
    assert {name: (one.to, bool(one.outcome)) for name, one in soft.node.moves.items()} == {
        b: ("G1", True),
        "s-gone": ("G1", True),
    }
    assert "is drained for upgrade by bob" in soft.ordered(b).text
    assert "no such seat or group" in soft.ordered("s-gone").text
    again = recovery.ledger(soft.node, "boot").model_dump(mode="json")
    kept = {one["op"]: one for one in again["orders"]}
    assert again["drains"] == ["one"], "an older manager finds the drain in force by its name"
    assert (kept["one"]["target"], kept["one"]["gpus"], kept["one"]["verb"]) == ("G1", ["GPU-1"], "drain")


# --- moves ------------------------------------------------------------------------------------------------------------


def test_its_own_group_does_not_bring_it_back_meanwhile(soft: World) -> None:
    b, _ = waits_to_move(soft)
    soft.traffic(b, waiting=1)
    soft.tick(1.0)
    assert soft.state(b) is S.PARKED, "G0 is free, and leaves it to G1"
    assert soft.stage(b).stage in ("policy", "minimum-active-time")


def on_its_way(world: World) -> str:
    """b is being restored on G1, which was free."""
    b = world.seat(0, 1)
    world.command(ParkSeat, world.seat(1, 0))
    world.finish()
    world.order(MigrateSeat, seat=b, to="G1")
    for _ in range(10):
        if world.state(b) is S.MIGRATING:
            break
        world.quiet(b) if world.state(b) is S.DRAINING else world.tick(1.0)
        world.beat()
        if world.state(b) is S.PARKING:
            world.progress(world.job())
    assert world.state(b) is S.MIGRATING
    return b


def arrives(soft: World, b: str) -> None:
    """The move goes on to its end."""
    for _ in range(5):
        soft.later(2.0)
        soft.finish()
    assert (soft.state(b), soft.managed(b).group.name, soft.node.moves) == (S.ACTIVE, "G1", {})


def test_a_move_that_had_no_room_yet_or_was_undone_by_a_restart_of_the_checkpointer_goes_on(soft: World) -> None:
    b = on_its_way(soft)
    soft.progress(soft.job(), activate="parked")
    assert (soft.state(b), soft.ordered(b).outcome) == (S.PARKED, "")
    arrives(soft, b)


def test_a_move_waits_for_a_process_that_may_end_in_a_moment(soft: World) -> None:
    b, c = waits_to_move(soft)
    soft.receive(ForeignProcessesSeen((ForeignProcess("GPU-1", 7, "python3"),)))
    soft.traffic(c)
    soft.tick(30)
    assert (soft.state(b), soft.ordered(b).outcome) == (S.PARKED, "")
    assert "python3 (pid 7) on GPU 1 belongs to no seat" in soft.stage(b).text
    soft.receive(ForeignProcessesSeen(()))
    arrives(soft, b)


def test_a_move_that_never_gets_its_turn_fails_after_its_time(soft: World) -> None:
    b, c = soft.seat(0, 1), soft.seat(1, 0)
    soft.command(PinSeat, c)
    assert soft.order(MigrateSeat, seat=b, to="G1").code == "pinned"
    soft.node.seats[c].durable.pinned = False
    soft.order(MigrateSeat, seat=b, to="G1")
    soft.node.seats[c].durable.pinned = True
    soft.finish()
    soft.tick(MOVE_SECONDS + 1)
    assert soft.ordered(b).outcome == "failed"
    assert "pinned" in soft.ordered(b).text
    assert soft.managed(b).reason == f"not moved to group G1: {soft.ordered(b).text}"
    soft.tick(KEPT_SECONDS)
    assert not soft.node.moves


def test_a_pod_that_leaves_ends_its_move(soft: World) -> None:
    b = soft.seat(0, 1)
    soft.order(MigrateSeat, seat=b, to="G1")
    soft.exit(b)
    assert soft.ordered(b).outcome == "failed"
    assert not ordered_to(soft.node, soft.managed(b))


@pytest.mark.parametrize(
    ("to", "code", "text"),
    [
        ("G23", "cannot-use", "GPUs: it has 2, the seat needs 1"),
        ("G9", "unknown-group", "node n1 has no group G9; it has G0, G1, G4, G23"),
        ("G4", "cannot-use", "of one profile"),
    ],
)
def test_a_group_that_the_seat_cannot_use_is_named_with_the_reason(to: str, code: str, text: str) -> None:
    groups = (
        make_group("G0", [0], 2, rebalance=True),
        make_group("G1", [1], 2, rebalance=True),
        make_group("G4", [4], 2, slots=2),
        make_group("G23", [2, 3], 2),
    )
    object.__setattr__(groups[2].profile, "name", "another")
    world = booted(*groups)
    (a,) = world.fill("a")
    refused = world.order(MigrateSeat, seat=a, to=to)
    assert (refused.accepted, refused.code) == (False, code)
    assert text in refused.reason


def test_what_else_cannot_be_moved_is_named(soft: World) -> None:
    a, b, free = soft.seat(0, 0), soft.seat(0, 1), soft.seat(1, 1)
    soft.receive(ForeignProcessesSeen((ForeignProcess("GPU-1", 7, "python3"),)))
    assert soft.order(MigrateSeat, seat=b, to="G1").code == "blocked"
    soft.receive(ForeignProcessesSeen(()))
    soft.order(DrainNode, group="G1")
    assert soft.order(MigrateSeat, seat=b, to="G1").code == "drained"
    soft.order(ResumeNode, group="G1")
    soft.command(PinSeat, b)
    assert soft.order(MigrateSeat, seat=b, to="G1").code == "pinned"
    soft.command(ParkSeat, c := soft.seat(1, 0))
    assert soft.order(MigrateSeat, seat=c, to="G0").code == "not-active"
    for unknown in (free, "1x-nope.s00"):
        assert soft.order(MigrateSeat, seat=unknown, to="G1").code == "unknown-seat"
    soft.annotate(a, rebalance="false")
    assert "opted out" in soft.order(MigrateSeat, seat=a, to="G1").reason
    assert soft.ordering(MigrateSeat, seat=a, to="G0").outcome == "done"
    plain = booted(make_group("G0", [0], 2), make_group("G1", [1], 2))
    (seat,) = plain.fill("a")
    assert "rebalance: false" in plain.order(MigrateSeat, seat=seat, to="G1").reason
