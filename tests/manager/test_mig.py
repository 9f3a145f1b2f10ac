"""Seats on MIG instances: they move by a start of their engine only, and share the faults of their GPU."""

from dataclasses import replace

import pytest

from kybernate.machine import Mig
from kybernate.messages import KillJob, MigrateSeat
from kybernate.seat import SeatState as S
from kybernate.topology import Group
from services.gpu_manager import metrics
from services.gpu_manager.core import view
from services.gpu_manager.publish import record
from tests.manager.pulling import Pulls
from tests.manager.test_restarts import arrives, busy_home, called_again, comes_up, tickets
from tests.manager.world import World, booted, make_group


def instance(name: str, part: int, parent: str, *, rebalance: bool = True) -> Group:
    """A group with three seats."""
    group = make_group(name, [part], 3, rebalance=rebalance)
    mig = Mig(parent, "3g.40gb", part, 0)
    return replace(group, gpus=(replace(group.gpus[0], uuid=f"MIG-{part}", mig=mig),))


def node(*, rebalance: bool = True) -> World:
    """Two instances of one GPU, and one of another."""
    parents = {"M0": "GPU-A", "M1": "GPU-A", "M2": "GPU-B"}
    groups = tuple(
        instance(name, part, parent, rebalance=rebalance) for part, (name, parent) in enumerate(parents.items())
    )
    return booted(*groups, policy=Pulls(), warmup=False)


@pytest.fixture
def world() -> World:
    return node()


def test_a_parked_seat_moves_to_another_instance_of_its_gpu_by_a_restart(world: World) -> None:
    a, _ = busy_home(world, "sglang")
    assert view.way(world.node, world.managed(a)) == view.RESTART
    world.traffic(a, waiting=2)
    called_again(world, a)
    assert tickets(world, a) == ["", "M1"]
    arrives(world, a)
    row = record(world.node, world.managed(a), world.now)
    assert (row.state, row.home_group, row.group, row.way) == (S.ACTIVE, "M0", "M1", "restart")


@pytest.mark.parametrize("backend", ["fake", "sglang", "unload"])
def test_no_backend_moves_a_seat_of_an_instance_by_the_drivers_map_and_the_note_says_why(
    world: World, backend: str
) -> None:
    a, _ = busy_home(world, backend)
    seat = world.managed(a)
    assert view.way(world.node, seat) == view.RESTART
    world.shows(a, restarts_inside=False)
    assert not view.way(world.node, seat)
    note = (
        "the driver cannot checkpoint MIG instances; its container has its GPUs; "
        "with kyb-run in front it could start on others"
    )
    assert record(world.node, seat, world.now).fixed == note
    assert note in world.order(MigrateSeat, seat=a, to="M1").reason
    world.traffic(a, waiting=2)
    world.tick()
    assert not any(isinstance(effect, KillJob) for effect in world.effects), "it waits for its own instance, as before"


def test_an_instance_without_a_pool_says_what_its_profile_lacks() -> None:
    world = node(rebalance=False)
    for group in world.groups:
        object.__setattr__(group.profile, "rebalance", None)
    a = world.seat(0, 0)
    comes_up(world, a, "a", "unload")
    refused = world.order(MigrateSeat, seat=a, to="M1")
    assert (refused.accepted, refused.code) == (False, "cannot-use")
    assert "has no rebalance: true, so its containers see only their own MIG instance" in refused.reason


def test_the_fault_of_a_gpu_keeps_seats_from_each_of_its_instances(world: World) -> None:
    world.node.faulty = {"GPU-A": "XID 79"}
    c = world.seat(2, 0)
    comes_up(world, c, "c", "restart")
    for index in (0, 1):
        refused = world.order(MigrateSeat, seat=c, to=f"M{index}")
        assert (refused.accepted, f"GPU {index} is faulty: XID 79" in refused.reason) == (False, True)
    samples = [one for one in metrics._gpus(world.node) if one.name.endswith("gpu_faulty")]
    assert {one.labels["gpu"]: one.value for one in samples} == {"MIG-0": 1.0, "MIG-1": 1.0, "MIG-2": 0.0}
