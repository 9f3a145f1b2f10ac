"""Room and memory at the edges of a switch, of an inherited ticket and of a lost ledger."""

from dataclasses import replace

import pytest

from kybernate.seat import SeatState as S
from services.gpu_manager.core import recovery, view
from services.gpu_manager.core.inputs import (
    SeatTicket,
    StartTicket,
)
from services.gpu_manager.core.starts import KUBELET_SECONDS
from services.gpu_manager.ledger import Ledger
from tests.manager.packed import PackedWorld, Truth
from tests.manager.test_packing import active
from tests.manager.world import GIB, World


def ungated(world: World, seat: str, model: str, **notes: str) -> None:
    world.pod(seat, model, **notes)
    world.shows(seat, container_id=f"process://ungated-{seat}", running=True)


def test_a_container_without_a_ticket_during_a_drain_keeps_the_incoming_seat_out(world: World) -> None:
    a, b = world.fill("a", "b")
    world.wish(a)
    world.answered(b)
    ungated(world, world.seat(0, 2), "c")
    world.idle(b)
    assert world.job().activate is None, "c holds the group"


def test_a_container_without_a_ticket_that_fits_beside_the_victim_only_is_no_holder_during_the_job(
    packed: PackedWorld,
) -> None:
    a, b, c = packed.serving(50, 30, 20)
    d = packed.seat(0, 3)
    packed.wish(a)
    sw = packed.node.switches["G0"]
    packed.quiet(sw.victim)
    assert sw.phase == "job"
    assert sw.incoming == a
    stays = b if sw.victim == c else c
    ungated(packed, d, "rogue", vram=f"{78 - 50}GiB" if stays == c else "20GiB")
    packed.take(packed.job_of(sw.op))
    packed.work(sw.op)
    packed.report(sw.op)


@pytest.mark.parametrize("ends", ["as it was", "in deletion", "deleted", "started"])
def test_a_restart_remembers_the_open_ticket_of_a_quarantined_heir(packed: PackedWorld, ends: str) -> None:
    packed.serving(40)
    b, c = packed.seat(0, 1), packed.seat(0, 2)
    packed.inherit(b, 5, heir=60)
    assert (packed.state(b), packed.managed(b).lease) == (S.QUARANTINED, True)
    if ends == "in deletion":
        packed.pods[b] = replace(packed.pods[b], deleting=True)
    elif ends == "deleted":
        del packed.pods[b]
    elif ends == "started":
        packed.pods[b] = replace(packed.pods[b], container_id="process://late", running=True)
        packed.truth[b] = Truth(60 * GIB, 0, packed.managed(b).home.uuids)

    packed.restart()
    packed.restart()
    packed.asks(c, 20)
    packed.look()
    packed.tick(60)
    assert packed.managed(b).lease, "a container may start by the ticket"
    assert packed.state(c) is S.WAITING, "it would be the third one"

    if ends == "started":
        assert packed.state(b) is S.QUARANTINED
        return
    packed.wait(KUBELET_SECONDS)
    packed.look()
    if ends == "as it was":
        packed.end_processes(b)
    packed.look()
    packed.beat()
    packed.call(c)
    assert packed.state(c) is S.STARTING, "no start takes so long"


def test_a_conflict_about_memory_lasts_over_a_restart(packed: PackedWorld) -> None:
    """Until the container that started without a ticket fits; the driver's word that it runs does not end it."""
    (a,) = packed.serving(40)
    b = packed.seat(0, 1)
    packed.sizes[b] = (60 * GIB, 0)
    ungated(packed, b, "rogue", vram="60GiB")
    assert packed.state(b) is S.QUARANTINED

    packed.truth[b] = Truth(60 * GIB, 0, packed.managed(b).home.uuids)
    packed.restart()
    packed.look_at(b, "active")
    assert packed.state(b) is S.QUARANTINED

    packed.exit(a)
    packed.look_at(b, "active")
    assert packed.state(b) is S.ACTIVE


def test_a_ticket_that_a_lost_ledger_leaves_open_is_not_given_again_beside_a_seat_that_leaves_no_room(
    packed: PackedWorld,
) -> None:
    """The container that used the ticket has ended; its seat counts as starting, since the ticket may still be used."""
    a, b = packed.serving(50, 40)
    packed.wish(a)
    packed.finish()
    assert (packed.state(a), packed.state(b)) == (S.ACTIVE, S.PARKED)
    given = next(effect for effect in packed.effects if isinstance(effect, StartTicket) and effect.seat == b)
    packed.truth.pop(b)
    packed.pods[b] = replace(packed.pods[b], running=False, ended="exited with code 1")
    ticket = SeatTicket(b, given.call, given.pod_uid, given.epoch, vram_bytes=given.vram_bytes, age_seconds=5.0)
    seen, tickets = (packed.seen(a, "active"), packed.seen(b, "gone")), (*packed.used_tickets(), ticket)
    packed.next_manager(Ledger(lost=True), *seen, tickets=tickets)
    assert (packed.state(a), packed.state(b)) == (S.ACTIVE, S.STARTING)
    before = len(packed.effects)

    packed.call(b)
    packed.look(3)
    assert not [one for one in packed.effects[before:] if isinstance(one, StartTicket)], "a and b do not fit"

    packed.wait(KUBELET_SECONDS)
    packed.look()
    assert packed.state(b) is S.WAITING


def test_a_residue_is_unknown_again_after_a_container_started_anew(packed: PackedWorld) -> None:
    a, b = packed.serving((40, 3), 48)
    c = packed.seat(0, 2)
    assert packed.managed(a).durable.residue_bytes
    packed.exit(a)
    packed.wish(a)
    packed.come_up(a)
    assert (packed.state(a), packed.state(b)) == (S.ACTIVE, S.PARKED)
    packed.up(c, 30)
    assert packed.state(a) is S.ACTIVE
    assert packed.managed(a).durable.residue_bytes == 0


def test_the_checkpointer_is_informed_of_what_parked_processes_keep(packed: PackedWorld) -> None:
    a, b, _ = packed.serving((40, 3), (60, 2), 70)
    kept = sum(packed.managed(seat).durable.residue_bytes for seat in (a, b))
    assert kept > 4 * GIB

    packed.wish(a)
    packed.quiet(packed.node.switches["G0"].victim)
    assert packed.job().activate.kept_bytes == kept
    asked = packed.question(recovery.ledger(packed.node, "boot"))
    assert {target.kept_bytes for target in asked.targets} == {kept}


def test_what_a_seat_kept_while_parked_counts_until_its_processes_are_gone(packed: PackedWorld) -> None:
    a, _ = packed.serving((40, 3), 48)
    group, full = packed.groups[0], 80 * GIB
    assert packed.state(a) is S.PARKED
    room = view.capacities(packed.node, group)["GPU-0"]
    assert room < full - 2 * GIB

    packed.delete(a)
    assert packed.state(a) is S.RELEASING
    assert view.capacities(packed.node, group)["GPU-0"] == room, "its processes are not gone yet"
    packed.end_processes(a)
    packed.vanish(a)

    assert packed.state(a) is S.FREE
    assert view.capacities(packed.node, group)["GPU-0"] > room


def test_a_parked_seat_of_unknown_size_keeps_after_a_lost_ledger_a_share_of_its_gpus(
    packed: PackedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = packed.groups[0].seat_ids[:2]
    packed.up(a, 40, keeps=5, declared=False)
    packed.up(b, 50)
    assert packed.state(a) is S.PARKED
    monkeypatch.setattr(recovery, "ledger", lambda node, boot: Ledger())
    packed.restart()
    assert packed.state(a) is S.PARKED
    assert packed.managed(a).residue_on("GPU-0") >= 5 * GIB
    assert view.target(packed.node, packed.managed(b)).kept_bytes == 0, "what is assumed is no evidence"


@pytest.mark.parametrize("victim_parked", [False, True])
def test_a_seat_that_a_switch_brings_back_while_the_ledger_is_lost_keeps_what_park_evidence_admits(
    packed: PackedWorld, monkeypatch: pytest.MonkeyPatch, victim_parked: bool
) -> None:
    a, b = packed.serving((40, 3), (50, 4))
    assert packed.state(a) is S.PARKED
    packed.wish(a)
    op = packed.node.switches["G0"].op
    packed.quiet(b)
    packed.take(packed.job_of(op))
    if victim_parked:
        packed.work(op)
    monkeypatch.setattr(recovery, "ledger", lambda node, boot: Ledger())
    packed.restart()
    assert packed.state(b) is (S.PARKED if victim_parked else S.PARKING)
    assert packed.state(a) is (S.ACTIVATING if victim_parked else S.PARKED)
    assert packed.managed(a).residue_on("GPU-0") >= 3 * GIB
    if victim_parked:
        assert packed.managed(b).residue_on("GPU-0") == 4 * GIB, "as its park measured"
    packed.finish()
    packed.check()


def test_an_incoming_seat_for_which_the_drain_took_the_room_is_not_sent(packed: PackedWorld) -> None:
    a, b, c = packed.serving(30, 30, 30)
    out = next(s for s in (a, b, c) if packed.state(s) is S.PARKED)
    packed.wish(out)
    sw = packed.node.switches["G0"]
    assert sw.incoming == out
    stays = next(s for s in (a, b, c) if s not in (out, sw.victim))
    packed.annotate(stays, vram="49GiB")
    packed.quiet(sw.victim)
    assert packed.job().activate is None, "30 beside 49 GiB"


def test_a_group_whose_ledger_was_lost_goes_on_switching_although_its_holders_were_granted_more(
    packed: PackedWorld,
) -> None:
    a, b = packed.serving(39, 39)
    c = packed.seat(0, 2)
    assert active(packed) == {a, b}
    seen = [packed.seen(seat, "active", "GPU-0", vram_bytes=39 * GIB + 2**28) for seat in (a, b)]

    packed.next_manager(Ledger(), *seen)  # a little more than they declare
    packed.tick(65)
    packed.own(c, "c", 20)
    for _ in range(100):
        packed.later(10)
        packed.call(c)
        if packed.node.switches:
            break

    assert packed.node.switches, packed.node.broken
