"""Each strategy on a few groups, and the plugin's choices on a machine."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.config import NodeConfig
from kybernate.config.fields import PLACEMENTS
from kybernate.machine import Gpu, Link, PcieLevel
from kybernate.topology import plan
from services.plugin.core.devices import Offer
from services.plugin.core.placement import GroupLoad, best, group_distance

ONE, TWO, FOUR = "kyb.ai/one", "kyb.ai/two", "kyb.ai/four"


def place(name: str, order: int, *, used: int = 0, seats: int = 4, **more: Any) -> GroupLoad:
    return GroupLoad(name, order, seats, seats - used, **({"nearby_allocated": used} | more))


def rank(strategy: str, loads: Iterable[GroupLoad], wish: str = "") -> list[GroupLoad]:
    """The groups that can take a seat, in the order in which ``best`` chooses them."""
    left, found = list(loads), []
    while (load := best(strategy, left, wish)) is not None:
        left.remove(load)
        found.append(load)
    return found


def names(strategy: str, *places: GroupLoad, wish: str = "") -> list[str]:
    return [found.name for found in rank(strategy, places, wish)]


def test_first_fit_follows_the_order_of_the_configuration_and_skips_full_groups() -> None:
    assert names("first-fit", place("b", 1), place("a", 0, used=3), place("full", 2, used=4)) == ["a", "b"]


def test_best_fit_fills_a_group_and_worst_fit_takes_the_emptiest() -> None:
    groups = place("a", 0, used=1), place("b", 1, used=3), place("c", 2)
    assert names("best-fit", *groups) == ["b", "a", "c"]
    assert names("worst-fit", *groups) == ["c", "a", "b"]


def test_bin_pack_fills_the_numa_node_with_the_most_seats_first() -> None:
    quiet = place("fuller, alone", 0, used=2, nearby_allocated=2)
    busy = place("emptier, among others", 1, used=1, nearby_allocated=5)
    assert names("bin-pack", quiet, busy)[0] == "emptier, among others"
    assert names("best-fit", quiet, busy)[0] == "fuller, alone"


def test_spread_compares_seats_per_slot_and_then_the_numa_nodes() -> None:
    shared = place("two slots", 0, used=2, slots=2, seats=8)
    lonely = place("one slot", 1, used=2, slots=1, seats=8)
    assert names("spread", lonely, shared) == ["two slots", "one slot"]
    assert names("worst-fit", lonely, shared) == ["two slots", "one slot"]  # only by its order
    a, b = place("busy socket", 0, nearby_allocated=3), place("quiet socket", 1, nearby_allocated=1)
    assert names("spread", a, b) == ["quiet socket", "busy socket"]


def test_topology_aware_takes_the_closest_gpus_with_an_idle_slot() -> None:
    far, near = place("far", 0, distance=(4, 0)), place("near", 1, distance=(0, -12))
    assert names("topology-aware", far, near) == ["near", "far"]
    taken = place("near", 1, used=1, distance=(0, -12))
    assert names("topology-aware", far, taken) == ["far", "near"]
    straddling = place("straddling", 0, numa_nodes=2)
    assert names("topology-aware", straddling, place("within", 1)) == ["within", "straddling"]


@pytest.mark.parametrize("strategy", PLACEMENTS)
def test_with_every_strategy_wishes_come_first_and_overlapping_groups_last(strategy: str) -> None:
    disturbed = place("disturbed", 0, used=3, overlapping_allocated=2, nearby_allocated=9)
    free = place("free", 1)
    assert names(strategy, disturbed, free) == ["free", "disturbed"]
    assert names(strategy, disturbed, free, wish="disturbed") == ["disturbed", "free"]
    assert names(strategy, free, place("full", 2, used=4), wish="full") == ["free"]
    assert best(strategy, []) is None


places = st.builds(
    lambda name, order, seats, used, slots, overlapping, nearby, level: GroupLoad(
        f"{name}-{order}", order, seats, max(0, seats - used), slots, overlapping, nearby, (level, 0)
    ),
    st.text("abc", min_size=1, max_size=3),
    st.integers(0, 50),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 20),
    st.integers(0, 4),
)


@given(st.sampled_from(PLACEMENTS), st.lists(places, max_size=8, unique_by=lambda p: p.order), st.randoms())
def test_ties_are_deterministic_and_the_best_is_the_first(strategy: str, found: list[GroupLoad], chance: Any) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)
    assert rank(strategy, shuffled) == rank(strategy, found)
    assert all(p.free for p in rank(strategy, found))
    assert best(strategy, shuffled) == next(iter(rank(strategy, found)), None)


def machine(count: int = 8) -> tuple[tuple[Gpu, ...], tuple[Link, ...]]:
    """Two sockets; NVLink only between the GPUs of each last pair of a socket."""
    gpus = tuple(Gpu(i, f"GPU-{i}", i, f"0000:{i:02x}:00.0", "fake", 80 << 30, i // (count // 2)) for i in range(count))
    links = []
    for a in range(count):
        for b in range(a + 1, count):
            same = a // (count // 2) == b // (count // 2)
            linked = a % 4 == 2 and b == a + 1
            links.append(
                Link(f"GPU-{a}", f"GPU-{b}", PcieLevel.PIX if same else PcieLevel.SYS, nvlinks=12 if linked else 0)
            )
    return gpus, tuple(links)


def offer(placement: str) -> Offer:
    gpus, links = machine()
    profiles = [
        {"name": "one", "resource": ONE, "groupSize": 1, "seatsPerGroup": 3, "placement": placement},
        {"name": "two", "resource": TWO, "groupSize": 2, "seatsPerGroup": 3, "placement": placement},
        {"name": "four", "resource": FOUR, "groupSize": 4, "seatsPerGroup": 3, "placement": placement},
    ]
    text = json.dumps({"profiles": profiles, "gpuTopology": {"overlap": "timeshare"}})
    config = NodeConfig.model_validate_json(text)
    return Offer(plan(config, gpus, links).groups, gpus, Path("/run/kyb/seats"), links=links)


def take(node: Offer, resource: str, in_use: set[str], **more: Any) -> str:
    """As kubelet does: ask with what is free, take the first answer. Returns the group."""
    free = [seat for seat, group in node.seats.items() if group.profile.resource == resource and seat not in in_use]
    (chosen,) = node.preferred(free, (), 1, frozenset(), allocated=in_use, **more)
    in_use.add(chosen)
    return node.seats[chosen].name


def test_topology_aware_takes_the_nvlink_pairs_first() -> None:
    node, in_use = offer("topology-aware"), set[str]()
    assert [take(node, TWO, in_use) for _ in range(4)] == ["G23", "G67", "G01", "G45"]
    assert take(node, TWO, in_use) == "G23"  # all have one now


def test_spread_alternates_between_the_sockets_and_bin_pack_stays_in_one() -> None:
    node, in_use = offer("spread"), set[str]()
    assert [take(node, ONE, in_use) for _ in range(4)] == ["G0", "G4", "G1", "G5"]
    node, in_use = offer("bin-pack"), set[str]()
    assert [take(node, ONE, in_use) for _ in range(4)] == ["G0", "G0", "G0", "G1"]


def test_groups_that_share_gpus_with_seats_of_other_resources_come_last() -> None:
    node, in_use = offer("first-fit"), set[str]()
    assert take(node, FOUR, in_use) == "G0123"
    assert take(node, ONE, in_use) == "G4"
    assert take(node, TWO, in_use) == "G67"
    assert take(node, TWO, in_use) == "G67"  # every other pair shares a GPU with an allocated seat
    assert take(node, ONE, in_use, wish="G3") == "G3"


def test_the_distance_of_a_group_is_that_of_its_worst_pair() -> None:
    known = {frozenset((link.a, link.b)): link for link in machine()[1]}
    assert group_distance(["GPU-2", "GPU-3"], known) == (0, -12)
    assert group_distance(["GPU-0", "GPU-1"], known) == (1, 0)
    assert group_distance(["GPU-0", "GPU-2", "GPU-3"], known) == (1, 0)
    assert group_distance(["GPU-0", "GPU-4"], known) == (5, 0)
    assert group_distance(["GPU-0"], known) == (0, 0)
    assert group_distance(["GPU-0", "GPU-9"], known) > (5, 0)


def test_two_containers_of_a_pod_get_seats_one_after_the_other() -> None:
    node = offer("spread")
    free = [seat for seat, group in node.seats.items() if group.profile.resource == TWO]
    chosen = node.preferred(free, (), 3, frozenset())
    assert len({node.seats[seat].name for seat in chosen}) == 3
    assert node.preferred(free, chosen[:2], 2, frozenset()) == chosen[:2]
    assert node.preferred(free[:2], (), 3, frozenset()) == ()
