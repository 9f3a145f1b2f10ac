"""Moves by a start of the engine on another group: of seats at the gate, and of parked ones that drop their copy."""

from dataclasses import replace

import pytest

from kybernate.messages import JobProgress, JobStatus, KillJob, MigrateSeat
from kybernate.policy import KybBalanced
from kybernate.seat import SeatState as S
from services.gpu_manager.core import moves, recovery, view
from services.gpu_manager.core.facts import Promise
from services.gpu_manager.core.inputs import SeatTicket, StartCall, StartCalls, StartTicket
from services.gpu_manager.core.obstacles import MOVING, Ask, heads_to, obstacles
from services.gpu_manager.core.starts import INSIDE_SECONDS
from services.gpu_manager.failures import Failures
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.publish import record
from tests.manager.pulling import Pulls
from tests.manager.world import World, booted, make_group


@pytest.fixture
def world() -> World:
    """Two pairs that are one moves."""
    groups = (make_group("G01", [0, 1], 3, rebalance=True), make_group("G23", [2, 3], 3, rebalance=True))
    return booted(*groups, policy=Pulls(), warmup=False)


def keeps(world: World, seat: str) -> None:
    """kyb-run is in front of the seat's engine."""
    world.shows(seat, restarts_inside=True)


def call(world: World, seat: str, *, inside: bool = True, closed: str = "") -> list[object]:
    """The start gate is asked, by kyb-run or by kubelet."""
    world.started += 1
    made = StartCall(f"call-{world.started}", world.now.unix, world.now.unix + 25, inside, frozenset({closed}))
    world.calls[seat] = made
    return world.receive(StartCalls(dict(world.calls)))


def comes_to_the_gate(world: World, seat: str, *, inside: bool = True, closed: str = "") -> None:
    """The same, and two observations of the pods prove whose call it is."""
    call(world, seat, inside=inside, closed=closed)
    world.look(2)


def tickets(world: World, seat: str) -> list[str]:
    """The groups of its tickets; empty: its home."""
    return [ticket.group for ticket in world.sent(StartTicket, seat)]


def comes_up(world: World, seat: str, model: str, backend: str) -> None:
    world.pod(seat, model, backend=backend)
    world.traffic(seat, waiting=1)
    world.call(seat)
    world.finish()
    world.start(seat)
    keeps(world, seat)
    world.healthy(seat)


def busy_home(world: World, backend: str = "unload") -> tuple[str, str]:
    """Seats a and b of G01: a is parked, b serves and is busy. kyb-run is in front of both."""
    a, b = world.seat(0, 0), world.seat(0, 1)
    comes_up(world, a, "a", backend)
    world.traffic(a, waiting=0)
    comes_up(world, b, "b", backend)
    world.traffic(b, in_flight=3)
    assert world.state(b) is S.ACTIVE
    return a, b


def dropped(world: World, seat: str) -> None:
    """The checkpointer has ended the engine of a parked seat."""
    assert isinstance(world.last(KillJob), KillJob)
    assert world.managed(seat).facts.promise is Promise.DROPS
    world.end_processes(seat)
    assert (world.state(seat), world.managed(seat).acts_as is S.WAITING) == (S.PARKED, True)


def called_again(world: World, seat: str) -> None:
    """The checkpointer has ended its engine, and kyb-run calls."""
    dropped(world, seat)
    comes_to_the_gate(world, seat)


def arrives(world: World, seat: str) -> None:
    """What the ticket permits is done: its engine runs, and is healthy."""
    world.start(seat)
    world.healthy(seat)


def leaves(world: World, seat: str) -> None:
    """Its last request ends, and it is parked."""
    world.traffic(seat, in_flight=0)
    world.tick(5)
    world.finish()
    world.tick()


def away(world: World) -> str:
    """Seat a of G01 has a ticket for G23, and its engine has not come yet."""
    a, _ = busy_home(world)
    world.traffic(a, waiting=2)
    called_again(world, a)
    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G23")
    return a


def test_a_seat_at_the_gate_starts_on_another_group_while_its_own_is_busy(world: World) -> None:
    a, b = busy_home(world, "restart")
    call(world, a)
    world.end_processes(a)
    world.look(2)
    assert world.managed(a).acts_as is S.WAITING
    assert moves.seconds(world.node, world.managed(a)) == 0.0, "it starts in any case"
    world.traffic(a, waiting=2)
    assert tickets(world, a) == ["", "G23"]
    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G23")
    arrives(world, a)
    assert (world.state(a), world.managed(a).group.name, world.state(b)) == (S.ACTIVE, "G23", S.ACTIVE)
    assert heads_to(world.node, world.managed(a)) == ""


def test_a_seat_at_the_gate_waits_for_its_call_then_for_a_request_and_then_for_more(world: World) -> None:
    a, fresh = busy_home(world, "restart")[0], world.seat(1, 0)
    world.pod(fresh, "c", backend="restart")
    found = []
    for seat in (a, fresh):
        found.append(world.stage(seat).data.get("called"))
        comes_to_the_gate(world, seat)
        found.append(world.stage(seat).data.get("called"))
    world.calls.clear()
    world.receive(StartCalls({}))
    world.traffic(a, waiting=1)
    found.append(world.stage(a).data.get("called"))
    assert found == [False, True, False, True, None]
    assert (world.stage(a).stage, world.state(a), world.state(fresh)) == ("start-gate", S.PARKED, S.WAITING)


@pytest.mark.parametrize("backend", ["restart", "cuda"])
def test_kubelets_call_of_the_same_seat_starts_at_home_only(world: World, backend: str) -> None:
    a, _ = busy_home(world, backend)
    world.exit(a)
    assert view.way(world.node, world.managed(a)) == "", "its container has to start first"
    comes_to_the_gate(world, a, inside=False)
    world.traffic(a, waiting=2)
    assert (world.managed(a).acts_as, view.way(world.node, world.managed(a))) == (S.WAITING, "")
    assert tickets(world, a) == [""]


def test_a_seat_of_whose_home_a_gpu_is_gone_starts_on_another_group_only(world: World, a: str) -> None:
    """The plugin refused kyb-run by the GPUs of its home, wherever it could start."""
    comes_up(world, a, "a", "restart")
    world.exit(a)
    comes_to_the_gate(world, a, inside=False, closed="G01")
    found = [one.text for one in obstacles(world.node, world.managed(a), world.groups[0], world.now)]
    assert "the start that waits cannot be on group G01: a GPU of it is gone, or not in its container" in found
    assert (world.state(a), tickets(world, a)) == (S.WAITING, [""])
    call(world, a, closed="G01")
    world.look()
    assert tickets(world, a) == ["", "G23"], "although its home is free"
    arrives(world, a)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G23")


def test_a_start_whose_gpu_goes_before_it_has_begun_gets_no_second_ticket_for_that_group(world: World) -> None:
    a, b = busy_home(world, "restart")
    call(world, a)
    for seat in (b, a):
        world.end_processes(seat)
    world.look(2)
    world.traffic(a, waiting=2)
    assert (tickets(world, a), world.state(a)) == (["", ""], S.STARTING)
    comes_to_the_gate(world, a, closed="G01")
    assert (tickets(world, a), world.state(a)) == (["", ""], S.STARTING), "kyb-run may fork by the one before"
    world.tick(INSIDE_SECONDS + 1)
    world.look_at(a, "gone")
    assert (tickets(world, a)[:2], world.managed(a).group.name == "G01" and world.managed(a).lease) == (["", ""], False)


def test_a_parked_seat_drops_its_copy_and_starts_on_another_group(world: World) -> None:
    a, _ = busy_home(world)
    assert world.state(a) is S.PARKED
    world.managed(a).durable.waited = 50.0
    world.traffic(a, waiting=2)
    assert heads_to(world.node, world.managed(a)) == "G23"
    called_again(world, a)
    assert tickets(world, a) == ["", "G23"]
    arrives(world, a)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G23")
    assert not world.managed(a).durable.spilled
    assert world.managed(a).durable.waited == 0.0
    assert not world.managed(a).backoff.move.active(world.now), "it may move on at once"
    started, active = (next(e for e in world.events(a)[::-1] if e.state is state) for state in (S.STARTING, S.ACTIVE))
    assert {(e.came_from, e.group, e.way) for e in (started, active)} == {("G01", "G23", "restart")}
    assert started.reason == "from group G01, started here: its place is kept here"
    row = record(world.node, world.managed(a), world.now)
    assert (row.home_group, row.group, row.way) == ("G01", "G23", "restart")


def test_a_parked_seat_keeps_its_copy_where_its_container_lacks_the_other_group(world: World, a: str, b: str) -> None:
    world.pod(a, "a", backend="unload")
    world.traffic(a, waiting=1)
    call(world, a, inside=False, closed="G23")
    arrives(world, a)
    keeps(world, a)
    world.traffic(a)
    comes_up(world, b, "b", "unload")
    world.traffic(b, in_flight=3)
    world.traffic(a, waiting=2)
    assert (world.state(a), heads_to(world.node, world.managed(a)), world.managed(a).durable.spilled) == (
        S.PARKED,
        "",
        "",
    )
    refused = world.order(MigrateSeat, seat=a, to="G23")
    assert (refused.code, "a cannot use group G23: its container was made without" in refused.reason) == (
        "cannot-use",
        True,
    )
    leaves(world, b)
    assert (world.state(a), world.managed(a).group.name) == (S.ACTIVE, "G01")


@pytest.mark.parametrize("backend", ["cuda", "unload"])
def test_seats_behind_a_start_that_hangs_are_guests_of_a_busy_group(world: World, backend: str) -> None:
    """Whichever way they have: one that would lose its copy was held to its own group for as long as that start."""
    world.configure(policy=KybBalanced())
    a, b, c = world.seat(0, 0), world.seat(0, 1), world.seat(1, 0)
    for seat, model in ((a, "a"), (b, "b"), (c, "c")):
        comes_up(world, seat, model, backend)
        world.traffic(seat)
        world.tick(5)
    world.traffic(c, in_flight=1)
    world.pods[b] = replace(world.pods[b], restarts_inside=False)
    world.exit(b)
    world.traffic(b, waiting=1)
    world.call(b)
    world.finish()
    world.start(b)
    assert (world.state(a), world.state(b), world.state(c)) == (S.PARKED, S.STARTING, S.ACTIVE)
    world.node.learning.durations[f"b {backend} starting"] = [60.0]
    world.wait(120.0)
    world.traffic(a, waiting=5)
    leaves_for = []
    for _ in range(4):
        world.wait(65.0)
        world.beat()
        leaves_for.append([one.incoming for one in world.node.switches.values()])
    assert leaves_for[-1] == [a], leaves_for


def test_a_copy_that_cannot_be_dropped_gives_the_place_back_and_its_seat_stays_for_a_while(world: World) -> None:
    a, _ = busy_home(world)
    world.traffic(a, waiting=2)
    assert world.last(KillJob).target.seat == a
    failed = world.seen(a, "quarantined", reason="no")
    ended = JobStatus(op="k", epoch=9, group="G01", park=(failed,), done=True)
    world.receive(JobProgress(cause="k", node="n1", status=ended))
    world.tick()
    seat, kills = world.managed(a), sum(isinstance(effect, KillJob) for effect in world.effects)
    assert (seat.state, seat.group.name, heads_to(world.node, seat), kills) == (S.PARKED, "G01", "", 1)
    assert seat.facts.promise is Promise.NONE
    world.tick(60)
    assert heads_to(world.node, seat) == "G23", "then it is tried again"


def test_its_place_is_kept_while_it_drops_its_copy_and_no_other_seat_drops_its_own_for_it(world: World) -> None:
    a, b = busy_home(world)
    c = world.seat(0, 2)
    world.traffic(b, in_flight=0)
    comes_up(world, c, "c", "unload")
    world.traffic(c, in_flight=3)
    world.finish()
    assert [world.state(one) for one in (a, b, c)] == [S.PARKED, S.PARKED, S.ACTIVE]
    world.traffic(a, waiting=2, oldest=5.0)
    world.traffic(b, waiting=2, oldest=1.0)
    world.tick()
    assert [heads_to(world.node, world.managed(one)) for one in (a, b)] == ["G23", ""]
    at_home = MOVING.holds(Ask(world.node, world.managed(a).home, world.now, world.managed(a)))
    assert at_home is not None
    assert at_home.text.endswith("is to start on group G23"), "so its home evicts no seat for it"
    world.tick(31)
    assert heads_to(world.node, world.managed(a)) == "", "it did not come in time"


def test_a_seat_that_comes_takes_its_place_before_the_seats_there_that_ask_meanwhile(world: World) -> None:
    a, _ = busy_home(world)
    c = world.seat(1, 0)
    comes_up(world, c, "c", "unload")
    world.traffic(c, in_flight=0)
    world.traffic(a, waiting=2)
    world.finish()
    assert (world.state(c), heads_to(world.node, world.managed(a))) == (S.PARKED, "G23")
    dropped(world, a)
    world.traffic(c, waiting=1, oldest=9.0)
    comes_to_the_gate(world, a)
    assert (world.state(a), world.managed(a).group.name, world.state(c)) == (S.STARTING, "G23", S.PARKED)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_seat_that_will_not_come_gives_its_place_back_at_once(world: World, *, deleted: bool) -> None:
    a, _ = busy_home(world)
    world.traffic(a, waiting=2)
    assert heads_to(world.node, world.managed(a)) == "G23"
    if deleted:
        world.delete(a)
        assert world.state(a) is S.RELEASING
    else:
        dropped(world, a)
        world.traffic(a, waiting=0)
        comes_to_the_gate(world, a)
        assert world.managed(a).acts_as is S.WAITING
    world.tick()
    assert not any(group.kept for group in world.node.groups.values())


def test_a_start_there_that_fails_is_followed_by_one_at_home_and_the_seat_stays_there_for_a_while(world: World) -> None:
    a, b = away(world), world.seat(0, 1)
    world.start(a)
    world.tick(60)  # it fails late
    world.end_processes(a)
    assert (world.state(a), world.managed(a).group.name) == (S.BACKOFF, "G01")
    world.managed(a).durable.failed = Failures()  # which keeps it at home for half a minute, too
    comes_to_the_gate(world, a)
    world.tick()
    assert (world.state(a), tickets(world, a)) == (S.WAITING, ["", "G23"]), "G01 is busy, and it is not moved again"
    leaves(world, b)
    assert tickets(world, a) == ["", "G23", ""]


def test_a_container_that_kubelet_starts_again_in_the_middle_gets_a_ticket_for_its_home(world: World) -> None:
    a, b = away(world), world.seat(0, 1)
    comes_to_the_gate(world, a, inside=False)
    world.tick()
    world.look()
    assert (world.state(a), world.managed(a).group.name) == (S.WAITING, "G01")
    assert tickets(world, a) == ["", "G23"]
    leaves(world, b)
    assert tickets(world, a) == ["", "G23", ""]


def test_the_cheapest_way_is_taken_and_another_where_the_driver_refuses_it(world: World) -> None:
    a, _ = busy_home(world, "fake")
    seat = world.managed(a)
    assert view.way(world.node, seat) == view.MAP
    seat.durable.costs.cold_seconds = view.activate_seconds(seat) + 1.0
    assert view.way(world.node, seat) == view.RESTART
    seat.durable.costs.cold_seconds = 100.0
    seat.durable.fixed = "refused"
    assert view.way(world.node, seat) == view.RESTART
    assert moves.seconds(world.node, seat) == 100.0 - view.activate_seconds(seat)
    world.shows(a, restarts_inside=False)
    assert not view.way(world.node, seat)
    assert "kyb-run" in view.why_immovable(world.node, seat)


def test_an_operator_moves_a_seat_by_a_restart_and_the_operation_is_done_once_it_serves_there(world: World) -> None:
    """There, and then at home again."""
    a, b = busy_home(world)
    assert world.order(MigrateSeat, seat=a, to="G23").accepted
    world.tick()
    dropped(world, a)
    world.tick()
    comes_to_the_gate(world, a)
    assert tickets(world, a) == ["", "G23"]
    assert world.ordered(a).outcome == ""
    arrives(world, a)
    world.tick()
    assert not world.node.moves

    leaves(world, b)
    assert world.order(MigrateSeat, seat=a, to="G01").accepted
    world.tick()
    world.finish()
    world.tick()
    dropped(world, a)
    world.tick()
    assert world.ordered(a).outcome == "", world.managed(a)
    comes_to_the_gate(world, a)
    arrives(world, a)
    world.tick()
    assert (world.state(a), world.managed(a).group.name, world.node.moves) == (S.ACTIVE, "G01", {})


def restart(world: World, ledger: Ledger, *tickets: SeatTicket, parked: tuple[str, ...] = ()) -> None:
    """The manager starts again with this ledger; b serves, these are parked, and of others the driver has nothing:
    kyb-run is alone in their containers."""
    known = {entry.seat: entry.durable.container_id for entry in ledger.seats}
    outcomes = {world.seat(0, 1): "active", **dict.fromkeys(parked, "parked")}
    seen = []
    for seat, pod in world.pods.items():
        gpus = ("GPU-0", "GPU-1") if seat in outcomes else ()
        own = {"pod_uid": pod.uid, "container_id": known.get(seat) or pod.container_id or ""}
        seen.append(world.seen(seat, outcomes.get(seat, "gone"), *gpus, **own))
    world.next_manager(ledger, *seen, tickets=tickets)


@pytest.mark.parametrize("comes", [False, True])
def test_a_start_on_another_group_is_there_after_a_restart_of_the_manager(world: World, comes: bool) -> None:
    a = away(world)
    remembered = recovery.ledger(world.node, "")
    if comes:
        world.calls.clear()
    restart(world, remembered)
    if comes:
        world.look_at(a, "active")
    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G23")
    assert world.managed(a).lease
    assert (world.managed(a).durable.way, world.managed(a).durable.came_from) == ("restart", "G01"), (
        "it counts as a move"
    )


def test_a_container_that_the_ledger_does_not_know_runs_where_its_open_ticket_says(world: World) -> None:
    """It is the pod's first one, and asked before the list of pods showed it."""
    a = away(world)
    remembered = recovery.ledger(world.node, "")
    mine = next(one for one in remembered.seats if one.seat == a)
    first = replace(mine.durable, container_id="")
    rest = tuple(one for one in remembered.seats if one.seat != a)
    world.next_manager(remembered.model_copy(update={"seats": (*rest, mine.model_copy(update={"durable": first}))}))
    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G23")


def test_a_ticket_that_the_ledger_does_not_know_names_its_group(world: World) -> None:
    a = away(world)
    remembered = recovery.ledger(world.node, "")
    given = next(e for e in reversed(world.effects) if isinstance(e, StartTicket) and e.seat == a)
    old = remembered.model_copy(
        update={"epoch": given.epoch - 1, "seats": tuple(one for one in remembered.seats if one.seat != a)}
    )
    ticket = SeatTicket(a, given.call, given.pod_uid, given.epoch, group=given.group, age_seconds=5.0)
    restart(world, old, ticket)
    assert (world.state(a), world.managed(a).group.name) == (S.STARTING, "G23")
    assert (world.managed(a).durable.way, world.managed(a).durable.came_from) == ("restart", "G01")
    restart(world, old, replace(ticket, group="G99"))
    assert (world.state(a), world.managed(a).facts.unlocated) == (S.QUARANTINED, True), (
        "a group of another configuration"
    )


def test_a_pod_names_the_group_that_it_prefers(world: World) -> None:
    a, _ = busy_home(world)
    for value, there in (("G23", True), ("n1/G23", True), ("n2/G23", False), ("G01", False)):
        world.annotate(a, **{"prefer-group": value})
        assert moves.names(world.pods[a].annotations["kyb.ai/prefer-group"], world.groups[1], "n1") is there


@pytest.mark.parametrize("step", ["drops", "ended", "waits", "starts"])
def test_a_manager_that_is_killed_at_any_step_of_a_move_leaves_the_seat_on_one_group(world: World, step: str) -> None:
    a, b = busy_home(world)
    world.traffic(a, waiting=2)
    if step != "drops":
        dropped(world, a)
    if step in ("waits", "starts"):
        world.traffic(a, waiting=0)  # nothing asks: it waits at the gate
        comes_to_the_gate(world, a)
    if step == "starts":
        world.traffic(a, waiting=2)
    before = world.state(a)
    alive = world.managed(a).facts.alive
    remembered = recovery.ledger(world.node, "")
    world.effects.clear()
    restart(world, remembered, parked=(a,) if alive else ())
    seat = world.managed(a)
    place = "G23" if step == "starts" else "G01"
    assert (world.state(a), seat.group.name, seat.lease) == (before, place, step == "starts")
    assert world.state(b) is S.ACTIVE
    assert (seat.facts.promise is Promise.DROPS) is alive, "the kill is sent again"
    if alive:
        world.traffic(a, waiting=2)
        dropped(world, a)
    world.traffic(b, in_flight=3)
    world.traffic(a, waiting=2)
    if step != "starts":
        world.router("router-0")
        comes_to_the_gate(world, a)
        world.tick(5)
        world.look()
    assert tickets(world, a) in ([] if step == "starts" else ["G23"], ["G23"])
    assert (world.state(a), seat.group.name) == (S.STARTING, "G23")


def test_what_a_seat_has_waited_before_each_visit_is_summed() -> None:
    world = booted()
    a, b = world.fill("a", "b")
    for seat, oldest in ((a, 5.0), (b, 1.0), (a, 7.0)):
        world.tick(10)
        world.traffic(seat, waiting=1, oldest=oldest)
        world.finish()
        assert world.state(seat) is S.ACTIVE
        world.traffic(seat, waiting=0)
    assert world.managed(a).durable.waited == pytest.approx(12.0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_second_ticket_after_a_restart_of_the_manager_names_the_group_that_the_seat_holds(
    world: World, *, inside: bool
) -> None:
    """The first one was lost on its way."""
    a = away(world)
    remembered = recovery.ledger(world.node, "")
    restart(world, remembered)
    world.effects.clear()
    comes_to_the_gate(world, a, inside=inside)
    seat = world.managed(a)
    assert (seat.state, seat.group.name, tickets(world, a)) == (
        (S.STARTING, "G23", ["G23"]) if inside else (S.BACKOFF, "G01", [])
    )
