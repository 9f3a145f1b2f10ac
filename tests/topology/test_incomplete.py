"""Services form groups although a GPU is missing; a person who checks a file hears of it as an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.config import ConfigError
from kybernate.dev.fakes.gpu.spec import hardware
from kybernate.machine import Gpu, Link
from kybernate.topology import plan
from tests.topology.machines import config, gpu, indices
from tests.topology.test_properties import fitting, ids

FOUR = tuple(gpu(number) for number in range(4))
PAIRS: dict[str, list[int | str]] = {"A": [0, 1], "B": [2, 3]}


@pytest.mark.parametrize("named", [PAIRS, {"A": [0, 1], "B": ["GPU-0002", "GPU-0003"]}])
def test_a_group_whose_gpu_is_missing_is_left_out_with_group_gpu_and_remedy(named: dict[str, list[int | str]]) -> None:
    chosen = config(2, groups=named)
    with pytest.raises(ConfigError, match="lacks"):
        plan(chosen, FOUR[:3])
    found = plan(chosen, FOUR[:3], lenient=True)
    assert indices(found.groups) == [[0, 1]]
    (missing,) = found.incomplete
    assert (missing.name, missing.gpus, missing.missing) == ("B", (FOUR[2],), (named["B"][1],))
    assert found.warnings == (missing.why,)
    assert all(word in missing.why for word in ("group B", str(named["B"][1]), "take it out of the configuration"))
    assert plan(chosen, FOUR, lenient=True) == plan(chosen, FOUR)


def test_no_other_group_takes_what_is_left_of_it() -> None:
    # Groups of two are listed: none is found instead of B. Groups of one would take the rest of B, and lose it again.
    found = plan(config(2, 1, groups=PAIRS), FOUR[:3], lenient=True)
    assert indices(found.groups) == [[0, 1]]
    found = plan(config(1, 2, groups={"B": [2, 3]}), FOUR[:3], lenient=True)
    assert indices(found.groups) == [[0], [1]]


def test_small_groups_go_on_inside_a_large_one_that_is_incomplete() -> None:
    chosen = config(1, 2, 4, groups={"L": [0, 1, 2, 3]}, overlap="timeshare")
    eight = tuple(gpu(number) for number in range(8))
    whole = plan(chosen, eight)
    found = plan(chosen, [*eight[:3], *eight[4:]], lenient=True)
    assert indices(found.groups, 4) == []
    assert [group.name for group in found.incomplete] == ["L"]
    assert [pair for pair in indices(whole.groups, 2) if 3 not in pair] == indices(found.groups, 2)
    assert indices(found.groups, 1) == [[number] for number in range(8) if number != 3]


def test_a_profile_that_wants_more_gpus_than_there_are_has_no_seats() -> None:
    found = plan(config(4, 1, overlap="timeshare"), FOUR[:3], lenient=True)
    assert indices(found.groups) == [[0], [1], [2]]
    assert any("shows only 3 GPUs" in warning for warning in found.warnings)


def test_a_missing_mig_instance_is_a_missing_gpu() -> None:
    gpus, links, parts = hardware("2xA100-half-mig")
    kind = next(part.mig.profile for part in parts if part.mig)
    chosen = config(1, kind, groups={"M": ["MIG-not-there"]}, mig="mixed")
    found = plan(chosen, gpus, links, parts, lenient=True)
    assert [group.name for group in found.incomplete] == ["M"]
    assert {group.profile.mig_profile for group in found.groups} == {None}


@given(st.data())
def test_with_everything_there_it_is_the_same_plan(data: st.DataObject) -> None:
    chosen, machine, found = data.draw(fitting())
    assert plan(chosen, *machine, lenient=True) == found


@given(st.data())
def test_whatever_is_missing_the_complete_groups_stay_as_they_are(data: st.DataObject) -> None:
    chosen, machine, whole = data.draw(fitting())
    lost = data.draw(st.sets(st.sampled_from([gpu.uuid for gpu in machine[0]]), max_size=3))
    left = tuple(tuple(one for one in part if _there(one, lost)) for part in machine)
    try:
        found = plan(chosen, *left, lenient=True)  # type: ignore[arg-type]
    except ConfigError as error:
        assert ";" in str(error)  # noqa: PT017  (what is wrong for another reason)
        return
    assert len(ids(found)) == sum(len(group.seat_ids) for group in found.groups)
    before = {group.name: group for group in whole.groups}
    for spec in chosen.gpu_topology.groups:
        if not lost & {gpu.uuid for gpu in before[spec.name].gpus}:
            assert next(group for group in found.groups if group.name == spec.name).gpus == before[spec.name].gpus


def _there(one: Gpu | Link, lost: set[str]) -> bool:
    if isinstance(one, Link):
        return not {one.a, one.b} & lost
    return not {one.uuid, one.mig.parent if one.mig else one.uuid} & lost
