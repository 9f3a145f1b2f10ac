import re
from pathlib import Path

import pytest

from kybernate.config import ConfigError, HealthConfig, NodeConfig, PolicyConfig, load
from kybernate.dev.stack import LAPTOP
from kybernate.dev.stack.options import fake_gpus
from kybernate.lab.cli.simulate_options import parse_gigabytes
from kybernate.policy import KybSlo
from kybernate.sizes import parse_size
from kybernate.topology import group_key, plan
from tests.config.files import write

DOCS = Path(__file__).parents[2] / "docs"
CUSTOMERS_SAMPLE = """\
profiles:
  - name: gpu-1x-seat
    resource: kyb.ai/gpu-1x-seat
    groupSize: 1
    seatsPerGroup: 4

  - name: gpu-2x-seat
    resource: kyb.ai/gpu-2x-seat
    groupSize: 2
    seatsPerGroup: 3

  - name: gpu-4x-seat
    resource: kyb.ai/gpu-4x-seat
    groupSize: 4
    seatsPerGroup: 2

gpuTopology:
  groups:
    - name: G01
      gpus: [0,1]
    - name: G23
      gpus: [2,3]
"""


def read(tmp_path: Path, text: str) -> NodeConfig:
    return load(write(tmp_path, text))


def profile(size: int, seats: int = 2) -> str:
    return f"  - {{name: p{size}, resource: kyb.ai/gpu-{size}x-seat, groupSize: {size}, seatsPerGroup: {seats}}}\n"


def test_the_customers_sample_loads_as_it_is(tmp_path: Path) -> None:
    config = read(tmp_path, CUSTOMERS_SAMPLE)
    assert [(p.name, p.group_size, p.seats_per_group, p.active_slots) for p in config.profiles] == [
        ("gpu-1x-seat", 1, 4, 1),
        ("gpu-2x-seat", 2, 3, 1),
        ("gpu-4x-seat", 4, 2, 1),
    ]
    assert [(group.name, group.gpus) for group in config.gpu_topology.groups] == [("G01", (0, 1)), ("G23", (2, 3))]
    assert config.policy == PolicyConfig("kyb-balanced", {})
    assert (config.mig_strategy, config.drain_seconds, config.warmup) == ("none", 60.0, True)


def test_sizes_that_would_overlap_listed_groups_get_no_seats_and_a_warning(tmp_path: Path) -> None:
    found = plan(read(tmp_path, CUSTOMERS_SAMPLE), fake_gpus(4, "80GiB"))
    assert [(group.name, len(group.seat_ids)) for group in found.groups] == [("G01", 3), ("G23", 3)]
    assert [text.split()[1] for text in found.warnings] == ["gpu-1x-seat", "gpu-4x-seat"]
    assert all("list groups of this size" in text for text in found.warnings)


def test_the_examples_of_the_documentation_load_and_name_the_defaults(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "config.md").read_text(), re.DOTALL)
    [one] = (block for block in blocks if block.startswith("profiles:"))
    config = read(tmp_path, one)
    least = read(tmp_path, "profiles:\n" + one[one.index("  - name") : one.index("gpuTopology:")])
    rest = {"gpu_topology", "policy", "tiers"}
    assert config.model_dump(exclude=rest) == least.model_dump(exclude=rest)
    assert config.policy.build() == least.policy.build()
    assert config.all_tiers == least.all_tiers
    assert (len(config.gpu_topology.groups), config.gpu_topology.overlap) == (1, "none")


def test_the_laptop_stack_has_three_disjoint_groups_and_no_warning() -> None:
    found = plan(load(LAPTOP / "config.yaml"), fake_gpus(4, "80GiB"))
    assert [(group.name, [gpu.index for gpu in group.gpus]) for group in found.groups] == [
        ("G0", [0]),
        ("G1", [1]),
        ("G23", [2, 3]),
    ]
    assert found.warnings == ()


def test_sizes_without_listed_groups_take_what_is_free_in_index_order(tmp_path: Path) -> None:
    text = "profiles:\n" + profile(2) + profile(1) + "gpuTopology: {groups: [{name: big, gpus: [2, 1]}]}\n"
    groups = plan(read(tmp_path, text), fake_gpus(4, "80GiB")).groups
    assert [(group.name, [gpu.index for gpu in group.gpus]) for group in groups] == [
        ("big", [2, 1]),
        ("G0", [0]),
        ("G3", [3]),
    ]


def test_profiles_take_their_turn_so_discovered_groups_are_disjoint_too(tmp_path: Path) -> None:
    found = plan(read(tmp_path, "profiles:\n" + profile(2) + profile(1)), fake_gpus(5, "80GiB"))
    assert [[gpu.index for gpu in group.gpus] for group in found.groups] == [
        [0, 1],
        [3, 4],
        [2],
    ]  # 2 alone on NUMA node 0
    assert found.warnings == ()


def test_a_discovered_group_never_takes_a_listed_groups_name(tmp_path: Path) -> None:
    text = "profiles:\n" + profile(2) + profile(1) + "gpuTopology: {groups: [{name: G0, gpus: [1, 2]}]}\n"
    groups = plan(read(tmp_path, text), fake_gpus(4, "80GiB")).groups
    assert len({group.name for group in groups}) == 3


def test_seat_ids_depend_on_uuids_and_not_on_their_order(tmp_path: Path) -> None:
    text = "profiles:\n" + profile(2, seats=3) + "gpuTopology: {groups: [{name: A, gpus: [0, 1]}]}\n"
    gpus = fake_gpus(2, "80GiB")
    (group,) = plan(read(tmp_path, text), gpus).groups
    (turned,) = plan(read(tmp_path, text.replace("[0, 1]", "[1, 0]")), gpus).groups
    key = group_key([gpu.uuid for gpu in gpus])
    assert len(key) == 6
    assert group.seat_ids == turned.seat_ids == (f"2x-{key}.s00", f"2x-{key}.s01", f"2x-{key}.s02")
    assert [gpu.index for gpu in turned.gpus] == [1, 0]


def test_gpus_may_be_named_by_uuid(tmp_path: Path) -> None:
    gpus = fake_gpus(2, "80GiB")
    text = "profiles:\n" + profile(1) + f"gpuTopology: {{groups: [{{name: A, gpus: [{gpus[1].uuid}]}}]}}\n"
    (group,) = plan(read(tmp_path, text), gpus).groups
    assert group.gpus == (gpus[1],)


def test_the_policys_constants_reach_the_policy(tmp_path: Path) -> None:
    text = "profiles:\n" + profile(1) + "policy: {name: kyb-slo, settings: {lateSlos: 7, idleSeconds: 2}}\n"
    config = read(tmp_path, text)
    assert config.policy.build() == KybSlo(late_slos=7.0, idle_seconds=2.0)


def test_what_a_tier_leaves_out_comes_from_the_known_one_or_from_standard(tmp_path: Path) -> None:
    text = (
        "profiles:\n"
        + profile(1)
        + ("tiers: {standard: {sloSeconds: 30}, gold: {weight: 4}, night: {sloSeconds: 600}}\n")
    )
    config = read(tmp_path, text)
    tiers = config.all_tiers
    assert (tiers["gold"].weight, tiers["gold"].slo_seconds) == (4.0, 12.0)
    assert (tiers["night"].weight, tiers["night"].slo_seconds) == (1.0, 600.0)


def test_several_slots_and_durations_are_read(tmp_path: Path) -> None:
    text = (
        "profiles:\n  - {name: a, resource: x.io/a, groupSize: 1, seatsPerGroup: 3, activeSlots: 2, "
        "exposeDevices: node}\ndrainSeconds: 5\nwarmup: false\nstartWithinSeconds: 1.5\nmigStrategy: none\n"
        "deviceListStrategy: cdi-cri\nhealth: {ignoredXids: [], recoveryReads: 3}\n"
    )
    config = read(tmp_path, text)
    assert (config.profiles[0].active_slots, config.profiles[0].expose_devices) == (2, "node")
    assert (config.drain_seconds, config.warmup, config.start_within_seconds) == (5.0, False, 1.5)
    assert config.resources == ("x.io/a",)
    assert (config.device_list_strategy, config.health) == ("cdi-cri", HealthConfig(ignored_xids=(), recovery_reads=3))


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    text = (
        "profiles:\n  - &one {name: a, resource: x.io/a, groupSize: 1, seatsPerGroup: 3}\n"
        "  - {<<: *one, name: b, resource: x.io/b, groupSize: 2}\n"
    )
    assert [p.seats_per_group for p in read(tmp_path, text).profiles] == [3, 3]


@pytest.mark.parametrize("count", [0, 65])
def test_a_machine_has_1_to_64_gpus(count: int) -> None:
    with pytest.raises(ValueError, match="give 1 to 64"):
        fake_gpus(count, "80GiB")


@pytest.mark.parametrize("size", ["512", '"512"', "1073741824", "0.5", '"0.5"', "100000000000.0", "9999999999TiB"])
def test_a_size_without_a_unit_is_refused(tmp_path: Path, size: str) -> None:
    """``hostMemory: 512`` was 512 bytes: no seat was ever parked, and nothing showed it."""
    file = write(tmp_path, f"hostMemory: {size}\n")
    with pytest.raises(
        ConfigError, match=r":1: hostMemory: '?[\d.TiBe+]+'?: is not a size with a unit; write bytes with a unit"
    ):
        load(file)


@pytest.mark.parametrize(("written", "read"), [("010", "8"), ("1:30", "90"), ("-1:30", "-90"), ("1:30.5", "90.5")])
def test_a_number_that_yaml_reads_otherwise_is_refused(tmp_path: Path, written: str, read: str) -> None:
    file = write(tmp_path, f"profiles: []\ndrainSeconds: {written}\n")
    with pytest.raises(ConfigError, match=rf":2: drainSeconds: '{re.escape(written)}': is {re.escape(read)} in YAML; "):
        load(file)


@pytest.mark.parametrize(("text", "size"), [("1TiB", 2**40), ("40GB", 40 * 10**9), ("512M", 512 * 10**6), ("0", 0)])
def test_sizes_take_the_units_that_people_write(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_gigabytes(text) == size / 10**9


def test_a_number_of_the_simulator_is_gigabytes() -> None:
    assert parse_gigabytes("80") == 80.0
    for wrong in ("-1", "nan", "1 house"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_gigabytes(wrong)
