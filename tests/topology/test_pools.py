"""Which groups exchange parked seats: alike ones of one profile, of any size."""

from dataclasses import replace
from typing import Any

import pytest

from kybernate.config import Profile
from kybernate.machine import Gpu, Mig
from kybernate.topology import Group, peers


def group(index: int, *, gpus: int = 1, gpu: dict[str, Any] | None = None, **profile: Any) -> Group:
    """Group G0, G1, …; all of them alike but for the changes."""
    members = tuple(
        replace(Gpu(i, f"GPU-{i}", i, f"0000:0{i}:00.0", "H100", 80 * 2**30, 0), **(gpu or {}))
        for i in range(index, index + gpus)
    )
    fields = {"name": "one", "resource": "kyb.ai/gpu-1x-seat", "group_size": gpus, "seats_per_group": 2} | profile
    return Group(f"G{index}", f"00000{index}", Profile(**fields), members, (f"{gpus}x-00000{index}.s00",), 1)


def test_pairs_exchange_seats_also_inside_a_quad_which_exchanges_none() -> None:
    pair, other, quad = group(0, gpus=2), group(2, gpus=2), replace(group(0, gpus=4, name="four"), name="Q")
    assert peers([pair, other, quad]) == {"G0": (other,), "G2": (pair,), "Q": ()}


def instance(index: int, part: int, kind: str = "3g.40gb", **changes: Any) -> Group:
    """A MIG instance of GPU ``index`` as a group."""
    made = group(index, **changes)
    uuid = f"MIG-{index}-{part}"
    return replace(made, name=uuid, gpus=(replace(made.gpus[0], uuid=uuid, mig=Mig(f"GPU-{index}", kind, part, 0)),))


def test_alike_mig_instances_of_one_gpu_and_of_several_are_a_pool_where_the_profile_says_so() -> None:
    pool = [instance(0, 1, rebalance=True), instance(0, 2, rebalance=True), instance(1, 1, rebalance=True)]
    assert {name: [one.name for one in others] for name, others in peers(pool).items()} == {
        "MIG-0-1": ["MIG-0-2", "MIG-1-1"],
        "MIG-0-2": ["MIG-0-1", "MIG-1-1"],
        "MIG-1-1": ["MIG-0-1", "MIG-0-2"],
    }


def test_mig_instances_are_bound_where_the_profile_says_nothing() -> None:
    """Who cuts a GPU wants its parts apart: no container gets another instance without a word."""
    one, other = instance(0, 1), instance(0, 2)
    assert peers([one, other]) == {"MIG-0-1": (), "MIG-0-2": ()}
    assert one.why_bound == "profile one has no rebalance: true, so its containers see only their own MIG instance"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (group(0, rebalance=False), group(1, rebalance=False)),
        (group(0), group(1, gpu={"name": "A100"})),
        (group(0), group(1, gpu={"memory_bytes": 94 * 2**30})),
        (group(0), group(1, name="two", resource="kyb.ai/two")),
        (group(0, gpus=2), group(1, gpus=2)),
        (group(0, gpus=2), group(2)),
        (instance(0, 1, rebalance=True), instance(0, 2, "2g.40gb", rebalance=True)),
        (instance(0, 1, rebalance=True), group(1, rebalance=True)),
        (group(0), replace(group(0), name="again")),
    ],
    ids=[
        "bound",
        "another chip",
        "another memory",
        "another profile",
        "a shared GPU",
        "another size",
        "another MIG profile",
        "a MIG instance and a whole GPU",
        "the same GPU",
    ],
)
def test_groups_that_are_not_alike_exchange_no_seat(first: Group, second: Group) -> None:
    assert peers([first, second]) == {first.name: (), second.name: ()}
