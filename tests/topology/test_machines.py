"""The machines that are sold, and the groups that people expect on them (issue 4, point 5)."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from kybernate.config import load
from kybernate.dev.fakes.gpu.spec import PRESETS, hardware
from kybernate.machine import PcieLevel
from kybernate.topology import plan
from tests.topology.machines import config, gpu, indices, link

ONE_SOCKET_EACH = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("preset", "size", "expected", "why"),
    [
        ("single-24gb", 1, [[0]], "a single GPU on NUMA node 0"),
        ("4xA100-nvlink-pairs", 2, [[0, 1], [2, 3]], "NVLink ×12 between 0 and 1; both share NUMA node 0"),
        ("4xA100-shuffled", 2, [[3, 1], [2, 0]], "NVLink ×12 between 3 and 1; both share NUMA node 0"),
        ("4xA100-pcie", 2, [[0, 1], [2, 3]], "same PCIe switch (PIX); both share NUMA node 0"),
        ("4xA100-pcie", 4, [[0, 1, 2, 3]], "same NUMA node 0 (NODE)"),
        ("8xA100-nvswitch", 4, ONE_SOCKET_EACH, "NVLink ×12 between all 4 through NVSwitch; all 4 share NUMA node 0"),
        ("8xH100-nvswitch", 4, ONE_SOCKET_EACH, "NVLink ×18 between all 4 through NVSwitch; all 4 share NUMA node 0"),
        ("8xA100-nvswitch", 2, PAIRS, "NVLink ×12 between 0 and 1 through NVSwitch; both share NUMA node 0"),
        ("8xH100-nvswitch", 2, PAIRS, "NVLink ×18 between 0 and 1 through NVSwitch; both share NUMA node 0"),
        ("8xL40S", 4, ONE_SOCKET_EACH, "same NUMA node 0 (NODE)"),
        ("8xL40S", 2, PAIRS, "same PCIe switch (PIX); both share NUMA node 0"),
        ("8xL40S", 8, [list(range(8))], "across NUMA nodes 0 and 1 (SYS)"),
    ],
)
def test_groups_lie_where_people_expect_them_and_say_why(
    preset: str, size: int, expected: list[list[int]], why: str
) -> None:
    found = plan(config(size), *hardware(preset))
    assert indices(found.groups) == expected
    assert found.groups[0].why == why
    assert all(group.why for group in found.groups)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_gives_some_group(preset: str) -> None:
    machine = hardware(preset)
    kinds = sorted({part.mig.profile for part in machine.instances if part.mig})
    sizes = [size for size in (1, 2, 4, 8) if size <= len(machine.gpus)]
    found = plan(config(*sizes, *kinds, overlap="timeshare", mig="mixed" if kinds else "none"), *machine)
    assert found.groups


def test_the_meshed_v100_machine_is_cut_into_its_two_quads() -> None:
    """DGX-1: one or two NVLinks to four neighbours each; pairs and quads must not cross the sockets."""
    doubled = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]
    single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)]
    gpus = [gpu(number, number // 4) for number in range(8)]
    links = [
        link(
            a,
            b,
            PcieLevel.NODE if a.numa_node == b.numa_node else PcieLevel.SYS,
            ((a.index, b.index) in single) + 2 * ((a.index, b.index) in doubled),
        )
        for a, b in combinations(gpus, 2)
    ]
    assert indices(plan(config(4), gpus, links).groups) == ONE_SOCKET_EACH
    assert indices(plan(config(2), gpus, links).groups) == [[0, 3], [1, 2], [4, 7], [5, 6]]
    tree = plan(config(1, 2, 4, 8, overlap="timeshare"), gpus, links)
    assert tree.groups[0].overlaps == ("G03", "G0123", "G01234567")
    why = tree.groups[-2].why
    assert why == "NVLink ×1 to ×2 between all 4; all 4 share NUMA node 1"


def test_without_links_the_numa_nodes_decide() -> None:
    gpus = [gpu(number, number % 2) for number in range(4)]
    found = plan(config(2), gpus)
    assert indices(found.groups) == [[0, 2], [1, 3]]
    assert found.groups[0].why == "same NUMA node 0 (NODE)"


def test_without_links_and_numa_nodes_the_pci_order_decides_and_the_reason_names_it() -> None:
    found = plan(config(2), [gpu(number, None) for number in range(4)])
    assert indices(found.groups) == [[0, 1], [2, 3]]
    assert found.groups[0].why == "in PCI order: the machine does not report how they are connected"


def test_unlike_gpus_do_not_share_a_group_where_that_can_be_avoided() -> None:
    gpus = [gpu(0, name="A"), gpu(1, name="B"), gpu(2, name="A"), gpu(3, name="B")]
    links = [
        link(a, b, PcieLevel.PIX if a.index // 2 == b.index // 2 else PcieLevel.SYS) for a, b in combinations(gpus, 2)
    ]
    assert indices(plan(config(2), gpus, links).groups) == [[0, 2], [1, 3]]


def test_the_unused_gpu_is_the_farthest_one_and_a_warning_names_it() -> None:
    gpus = [gpu(0, 0), gpu(1, 1), gpu(2, 1)]
    found = plan(config(2), gpus)
    assert indices(found.groups) == [[1, 2]]
    assert found.warnings == (
        "GPU 0 is in no group, so nothing is offered there; add a profile of groupSize 1, or list groups",
    )


def test_every_group_tells_its_links_also_a_listed_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "profiles: [{name: two, resource: x.io/two, groupSize: 2, seatsPerGroup: 1}]\n"
        "gpuTopology: {groups: [{name: far, gpus: [0, 2]}]}\n"
    )
    (group,) = plan(load(path), *hardware("4xA100-nvlink-pairs")).groups
    assert group.why == "listed; across NUMA nodes 0 and 1 (SYS)"


def test_a_matrix_has_the_words_of_nvidia_smi() -> None:
    from kybernate.dev.topology import legend, matrix

    machine = hardware("8xL40S")
    table = matrix(machine.gpus, machine.links)
    assert table[0] == ("", *(f"GPU{number}" for number in range(8)), "NUMA Affinity")
    assert table[1] == ("GPU0", "X", "PIX", "PXB", "NODE", "SYS", "SYS", "SYS", "SYS", "0")
    assert [word for word, _ in legend(table)] == ["X", "SYS", "NODE", "PXB", "PIX"]
    lonely = matrix([gpu(0, None), gpu(1, None)], [])
    assert lonely[1:] == (("GPU0", "X", "?", "N/A"), ("GPU1", "?", "X", "N/A"))
    assert json.dumps(table)
