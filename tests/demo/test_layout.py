from pathlib import Path

import pytest

from kybernate.config import load
from kybernate.dev.demo.workload import MOST_MODELS, LayoutError, config_yaml, plan, pods_yaml
from kybernate.dev.stack.options import StackOptions, check


def test_the_heaviest_go_to_the_least_loaded_groups() -> None:
    layout = plan({"a": 10, "b": 9, "c": 5, "d": 4}, gpus=2)
    assert layout.groups == (("a", "d"), ("b", "c"))


@pytest.mark.parametrize("models", range(1, MOST_MODELS + 1))
def test_every_group_but_the_last_is_full_so_that_first_fit_does_what_was_planned(models: int) -> None:
    layout = plan({f"m{number}": 100 / (number + 1) for number in range(models)}, gpus=4)
    sizes = [len(group) for group in layout.groups]
    assert sum(sizes) == models
    assert len(sizes) <= 4
    assert all(size == layout.seats_per_group for size in sizes[:-1])
    assert 1 <= sizes[-1] <= layout.seats_per_group


def test_no_model_and_too_many_models_are_refused_with_a_remedy() -> None:
    with pytest.raises(LayoutError, match="change --start or --duration"):
        plan({}, gpus=4)
    with pytest.raises(LayoutError, match="--map"):
        plan(dict.fromkeys(map(str, range(MOST_MODELS + 1)), 1.0), gpus=4)


def test_what_is_written_is_what_the_stack_reads(tmp_path: Path) -> None:
    layout = plan({"M0001": 3, "m0001": 2, "azure_llm_2023_conv": 1, "Größe/x": 1, "e": 1}, gpus=4)
    config, pods = tmp_path / "config.yaml", tmp_path / "pods.yaml"
    config.write_text(config_yaml(layout))
    pods.write_text(pods_yaml(layout))
    assert [group.name for group in load(config).gpu_topology.groups] == ["G0", "G1", "G2"]
    read = check(StackOptions(config=config, pods=pods))
    assert [pod.model for pod in read.pods] == list(layout.models)
