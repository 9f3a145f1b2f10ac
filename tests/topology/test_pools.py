"""Which groups exchange parked seats: alike ones of one profile, of any size."""

from dataclasses import replace
from typing import Any

import pytest

from kybernate.config import Profile
from kybernate.machine import Gpu, Mig
from kybernate.topology import Group, peers

MIG = Mig("GPU-9", "3g.40gb", 1, 0)


def group(index: int, *, gpus: int = 1, gpu: dict[str, Any] | None = None, **profile: Any) -> Group:
    """Group G0, G1, …; all of them alike but for the changes."""
    members = tuple(
        replace(Gpu(i, f"GPU-{i}", i, f"0000:0{i}:00.0", "H100", 80 * 2**30, 0), **(gpu or {}))
        for i in range(index, index + gpus)
    )
    fields = {"name": "one", "resource": "kyb.ai/gpu-1x-seat", "group_size": gpus, "seats_per_group": 2} | profile
    return Group(f"G{index}", f"00000{index}", Profile(**fields), members, (f"{gpus}x-00000{index}.s00",), 1)


def test_alike_groups_are_one_pool_without_a_word_in_the_configuration() -> None:
    pools = peers([group(0), group(1), group(2)])
    assert {name: [one.name for one in others] for name, others in pools.items()} == {
        "G0": ["G1", "G2"],
        "G1": ["G0", "G2"],
        "G2": ["G0", "G1"],
    }


def test_pairs_exchange_seats_also_inside_a_quad_which_exchanges_none() -> None:
    pair, other, quad = group(0, gpus=2), group(2, gpus=2), replace(group(0, gpus=4, name="four"), name="Q")
    assert peers([pair, other, quad]) == {"G0": (other,), "G2": (pair,), "Q": ()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (group(0, rebalance=False), group(1, rebalance=False)),
        (group(0), group(1, gpu={"name": "A100"})),
        (group(0), group(1, gpu={"memory_bytes": 94 * 2**30})),
        (group(0), group(1, name="two", resource="kyb.ai/two")),
        (group(0, gpus=2), group(1, gpus=2)),
        (group(0, gpus=2), group(2)),
        (group(0, gpu={"mig": MIG}), group(1, gpu={"mig": MIG})),
        (group(0), replace(group(0), name="again")),
    ],
    ids=[
        "bound",
        "another chip",
        "another memory",
        "another profile",
        "a shared GPU",
        "another size",
        "MIG",
        "the same GPU",
    ],
)
def test_groups_that_are_not_alike_exchange_no_seat(first: Group, second: Group) -> None:
    assert peers([first, second]) == {first.name: (), second.name: ()}
