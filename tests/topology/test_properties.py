"""Whatever the configuration and the machine: groups are disjoint or nested, IDs are unique and stable."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from hypothesis import given
from hypothesis import strategies as st

from kybernate.config import ConfigError, GpuTopology, GroupSpec, NodeConfig
from kybernate.config.checks import check
from kybernate.machine import Gpu, Link, PcieLevel
from kybernate.topology import SEAT_ID, Group, Topology, group_key, plan, seat_id
from tests.topology.machines import GIB, part, profile

KINDS = ("1g.10gb", "3g.40gb")
OVERLAPS = ("none", "timeshare")
Machine = tuple[tuple[Gpu, ...], tuple[Link, ...], tuple[Gpu, ...]]
Case = tuple[NodeConfig, Machine, Topology]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def machines(draw: Draw, modes: tuple[str, ...] = ("whole", "whole", "cut alike", "cut")) -> Machine:
    """Up to ten GPUs with any links between them, as their order on the bus or not; perhaps cut by MIG."""
    count = draw(st.integers(1, 10))
    slots = draw(st.permutations(range(count)))
    nodes, names = st.sampled_from([None, 0, 1]), st.sampled_from(["A", "A", "B"])
    mode = draw(st.sampled_from(modes))
    cut = [mode == "cut alike" or (mode == "cut" and draw(st.booleans())) for _ in range(count)]
    seed = draw(st.integers(0, 99))
    gpus = tuple(
        Gpu(
            *(index, f"GPU-{uuid5(NAMESPACE_OID, f'{seed}/{index}')}", index, f"0000:{slots[index] + 1:02x}:00.0"),
            *(draw(names), 80 * GIB, draw(nodes), None, cut[index]),
        )
        for index in range(count)
    )
    levels, nvlinks = st.sampled_from(PcieLevel), st.sampled_from([0, 0, 4, 12])
    links = tuple(
        Link(a.uuid, b.uuid, draw(levels), draw(nvlinks), draw(st.booleans()))
        for a, b in combinations(gpus, 2)
        if draw(st.integers(0, 9))
    )
    kinds = KINDS[:1] if mode == "cut alike" else KINDS
    instances = tuple(
        part(gpu, number, draw(st.sampled_from(kinds)))
        for gpu in gpus
        if gpu.mig_enabled
        for number in range(draw(st.integers(0, 3)))
    )
    return gpus, links, instances


@st.composite
def wild(draw: Draw, machine: Machine) -> NodeConfig:
    """Names what is not there, crosses, overlaps, contradicts itself; or not."""
    names: list[int | str] = [gpu.uuid for gpu in (*machine[0], *machine[2])]
    names += [gpu.index for gpu in machine[0]] + [99]
    groups = draw(st.lists(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=4), max_size=3))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), unique=True, min_size=1, max_size=4))
    kinds = draw(st.lists(st.sampled_from(KINDS), unique=True))
    return NodeConfig(
        profiles=tuple(draw(st.permutations([*map(profile, sizes), *(profile(1, mig=kind) for kind in kinds)]))),
        gpu_topology=_listing(groups, draw(st.sampled_from(OVERLAPS))),
        mig_strategy=draw(st.sampled_from(["none", "single", "mixed"])),
    )


@st.composite
def fitting(draw: Draw) -> Case:
    """A configuration that fits its machine, and the plan."""
    machine = draw(machines())
    gpus, _, instances = machine
    cut = [gpu.mig_enabled for gpu in gpus]
    uniform = not any(cut) or (all(cut) and len({gpu.mig.profile for gpu in instances if gpu.mig}) <= 1)
    strategy = draw(st.sampled_from(["none", "single", "mixed"] if uniform else ["none", "mixed"]))
    overlap = draw(st.sampled_from(OVERLAPS))
    whole = draw(st.permutations([gpu.uuid for gpu in gpus if not gpu.mig_enabled]))
    groups: list[list[str]] = []
    while whole and draw(st.booleans()):
        size = draw(st.integers(1, min(4, len(whole))))
        groups.append(whole[:size])
        if overlap == "timeshare" and size > 1 and draw(st.booleans()):
            groups.append(whole[: draw(st.integers(1, size - 1))])
        whole = whole[size:]
    sizes = {len(group) for group in groups} | draw(st.sets(st.integers(1, min(8, len(gpus))), max_size=3))
    kinds = draw(st.lists(st.sampled_from(KINDS), unique=True)) if strategy == "mixed" else []
    if strategy == "single" or not kinds:
        sizes |= {1}
    seats = st.sampled_from([1, 4, 100])
    found = [profile(size, draw(seats)) for size in sorted(sizes)] + [profile(1, mig=kind) for kind in kinds]
    config = NodeConfig(
        profiles=tuple(draw(st.permutations(found))),
        gpu_topology=_listing(draw(st.permutations(groups)), overlap),
        mig_strategy=strategy,
    )
    check(config)
    return config, machine, plan(config, *machine)


def _listing(groups: Sequence[Sequence[int | str]], overlap: str) -> GpuTopology:
    listed = tuple(GroupSpec(name=f"L{number}", gpus=tuple(gpus)) for number, gpus in enumerate(groups))
    return GpuTopology(groups=listed, overlap=overlap)


def members(group: Group) -> frozenset[str]:
    return frozenset(group.uuids)


def ids(topology: Topology) -> dict[str, frozenset[str]]:
    return {seat: members(group) for group in topology.groups for seat in group.seat_ids}


@given(st.data(), st.booleans())
def test_nothing_is_raised_but_config_errors_with_a_remedy(data: st.DataObject, lenient: bool) -> None:
    machine = data.draw(machines())
    config = data.draw(wild(machine))
    text = ""
    try:
        check(config)
        plan(config, *machine, lenient=lenient)
    except ConfigError as error:
        text = str(error)
    assert not text or (";" in text and "\n" not in text)


@given(fitting())
def test_groups_are_disjoint_or_nested_and_name_their_overlaps(
    case: Case,
) -> None:
    config, _, found = case
    for a, b in combinations(found.groups, 2):
        shared = members(a) & members(b)
        assert (b.name in a.overlaps) == (a.name in b.overlaps) == bool(shared)
        if config.gpu_topology.overlap == "none":
            assert not shared
        else:
            assert not shared or (shared in (members(a), members(b)) and members(a) != members(b))


@given(fitting())
def test_ids_and_names_are_unique_and_short_and_every_group_fits_its_profile(
    case: Case,
) -> None:
    config, _, found = case
    seats = [seat for group in found.groups for seat in group.seat_ids]
    names = [group.name for group in found.groups]
    assert len(seats) == len(set(seats))
    assert len(names) == len(set(names))
    assert all(len(text) <= 63 for text in (*seats, *names))
    assert all(SEAT_ID.fullmatch(seat) for seat in seats)
    for group in found.groups:
        assert group.profile in config.profiles
        assert len(group.gpus) == group.profile.group_size
        assert len(group.seat_ids) == group.profile.seats_per_group
        assert group.why
        assert not any(gpu.mig_enabled for gpu in group.gpus), "a GPU in MIG mode is never offered as a whole"
        assert len(group.gpus) == 1 or not group.is_mig


@given(fitting())
def test_every_profile_has_groups_or_a_warning_that_names_it(case: Case) -> None:
    config, _, found = case
    offered = {group.profile.name for group in found.groups}
    warned = {profile.name for profile in config.profiles if any(profile.resource in text for text in found.warnings)}
    assert offered | warned == {profile.name for profile in config.profiles}
    assert not offered & warned


@given(fitting(), st.data())
def test_renumbered_gpus_keep_their_keys_and_ids(case: Case, data: st.DataObject) -> None:
    config, (gpus, links, instances), found = case
    numbers = data.draw(st.permutations(range(len(gpus))))
    index = {gpu.uuid: numbers[gpu.index] for gpu in gpus}
    turned = data.draw(st.permutations([replace(gpu, index=index[gpu.uuid], minor=0) for gpu in gpus]))
    parts = [replace(gpu, index=index[gpu.mig.parent]) for gpu in instances if gpu.mig]
    links = tuple(replace(link, a=link.b, b=link.a) for link in reversed(links))
    assert ids(plan(config, turned, links, parts[::-1])) == ids(found)


@given(fitting(), st.data())
def test_another_profile_changes_no_id_of_a_listed_group(case: Case, data: st.DataObject) -> None:
    config, machine, found = case
    have = {profile.group_size for profile in config.profiles if profile.mig_profile is None}
    more = [profile(size, 2) for size in range(1, len(machine[0]) + 1) if size not in have]
    if not more:
        return
    extra = data.draw(st.sampled_from(more))
    place = data.draw(st.integers(0, len(config.profiles)))
    changed = config.model_copy(update={"profiles": (*config.profiles[:place], extra, *config.profiles[place:])})
    after = plan(changed, *machine)
    listed = {spec.name for spec in config.gpu_topology.groups}
    for group in found.groups:
        if group.name in listed:
            assert next(each for each in after.groups if each.name == group.name).seat_ids == group.seat_ids


def test_two_groups_of_one_short_key_get_longer_ones() -> None:
    """Found by trying: the SHA-256 of these two UUIDs begins alike."""
    seen: dict[str, str] = {}
    for number in range(100_000):
        uuid = f"GPU-{number}"
        twin = seen.setdefault(group_key([uuid]), uuid)
        if twin != uuid:
            break
    gpus = [Gpu(i, each, i, f"0000:{i + 1:02x}:00.0", "A", GIB, 0) for i, each in enumerate((twin, uuid, "GPU-x"))]
    config = NodeConfig(profiles=(profile(1, 1),))
    found = plan(config, gpus)
    keys = [group.key for group in found.groups]
    assert [len(key) for key in keys] == [12, 12, 6]
    assert keys[0][:6] == keys[1][:6]
    seats = [seat for group in found.groups for seat in group.seat_ids]
    assert len(set(seats)) == 3
    assert all(SEAT_ID.fullmatch(seat) for seat in seats)


def test_an_id_of_the_largest_group_is_short() -> None:
    assert len(seat_id(64, "0" * 12, 99)) == 20
