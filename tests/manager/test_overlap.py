"""Groups that share GPUs take turns: a seat that needs several finds them free together, and none starves."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from bench.bench_family import Family
from kybernate.messages import GroupDecided, PinSeat
from kybernate.policy.rules import Quantum
from kybernate.seat import SeatState as S
from services.gpu_manager import manager as shell
from services.gpu_manager import publish
from services.gpu_manager.core import obstacles, view
from services.gpu_manager.core.inputs import (
    ForeignProcess,
    ForeignProcessesSeen,
    InvariantBroken,
    SeatTicket,
)
from services.gpu_manager.core.state import Effect
from services.gpu_manager.ledger import Ledger
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.metrics import ManagerMetrics
from tests.facts import UNLISTED, WAITS
from tests.manager.family import TREE, Busy, make_family
from tests.manager.pulling import Pulls
from tests.manager.test_recovery import restart
from tests.manager.test_room import switch_without_a_lease
from tests.manager.world import World, booted, make_group, nested, status
from tests.thorough import part


@pytest.fixture
def node() -> World:
    """Two GPUs sold singly (G0, G1) and as a pair (G01)."""
    return nested()


def both_singles_active(node: World) -> tuple[str, str]:
    (a,), (b,) = node.fill("a", group=0), node.fill("b", group=1)
    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    return a, b


def with_a_parked_pair(node: World) -> tuple[str, str, str]:
    """A pair that was started once and then made room for two singles."""
    (pair,) = node.fill("p", group=2)
    a, b = node.seat(0, 0), node.seat(1, 0)
    for seat, model in ((a, "a"), (b, "b")):
        node.serve(seat, model)
        node.traffic(seat, in_flight=1)
    assert node.state(pair) is S.PARKED
    return a, b, pair


def with_idle_singles(node: World) -> tuple[str, str, str]:
    """The same; the singles have become idle."""
    a, b, pair = with_a_parked_pair(node)
    for seat in (a, b):
        node.traffic(seat)
    node.tick(5)
    return a, b, pair


def with_a_claim(node: World, cause: str = "req-1") -> tuple[str, str, str]:
    """A pair that waits for two singles without demand."""
    a, b, pair = with_idle_singles(node)
    node.traffic(pair, waiting=1, cause=cause)
    return a, b, pair


def test_a_pair_waits_while_singles_hold_its_gpus_and_the_gate_says_who(node: World) -> None:
    a, b = both_singles_active(node)
    for seat in (a, b):
        node.traffic(seat, in_flight=1)
    node.at_gate(node.seat(2, 0), "p")

    assert node.state(node.seat(2, 0)) is S.WAITING
    text = publish.gate_texts(node.node, node.now)[node.seat(2, 0)]
    models = [node.managed(seat).model for seat in (a, b)]
    assert f"is held by {models[0]} (active) and {models[1]} (active)" in text
    node.command(PinSeat, a)
    text = publish.gate_texts(node.node, node.now)[node.seat(2, 0)]
    assert f"kept by pinned {models[0]}; kyb" in text


def test_a_switch_keeps_its_gpus_while_no_seat_has_the_lease(node: World) -> None:
    incoming, _ = switch_without_a_lease(node, group=2)
    job = node.job()
    single = node.seat(1, 0)

    node.at_gate(single, "s")

    assert node.state(single) is S.WAITING
    assert node.node.groups["G1"].why == f"the switch of group {job.group} ends in a moment"
    node.progress(job, "gone", "started", done=False)
    assert (node.state(incoming), node.state(single)) == (S.ACTIVATING, S.WAITING)
    node.progress(job, "gone")
    assert node.state(incoming) is S.ACTIVE


def test_a_restart_in_the_middle_of_a_switch_adopts_no_victim_without_a_process(node: World) -> None:
    incoming, victim = switch_without_a_lease(node, group=2)
    job = node.job()
    single = node.seat(1, 0)
    node.pod(single, "s")

    restart(node, jobs=(status(job, "started", "pending", done=False),), p="parked", q="gone")
    node.call(single)
    node.tick(5)

    assert (node.state(victim), node.managed(victim).lease) == (S.BACKOFF, False)
    assert node.state(single) is S.WAITING
    assert not any(seat.state is S.QUARANTINED for seat in node.node.seats.values())
    node.progress(job, "gone")
    assert node.state(incoming) is S.ACTIVE


@pytest.mark.parametrize("outcome", ["gone", "parked"])
def test_the_checkpointer_is_asked_about_a_conflict_and_its_answer_ends_it(node: World, outcome: str) -> None:
    a, b = both_singles_active(node)
    pair = node.seat(2, 0)
    node.pods[pair] = replace(node.pods[a], seat=pair, name="p", uid="uid-p", container_id="process://99")
    restart(node, ledger=Ledger(lost=True))
    assert {node.state(seat) for seat in (a, b, pair)} == {S.QUARANTINED}

    assert {*node.asked()} == {a, b, pair}
    node.look_at(a, "active")
    assert node.state(a) is S.QUARANTINED, "that is what the conflict is about"
    if outcome == "gone":
        node.exit(pair)
    node.look_at(pair, outcome)
    node.tick(1)
    for seat in (a, b):
        node.look_at(seat, "active")

    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    assert node.state(pair) is (S.BACKOFF if outcome == "gone" else S.PARKED)


def test_an_engine_that_nothing_let_in_is_ended_beside_those_of_other_groups(node: World) -> None:
    a, b = both_singles_active(node)
    pair = node.seat(2, 0)
    node.pods[pair] = replace(node.pods[a], seat=pair, name="p", uid="uid-p", container_id="process://99")

    restart(node)

    assert [node.state(seat) for seat in (a, b, pair)] == [S.ACTIVE, S.ACTIVE, S.LOST]


def metrics_of(world: World) -> str:
    """What the manager of this world shows to Prometheus."""
    registry = CollectorRegistry()
    manager: Any = SimpleNamespace(node=world.node, now=lambda: world.now, observe=None, observe_write=None)
    ManagerMetrics(registry, manager, GuardedPolicy("quantum", Quantum()))
    return generate_latest(registry).decode()


def test_a_broken_invariant_stops_grants_on_its_gpu_and_is_counted(node: World) -> None:
    node.fill("p", group=2)
    single, other = node.seat(1, 0), node.seat(0, 0)
    node.pod(single, "s")
    node.managed(single).know(UNLISTED)  # what must never happen
    owners = node.owners()
    new = replace(node.pods[single], seat=other, name="o", uid="uid-o")
    effects: list[object] = []

    for _ in range(2):
        owners = replace(owners, pods=(*owners.pods, new), listed=owners.listed | {new.uid})
        effects += node.board.handle(owners, node.now)

    assert [e.gpu for e in effects if isinstance(e, InvariantBroken)] == ["GPU-1"]
    assert node.node.violations == 1
    with capture_logs() as logs:
        for effect in effects:
            shell._log(cast(Effect, effect))
    assert [(line["log_level"], line["gpu"]) for line in logs if line["event"] == "invariant.broken"] == [
        ("error", "GPU-1")
    ]
    assert "kybernate_invariant_violations_total" + '{node="n1"} 1.0' in metrics_of(node)
    assert "two groups" in node.node.broken["GPU-1"]
    waiting = node.seat(1, 1)
    assert not view.room(node.node, node.managed(waiting))

    node.managed(single).know(WAITS)
    node.tick(1)
    assert not node.node.broken
    assert node.node.violations == 1


def test_while_gpus_are_cleared_for_a_pair_no_single_takes_one(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    other = node.seat(0, 1)
    node.pod(other, "a2")
    node.traffic(a)
    node.tick(35)  # b's visit is over, too
    node.traffic(pair, waiting=1)
    assert (node.state(a), node.state(b)) == (S.DRAINING, S.DRAINING)
    node.leaves(a)
    assert node.state(a) is S.PARKED

    node.call(other)
    node.traffic(a, waiting=1)

    assert (node.state(other), node.state(a)) == (S.WAITING, S.PARKED)
    assert "cleared for p of group G01" in node.node.groups["G0"].why
    node.traffic(b)
    node.finish()
    node.finish()
    assert node.state(pair) is S.ACTIVE


def test_a_single_that_leaves_for_a_pair_makes_no_place_for_another_single(node: World) -> None:
    a, _, pair = with_a_claim(node)
    other = node.seat(0, 1)
    node.at_gate(other, "a2")

    node.quiet(a)
    assert (node.state(a), node.node.switches["G0"].incoming) == (S.PARKING, None)
    node.progress(node.job())

    assert (node.state(a), node.state(other)) == (S.PARKED, S.WAITING)
    assert node.node.claims["G01"].seat == pair


def test_a_drain_for_a_pair_that_is_not_wanted_any_more_goes_on_for_no_single(node: World) -> None:
    """The policy decides about the single at the gate, in another switch."""
    a, _, pair = with_a_claim(node)
    other = node.seat(0, 1)
    node.at_gate(other, "a2")

    node.traffic(pair)

    assert (node.state(a), node.node.switches) == (S.ACTIVE, {})


def test_a_single_that_can_never_run_gives_its_group_no_turn_before_a_claim(node: World) -> None:
    """Else every other one of its group goes before the pair, for ever."""
    _, _, pair = with_idle_singles(node)
    refused = node.seat(0, 1)
    node.pod(refused, "x")
    node.shows(refused, resources=("kyb.ai/a", "kyb.ai/b"))
    node.call(refused)
    node.tick(5)

    node.traffic(pair, waiting=1)

    assert node.node.claims["G01"].seat == pair
    barrier = obstacles.BARRIER.holds(obstacles.Ask(node.node, node.groups[0], node.now))
    assert barrier is not None
    assert barrier.data["seat"] == pair


def test_a_pinned_single_is_not_cleared_away_and_the_reason_names_it(node: World) -> None:
    a, b, pair = with_idle_singles(node)
    node.command(PinSeat, b)

    node.traffic(pair, waiting=1)

    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)
    assert node.node.groups["G01"].why == "its GPUs are held by b of group G1: pinned-neighbour"


SECONDS = st.sampled_from([0, 0, 1, 3, 8])


@pytest.mark.timeout(180)  # 1,350 seconds of 14 seats, checked after each message
@settings(max_examples=len(part(range(3), 3)))
@given(
    shapes=st.permutations(TREE),
    seats=st.sampled_from([1, 2]),
    drains=st.lists(SECONDS, min_size=14, max_size=14),
    moves=st.lists(SECONDS, min_size=14, max_size=14),
)
def test_everyone_in_a_tree_of_groups_gets_turns(
    shapes: list[tuple[int, ...]], seats: int, drains: list[int], moves: list[int]
) -> None:
    """All seats of a 4 ⊃ 2 ⊃ 1 family wanted for ever, in whatever order its groups stand, from cold to warm."""
    busy = Busy(make_family(tuple(shapes), seats))
    slow = dict(zip(busy.seats, zip(drains, moves, strict=True), strict=False))
    busy.drains, busy.moves = lambda seat: slow[seat][0], lambda seat: slow[seat][1]
    busy.live(450)
    for seat in busy.seats:
        assert busy.longest_wait(seat) < 225.0, f"{busy.world.managed(seat).group.name} {seat}: {busy.turns[seat]}"


def test_a_request_for_the_largest_group_waits_no_longer_than_its_bound() -> None:
    """4 ⊃ 2 ⊃ 1 under mixed load, as ``python -m bench family`` plays it with 10,000 switches."""
    family = Family(random.Random(7))
    while family.switches < 120:
        family.live()
        family.check_bound()

    assert family.figures()["4x_requests"] > 3


def test_a_seat_that_cannot_be_parked_does_not_keep_the_other_gpu_from_its_seats() -> None:
    busy = Busy(make_family(((0,), (1,), (0, 1)), seats=1))
    a, b, pair = busy.seats
    busy.live(60)
    assert all(busy.turns.values())
    while busy.world.state(a) is not S.ACTIVE:
        busy.live(1)
    busy.parks = lambda seat: "active" if seat == a else "parked"
    before = len(busy.turns[b])

    busy.live(300)

    assert len(busy.turns[b]) - before >= 3
    assert busy.world.state(b) is S.ACTIVE or busy.world.wall - busy.turns[b][-1] < 60
    busy.parks = lambda seat: "parked"
    turns = len(busy.turns[pair])
    busy.live(120)
    assert len(busy.turns[pair]) > turns


def test_a_drain_for_a_claim_that_was_given_up_turns_back(node: World) -> None:
    a, b, _pair = with_a_claim(node)
    node.quiet(a)
    node.progress(node.job(), "active")
    assert node.state(a) is S.ACTIVE

    assert node.state(b) is S.ACTIVE, "its GPU alone is of no use to the pair"


def with_idle_singles_and_another_pair() -> tuple[World, str, str, str, str]:
    """The same with two parked seats of the pair, and another pair of its pool, which is free."""
    pairs = (make_group("G01", [0, 1], 2, rebalance=True), make_group("G23", [2, 3], 1, rebalance=True))
    node = booted(make_group("G0", [0], 1), make_group("G1", [1], 1), *pairs, policy=Pulls())
    p, q = node.fill("p", "q", group=2)
    (a,), (b,) = node.fill("a", group=0), node.fill("b", group=1)
    assert [node.state(seat) for seat in (a, b, p, q)] == [S.ACTIVE, S.ACTIVE, S.PARKED, S.PARKED]
    return node, a, b, p, q


def test_the_holder_of_another_pair_leaves_for_the_next_seat_than_the_one_for_which_gpus_are_cleared() -> None:
    node, _, _, p, q = with_idle_singles_and_another_pair()
    (r,) = node.fill("r", group=3)
    node.traffic(r, in_flight=1)
    node.traffic(p, waiting=1, oldest=9.0)
    node.traffic(q, waiting=1)
    node.traffic(r)
    assert {switch.group: switch.beneficiary for switch in node.node.switches.values()} == {"G0": p, "G1": p, "G23": q}
    node.finish()
    assert (node.managed(p).group.name, node.managed(q).group.name) == ("G01", "G23")
    assert (node.state(p), node.state(q)) == (S.ACTIVE, S.ACTIVE)


def test_a_pair_of_which_others_hold_the_gpus_does_not_call_off_a_drain_for_its_seat_elsewhere() -> None:
    node, a, b, p, _ = with_idle_singles_and_another_pair()
    (r,) = node.fill("r", group=3)
    for single in (a, b):
        node.traffic(single, in_flight=1)
    node.traffic(p, waiting=1)
    assert node.state(r) is S.DRAINING
    for single in (a, b):
        node.traffic(single)
    node.later(1)
    assert (node.state(a), node.state(b), node.state(r), node.node.claims) == (S.ACTIVE, S.ACTIVE, S.DRAINING, {})
    node.finish()
    assert (node.state(p), node.managed(p).group.name) == (S.ACTIVE, "G23")


def test_no_holder_of_another_pair_with_a_free_slot_and_too_little_memory_leaves_while_gpus_are_cleared() -> None:
    pairs = [make_group(f"G{n}{n + 1}", [n, n + 1], 3, slots=2, rebalance=True) for n in (0, 2)]
    node = booted(make_group("G0", [0], 1), make_group("G1", [1], 1), *pairs, policy=Pulls())
    p, _ = node.fill("p", "q", group=2, vram="120GiB")
    (a,), (b,) = node.fill("a", group=0), node.fill("b", group=1)
    (r,) = node.fill("r", group=3, vram="120GiB")
    node.traffic(r, in_flight=1)
    node.traffic(p, waiting=1)
    node.traffic(r)
    node.later(1)
    assert [node.state(seat) for seat in (a, b, r)] == [S.DRAINING, S.DRAINING, S.ACTIVE]


def test_a_seat_comes_to_another_pair_that_is_free_while_gpus_are_cleared_for_it() -> None:
    node, a, b, p, _ = with_idle_singles_and_another_pair()
    node.traffic(p, waiting=1)
    assert (node.state(p), node.managed(p).group.name) == (S.MIGRATING, "G23")
    node.tick()
    assert (node.state(a), node.state(b), node.node.claims) == (S.ACTIVE, S.ACTIVE, {})


def test_events_name_the_seat_of_the_larger_group_for_which_smaller_ones_are_parked(node: World) -> None:
    a, b, pair = with_idle_singles(node)
    node.effects.clear()
    node.traffic(pair, waiting=1, oldest=90.0, cause="req-2")
    claim, *parks = [effect for effect in node.effects if isinstance(effect, GroupDecided)]
    assert (claim.decision, claim.group, claim.incoming, claim.model) == ("claim", "G01", pair, "p")
    assert {(e.decision, e.by, e.victim, e.incoming, e.cause) for e in parks} == {
        ("park", "claim", a, pair, "req-2"),
        ("park", "claim", b, pair, "req-2"),
    }


def test_a_stranger_on_one_gpu_of_a_claim_leaves_the_other_gpu_to_its_seats(node: World) -> None:
    a, b, pair = with_a_claim(node)
    node.leaves(a)
    assert node.state(a) is S.PARKED

    node.receive(ForeignProcessesSeen((ForeignProcess("GPU-1", 4711, "python3"),)))
    node.traffic(a, waiting=1)
    node.finish()

    assert (node.state(a), node.state(b), node.state(pair)) == (S.ACTIVE, S.ACTIVE, S.PARKED)


def test_while_gpus_are_cleared_for_another_group_nothing_spins_and_the_gate_says_so(node: World) -> None:
    a, b, pair = with_a_parked_pair(node)
    other = node.seat(0, 1)
    node.at_gate(other, "a2")
    node.traffic(b)
    node.tick(5)
    assert node.node.groups["G0"].wake > node.wall
    node.traffic(pair, waiting=1, oldest=90.0)
    assert {switch.clears_for for switch in node.node.switches.values()} == {pair}
    node.leaves(a)

    node.tick(40.0)
    node.call(other)

    assert view.next_wake(node.node, node.now) > 0.1
    text = publish.gate_texts(node.node, node.now)[other]
    assert f"the GPUs of group G0 are being cleared for {node.managed(pair).model} of" in text


def test_beside_a_stranger_an_overdue_look_does_not_spin(node: World) -> None:
    a, _, _ = with_a_parked_pair(node)
    node.at_gate(node.seat(0, 1), "a2")
    assert node.node.groups["G0"].wake > node.wall
    node.receive(ForeignProcessesSeen((ForeignProcess("GPU-0", 4711, "python3"),)))

    node.tick(100.0)

    assert node.state(a) is S.ACTIVE
    assert view.next_wake(node.node, node.now) > 0.1


def test_the_heir_of_a_ticket_that_the_ledger_forgot_is_quarantined_beside_another_group(node: World) -> None:
    """The seat folder still has the ticket of a container that was parked since; its pod was deleted by force."""
    (pair,), a = node.fill("p", group=2), node.seat(0, 0)
    seen = node.seen(pair, "active", *node.managed(pair).home.uuids)
    ticket = SeatTicket(a, "c1", "uid-a", int(node.now.unix * 1000), age_seconds=100.0)

    node.next_manager(Ledger(), seen, tickets=(ticket,))
    node.look(2)
    node.pod(a, "heir")
    node.look(2)

    assert (node.state(a), node.state(pair)) == (S.QUARANTINED, S.ACTIVE)
    assert "no room beside p;" in node.managed(a).reason
    assert not node.node.broken
    node.wait(300)
    node.end_processes(a)
    assert (node.state(a), node.managed(a).lease) == (S.BACKOFF, False), "no container came by that ticket"


def test_a_container_that_went_past_the_gate_beside_another_group_is_quarantined(node: World) -> None:
    a, b, _ = with_a_parked_pair(node)
    rogue = node.seat(2, 1)
    node.pod(rogue, "r")
    node.shows(rogue, container_id="process://999", running=True)
    assert node.state(rogue) is S.QUARANTINED
    assert (node.state(a), node.state(b)) == (S.ACTIVE, S.ACTIVE)


def test_who_can_leave_does_not_leave_again_and_again_for_one_who_cannot() -> None:
    """All in the way drain together; with one that the driver refuses to park, the others would do so for nothing."""
    busy = Busy(make_family(((0,), (1,), (0, 1)), seats=1))
    a, b, pair = busy.seats
    busy.parks = lambda seat: "active" if seat == a else "parked"
    busy.live(60)
    if busy.world.state(pair) is S.ACTIVE:  # it came first, and leaves
        busy.live(60)
    before = len(busy.turns[b])

    busy.live(300)

    assert len(busy.turns[b]) - before <= 6, "each turn of b is one that it had to leave"
