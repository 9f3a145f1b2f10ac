"""Room: whether a seat may take its group's GPUs now, and what the manager does where its books are broken."""

from dataclasses import replace

import pytest

from kybernate.messages import ParkSeat, SwitchJob
from kybernate.policy import Decision, GroupView, KybBalanced, Policy, Stay, Switch
from kybernate.seat import SeatState as S
from kybernate.topology import Group
from services.gpu_manager.core import obstacles
from services.gpu_manager.core.inputs import InvariantBroken, StartTicket, Tick
from services.gpu_manager.core.seat_pod import Owners
from tests.facts import UNLISTED, WAITS
from tests.manager.world import World, booted, make_group, nested


@pytest.fixture
def node() -> World:
    """Two GPUs sold singly (G0, G1) and as a pair (G01)."""
    return nested()


def two_slots(seats: int = 3, policy: Policy | None = None) -> World:
    return booted(make_group("G0", [0], seats, slots=2), policy=policy or KybBalanced())


def past_the_gate(world: World, seat: str) -> None:
    """Its container starts without a ticket."""
    world.pod(seat, f"rogue-{seat}")
    world.shows(seat, container_id="process://999", running=True)


def switch_without_a_lease(world: World, group: int) -> tuple[str, str]:
    """A journaled switch whose victim crashed: until the checkpointer reports, no seat has the lease."""
    incoming, victim = world.fill("p", "q", group=group)
    world.tick(10)
    world.switch(victim, incoming)
    world.journaled()
    world.exit(victim)
    assert not world.managed(victim).lease
    assert not world.managed(incoming).lease
    return incoming, victim


def seem_to_hold(world: World, *seats: str) -> list[object]:
    """What must never happen: these seats have the lease. Returns what the next look at the pods brings."""
    for seat in seats:
        world.managed(seat).know(UNLISTED)
    other = next(seat for seat in world.node.seats if seat not in world.pods)
    new = replace(next(iter(world.pods.values())), seat=other, name="new", uid="uid-new", container_id=None)
    owners = Owners((*world.pods.values(), new), frozenset(pod.uid for pod in world.pods.values()) | {new.uid})
    return list(world.board.handle(owners, world.now))


@pytest.mark.parametrize(("vram", "fit"), [("10GiB", 2), ("50GiB", 1)], ids=["slots", "memory"])
def test_slots_and_memory_bound_the_holders_also_where_the_policy_is_careless(vram: str, fit: int) -> None:
    world = two_slots(policy=Careless())
    seats = [world.seat(0, number) for number in range(fit + 1)]
    for number, seat in enumerate(seats):
        world.at_gate(seat, f"m{number}", vram=vram)
    assert [world.state(seat) for seat in seats] == [S.STARTING] * fit + [S.WAITING]

    for seat in seats[:fit]:
        world.start(seat)
        world.healthy(seat)
    world.tick(1)
    assert world.state(seats[fit]) is S.WAITING, "also beside holders that could leave"


def test_what_a_seat_was_seen_to_take_counts_where_its_pod_declares_less() -> None:
    world = two_slots(2)
    a, b = world.seat(0, 0), world.seat(0, 1)
    world.serve(a, "a", vram="30GiB")
    world.command(ParkSeat, a)
    world.finish()
    assert world.managed(a).durable.vram_bytes == 40 * 2**30
    world.serve(b, "b", vram="45GiB")  # fits beside 30 GiB, not beside 40

    world.tick(10)
    world.traffic(a, waiting=1)

    assert (world.state(a), world.state(b)) == (S.PARKED, S.DRAINING), "b leaves first"


@pytest.mark.parametrize(("group", "past"), [(2, (1, 0)), (0, (0, 2))], ids=["overlapping", "own"])
def test_a_switch_leaves_no_room_for_a_container_past_the_gate(group: int, past: tuple[int, int]) -> None:
    world = nested(3)
    switch_without_a_lease(world, group)

    past_the_gate(world, world.seat(*past))

    assert world.state(world.seat(*past)) is S.QUARANTINED


def test_one_holder_more_than_slots_is_a_broken_invariant() -> None:
    world = two_slots(4)
    seats = [world.seat(0, number) for number in range(3)]
    for number, seat in enumerate(seats):
        world.pod(seat, f"m{number}", vram="10GiB")

    effects = seem_to_hold(world, *seats)

    assert [e.text for e in effects if isinstance(e, InvariantBroken)] == ["G0: 3 hold, 2 may"]


def test_a_holder_beside_a_switch_without_a_lease_is_a_broken_invariant(node: World) -> None:
    switch_without_a_lease(node, group=2)
    single = node.seat(1, 0)
    node.pod(single, "s")

    effects = seem_to_hold(node, single)

    assert [e.gpu for e in effects if isinstance(e, InvariantBroken)] == ["GPU-1"]


def broken_on(node: World, group: Group) -> bool:
    """Nothing is granted on this group, since an invariant does not hold there."""
    return any(one.row is obstacles.BROKEN for one in obstacles.of_group(node.node, group, node.now))


def test_a_broken_invariant_leaves_no_room_on_its_gpu(node: World) -> None:
    waiting = node.managed(node.seat(1, 1))
    assert not broken_on(node, waiting.group)

    node.node.broken = {"GPU-1": "two groups"}

    assert broken_on(node, waiting.group)
    assert not broken_on(node, node.groups[0])


def test_a_gpu_gets_grants_again_once_its_invariant_holds_whatever_message_shows_it(node: World) -> None:
    node.pod(node.seat(1, 0), "s")
    node.serve(node.seat(2, 0), "p")
    seem_to_hold(node, node.seat(1, 0))
    assert broken_on(node, node.groups[2])
    node.managed(node.seat(1, 0)).know(WAITS)

    effects = node.tick(0.1)

    assert not effects, "nothing else follows from this message"
    assert not broken_on(node, node.groups[2])


def test_a_switch_on_a_broken_gpu_parks_its_victim_and_brings_nothing(node: World) -> None:
    incoming, victim = node.fill("p", "q", group=2)
    node.pod(node.seat(1, 0), "s")
    node.tick(10)
    node.traffic(incoming, waiting=1)
    node.answered(victim, 1)
    node.beat()
    node.later(1, times=61)
    assert node.node.switches["G01"].phase == "cutting"
    seem_to_hold(node, node.seat(1, 0))
    assert broken_on(node, node.groups[2])

    node.wall += 2.5
    (job,) = [effect for effect in node.board.handle(Tick(), node.now) if isinstance(effect, SwitchJob)]

    assert [target.seat for target in job.park] == [victim]
    assert job.activate is None


class Careless:
    """A policy that gives a slot to every seat that waits, whether one is free or not."""

    def decide(self, seen: GroupView) -> Decision:
        waiting = [seat.seat for seat in seen.seats if seat.state is S.WAITING and seat.wait_seconds is not None]
        return Switch(waiting[0], None, "it waits") if waiting else Stay(None, "none waits")


def test_a_policy_that_gives_away_a_slot_that_is_taken_gets_no_ticket() -> None:
    world = booted(policy=Careless())
    a, b = world.seat(0, 0), world.seat(0, 1)
    world.serve(a, "a")
    world.pod(b, "b")

    world.call(b)
    world.receive(Tick())

    assert world.state(b) is S.WAITING
    assert [e.seat for e in world.effects if isinstance(e, StartTicket)] == [a]


def room_text(world: World, seat: str) -> str:
    found = obstacles.obstacles(world.node, world.managed(seat), world.managed(seat).home, world.now)
    return next(one.text for one in found if one.row is obstacles.ROOM)


def test_the_memory_that_is_lacking_is_shown_where_memory_is_lacking() -> None:
    world = two_slots()
    a, b, c = (world.seat(0, n) for n in range(3))
    world.loads(a, "a", vram="50GiB")
    world.pod(b, "b", vram="40GiB")
    assert room_text(world, b) == (
        "no room beside a (starting) on G0: it needs 40.0 GiB of each GPU, 30.0 GiB are free"
    )
    world.loads(c, "c", vram="30GiB")
    assert room_text(world, b) == "no room beside a (starting) on G0, c (starting) on G0", "no place is free"


def test_no_figures_of_memory_explain_gpus_that_another_group_holds() -> None:
    world = booted(make_group("G0", [0], 1, slots=2), make_group("G01", [0, 1], 1))
    world.fill("p", group=1)
    a = world.seat(0, 0)
    world.pod(a, "a", vram="20GiB")
    assert room_text(world, a) == "no room beside p (active) on G01"
