"""Groups whose seats share memory: who is active together, what is learned, and what is refused."""

from dataclasses import replace

import pytest

from kybernate.messages import ActivateSeat, PinSeat
from kybernate.seat import SeatState as S
from services.gpu_manager.core import view
from services.gpu_manager.core.facts import Ticket
from services.gpu_manager.core.inputs import ForeignProcessesSeen, StartCalls
from tests.manager.packed import PackedWorld
from tests.manager.world import GIB


def active(world: PackedWorld) -> set[str]:
    return {seat for seat in world.node.seats if world.state(seat) is S.ACTIVE}


def test_as_many_seats_are_active_together_as_declare_to_fit_beside_the_reserve(packed: PackedWorld) -> None:
    a, b, c = packed.serving(40, 20, 18)
    assert active(packed) == {a, b, c}
    packed.asks(packed.seat(0, 3), 1)
    assert packed.node.switches["G0"].victim in (a, b, c), "78 of 78 GiB are taken"


def test_a_seat_that_declares_nothing_takes_the_whole_group(packed: PackedWorld) -> None:
    (a,) = packed.serving(20, declared=False)
    b = packed.seat(0, 1)
    assert view.free_bytes(packed.node, packed.groups[0]) == 0
    packed.up(b, 30)
    assert active(packed) == {b}
    packed.wish(a)
    packed.finish()
    assert active(packed) == {a}, "also once its park was measured"


def test_what_its_last_park_measured_beyond_its_declaration_counts_from_then_on(packed: PackedWorld) -> None:
    a, b = packed.groups[0].seat_ids[:2]
    packed.own(a, "a", 40)
    packed.sizes[a] = (50 * GIB, 0)
    packed.come_up(a)
    packed.up(b, 70)
    packed.wish(a)
    packed.finish()
    assert active(packed) == {a}
    assert view.free_bytes(packed.node, packed.groups[0]) == 28 * GIB


def test_what_the_driver_lists_beyond_a_declaration_counts_at_once(packed: PackedWorld) -> None:
    (a,) = packed.serving(20)
    packed.receive(ForeignProcessesSeen((), {packed.managed(a).durable.container_id: 50 * GIB}))
    assert view.free_bytes(packed.node, packed.groups[0]) == 28 * GIB


def test_what_sleeping_engines_keep_is_taken_from_every_group_on_their_gpus(packed: PackedWorld) -> None:
    big = packed.groups[1].seat_ids[0]
    packed.up(big, 60, keeps=5)
    (a,) = packed.serving(40)
    b = packed.seat(0, 1)
    assert packed.state(big) is S.PARKED
    assert view.free_bytes(packed.node, packed.groups[0]) == (80 - 2 - 5 - 40) * GIB
    packed.asks(b, 34)
    assert packed.node.switches["G0"].victim == a, "34 GiB fit beside 40, and not beside 40 and 5"


def test_a_victim_that_was_never_parked_may_leave_a_residue_and_its_place_is_given_after_the_park(
    packed: PackedWorld,
) -> None:
    a, b, c = packed.groups[0].seat_ids[:3]
    packed.up(a, 40)
    packed.up(c, 38)
    packed.asks(b, 40)
    switch = packed.node.switches["G0"]
    assert (switch.victim, switch.incoming, switch.room_for) in ((a, None, b), (c, None, b))


def test_several_holders_leave_for_one_that_needs_the_room_of_all(packed: PackedWorld) -> None:
    _, _, c = packed.serving(30, 30, 70)
    assert active(packed) == {c}


def test_a_larger_group_comes_when_all_packed_holders_below_it_are_parked(packed: PackedWorld) -> None:
    packed.serving(20, 20, 20)
    packed.up(packed.groups[1].seat_ids[0], 30)
    assert active(packed) == {packed.groups[1].seat_ids[0]}


def test_a_pinned_seat_that_leaves_no_room_is_named(packed: PackedWorld) -> None:
    (a,) = packed.serving(50)
    b = packed.seat(0, 1)
    packed.command(PinSeat, a)
    packed.own(b, "m", 40)
    refused = packed.command(ActivateSeat, b)
    assert (refused.accepted, refused.code) == (False, "pinned")
    assert packed.command(ActivateSeat, a).accepted


def test_what_a_lease_reserves_survives_a_restart(packed: PackedWorld) -> None:
    a, b = packed.serving(40, 30)
    packed.managed(a).durable.vram_bytes = 60 * GIB
    packed.restart()
    assert active(packed) == {a, b}
    assert packed.managed(a).durable.reserved_bytes == 40 * GIB
    assert not packed.node.broken


def test_an_heir_names_the_ticket_of_a_pod_of_which_only_the_uid_is_known_by_it(packed: PackedWorld) -> None:
    packed.serving(50)
    b = packed.seat(0, 1)
    packed.asks(b, 20)
    packed.calls.pop(b)
    packed.receive(StartCalls({}))
    pod = packed.managed(b).pod
    packed.node.own(packed.managed(b), replace(pod, namespace="", name=""))  # as after a loss of the ledger
    packed.own(b, "heir", 60)
    packed.look(2)
    assert f"the ticket of pod {pod.uid}, and" in packed.managed(b).reason


@pytest.mark.parametrize("comes", [True, False])
def test_an_heir_that_needs_more_than_the_ticket_reserved_is_quarantined_until_there_is_room(
    packed: PackedWorld, *, comes: bool
) -> None:
    (a,) = packed.serving(50)
    b = packed.seat(0, 1)
    packed.inherit(b, 20, heir=60)
    assert packed.state(b) is S.QUARANTINED
    assert "has no room" in packed.managed(b).reason
    packed.exit(a)
    packed.tick()
    packed.end_processes(b)
    assert (packed.state(b), packed.managed(b).lease) == (S.QUARANTINED, True), "its container may be on its way"
    if comes:
        packed.pods[b] = replace(packed.pods[b], container_id="process://heir", running=True)
    else:
        packed.wait(280)
    packed.look()
    if not comes:
        packed.end_processes(b)

    assert (packed.state(b), packed.managed(b).lease) == ((S.STARTING, True) if comes else (S.BACKOFF, False))


def test_an_heir_reserves_the_larger_of_both_owners(packed: PackedWorld) -> None:
    """The container that comes by the ticket may be the other pod's."""
    b = packed.groups[0].seat_ids[1]
    packed.inherit(b, 60, heir=20)
    assert (packed.state(b), packed.managed(b).facts.ticket) == (S.STARTING, Ticket.FORMER)
    assert packed.managed(b).durable.reserved_bytes == 60 * GIB
    assert view.free_bytes(packed.node, packed.groups[0]) == 18 * GIB


def test_a_lease_of_all_memory_does_not_shrink_to_what_was_seen(packed: PackedWorld) -> None:
    """Its engine may take what it was granted at any moment."""
    (a,) = packed.serving(40)
    seat = packed.managed(a)
    seat.durable.reserved_bytes, seat.durable.vram_bytes = 0, 40 * GIB
    assert seat.needed_bytes(seat.group) == 40 * GIB
    assert seat.reserved_bytes(80 * GIB) == 80 * GIB
