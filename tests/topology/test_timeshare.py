"""Groups that share GPUs are nested or disjoint, whatever a configuration says."""

import pytest

from kybernate.config import ConfigError
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.topology import plan
from tests.topology.machines import config, gpu, indices

FOUR = [gpu(number, number // 2) for number in range(4)]
EIGHT = [gpu(number, number // 4) for number in range(8)]


def test_sizes_without_listed_groups_form_a_tree_that_follows_the_machine() -> None:
    found = plan(config(1, 2, 4, overlap="timeshare"), *hardware("8xL40S"))
    assert indices(found.groups, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert indices(found.groups, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert indices(found.groups, 1) == [[number] for number in range(8)]
    assert found.warnings == ()
    overlaps = {group.name: group.overlaps for group in found.groups}
    assert overlaps["G0"] == ("G01", "G0123")
    assert overlaps["G01"] == ("G0", "G1", "G0123")
    assert overlaps["G4567"] == ("G4", "G5", "G6", "G7", "G45", "G67")


def test_larger_groups_take_listed_smaller_ones_whole() -> None:
    groups = {"A": [0, 2], "B": [1, 3]}
    found = plan(config(1, 2, 4, groups=groups, overlap="timeshare"), EIGHT)
    assert indices(found.groups, 2) == [[0, 2], [1, 3]]
    assert indices(found.groups, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.warnings == ()


def test_smaller_groups_stay_inside_listed_larger_ones() -> None:
    found = plan(config(2, 4, groups={"odd": [0, 1, 2, 5]}, overlap="timeshare"), EIGHT)
    assert indices(found.groups, 2) == [[0, 1], [2, 5], [3, 4], [6, 7]]
    assert found.groups[-1].overlaps == ("G01", "G25")


def test_a_size_that_cannot_lie_inside_or_around_the_others_gets_no_seats_and_a_warning() -> None:
    found = plan(config(2, 3, groups={"A": [0, 1], "B": [2, 3]}, overlap="timeshare"), FOUR)
    assert indices(found.groups) == [[0, 1], [2, 3]]
    assert found.warnings == (
        "profile gpu-3x (kyb.ai/gpu-3x-seat) has no seats here: no 3 GPUs hold the other groups whole or lie inside "
        "one; list groups of this size to change that",
    )


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ({"A": [0, 1], "B": [1, 2]}, "groups A and B share this GPU and neither lies inside the other"),
        ({"A": [0, 1], "B": [1, "GPU-0002"]}, "groups A and B share this GPU and neither lies inside the other"),
        ({"A": [0, 1], "B": ["GPU-0001", 0]}, "groups A and B are the same GPUs; remove one"),
        ({"A": [0, "GPU-0000"]}, "GPU 0 stands twice in group A; name each GPU once"),
    ],
)
def test_groups_that_cross_are_an_error_that_names_both(groups: dict[str, list[int | str]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan(config(1, 2, groups=groups, overlap="timeshare"), FOUR)
