"""MIG instances are groups of one, by ``migStrategy``; whatever does not fit causes a warning or an error."""

import pytest

from kybernate.config import ConfigError, NodeConfig
from kybernate.dev.fakes.gpu.spec import Hardware, hardware
from kybernate.topology import mig_refusal, plan
from tests.topology.machines import config, gpu, indices, part

UNIFORM = hardware("2xA100-mig-3g")
HALF = hardware("2xA100-half-mig")
MIXED = hardware("A100-mig-mixed")


def test_none_leaves_gpus_in_mig_mode_alone_and_says_so() -> None:
    found = plan(config(1), *HALF)
    assert indices(found.groups) == [[0]]
    assert found.warnings == (
        "GPU 1 is in MIG mode and not offered, since migStrategy is none; "
        "write migStrategy: single or mixed, or turn MIG off there (nvidia-smi -i 1 -mig 0)",
    )


def test_none_on_a_machine_of_mig_gpus_only_offers_nothing() -> None:
    found = plan(config(1, 2), *UNIFORM)
    assert found.groups == ()
    assert found.warnings[0].startswith("GPUs 0, 1 are in MIG mode and not offered")
    assert found.warnings[0].endswith("(nvidia-smi -i 0,1 -mig 0)")
    assert found.warnings[1].endswith(
        "no GPU of this machine can be used as a whole, the others are in MIG mode; turn MIG off there"
    )


def test_single_makes_every_instance_a_group_of_the_profile_of_size_1() -> None:
    found = plan(config(1, 2, mig="single"), *UNIFORM)
    assert [group.name for group in found.groups] == ["G0-3g.40gb-1", "G0-3g.40gb-2", "G1-3g.40gb-1", "G1-3g.40gb-2"]
    assert {group.profile.name for group in found.groups} == {"gpu-1x"}
    assert len({seat for group in found.groups for seat in group.seat_ids}) == 12
    assert found.groups[0].why == "MIG instance 3g.40gb of GPU 0; instances are groups of one"
    assert found.groups[0].physical == {UNIFORM.instances[0].uuid, UNIFORM.gpus[0].uuid}
    assert {group.overlaps for group in found.groups} == {()}
    assert found.warnings == (
        "profile gpu-2x (kyb.ai/gpu-2x-seat) has no seats here: its GPUs are MIG instances, which cannot be joined "
        "into groups; turn MIG off on this node",
    )


def test_single_on_a_machine_without_mig_is_as_none() -> None:
    machine = hardware("4xA100-pcie")
    assert plan(config(2, mig="single"), *machine) == plan(config(2), *machine)


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (MIXED, "MIG instances differ: 2g.20gb on GPU 0 and 3g.40gb on GPU 0; cut all GPUs alike, or write mixed"),
        (HALF, "GPU 1 is in MIG mode and GPU 0 is not; cut all GPUs alike, or write mixed"),
    ],
)
def test_single_wants_all_gpus_cut_alike(machine: Hardware, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^migStrategy: 'single': {text}"):
        plan(config(1, mig="single"), *machine)


def test_mixed_gives_each_mig_profile_its_own_resource_beside_whole_gpus() -> None:
    found = plan(config(1, "3g.40gb", "2g.20gb", mig="mixed"), *HALF)
    assert [(group.name, group.profile.resource) for group in found.groups] == [
        ("G0", "kyb.ai/gpu-1x-seat"),
        ("G1-3g.40gb-1", "kyb.ai/mig-3g.40gb-seat"),
        ("G1-2g.20gb-2", "kyb.ai/mig-2g.20gb-seat"),
        ("G1-2g.20gb-3", "kyb.ai/mig-2g.20gb-seat"),
    ]
    assert found.warnings == ()


def test_mixed_warns_about_unadvertised_and_missing_mig_profiles() -> None:
    found = plan(config("3g.40gb", "1g.10gb", mig="mixed"), *MIXED)
    assert indices(found.groups) == [[0]]
    assert found.warnings == (
        "MIG instances of 2g.20gb on GPU 0 are advertised by no profile; "
        "add one with groupSize: 1 and migProfile: 2g.20gb",
        "profile mig-1g.10gb (kyb.ai/mig-1g.10gb-seat) has no seats here: no GPU has a MIG instance of 1g.10gb; "
        "create some (nvidia-smi mig -cgi 1g.10gb -C)",
    )


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_gpu_in_mig_mode_without_instances_is_named(strategy: str) -> None:
    found = plan(config(1, mig=strategy), [gpu(0, mig_enabled=True)])
    assert found.groups == ()
    assert found.warnings[0].startswith("GPU 0 is in MIG mode without instances, so nothing is offered there; create")
    assert len(found.warnings) == 2


def test_an_instance_may_be_listed_by_its_uuid() -> None:
    cut = gpu(0, mig_enabled=True)
    parts = [part(cut, number, "1g.10gb") for number in (1, 2)]
    named = {"mine": [parts[1].uuid]}
    for strategy, profile in (("single", 1), ("mixed", "1g.10gb")):
        found = plan(config(profile, groups=named, mig=strategy), [cut], (), parts)
        assert [(group.name, group.gpus) for group in found.groups] == [("mine", (parts[1],))]


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (config(1, groups={"A": [0]}), "group A names GPU 0, which is in MIG mode and cannot be used as a whole; turn"),
        (config(1, groups={"A": ["MIG-0-1"]}), "group A names a MIG instance and migStrategy is none; write"),
        (
            config(1, groups={"A": ["MIG-0-1"]}, mig="mixed"),
            "group A is a MIG instance of 1g.10gb and no profile advertises",
        ),
        (
            config(1, 2, groups={"A": ["MIG-0-1", "MIG-0-2"]}, mig="mixed"),
            "group A joins a MIG instance with others; MIG instances are groups of one",
        ),
        (config("1g.10gb", groups={"A": [1]}, mig="mixed"), "group A is 1 GPU and no profile advertises that; add one"),
    ],
)
def test_listed_groups_that_mig_forbids_are_errors(chosen: NodeConfig, text: str) -> None:
    cut = gpu(0, mig_enabled=True)
    with pytest.raises(ConfigError, match=text):
        plan(chosen, [cut, gpu(1)], (), [part(cut, number, "1g.10gb") for number in (1, 2)])


def test_backends_that_cannot_park_mig_are_refused_with_a_reason() -> None:
    (instance, *_) = plan(config(1, mig="single"), *UNIFORM).groups
    (whole, *_) = plan(config(1), *hardware("4xA100-pcie")).groups
    assert mig_refusal(instance, "cuda") == (
        "backend cuda cannot park MIG instances (G0-3g.40gb-1): the CUDA driver's checkpoint does not support MIG; "
        "set the annotation kyb.ai/backend: restart, or ask for a resource of whole GPUs"
    )
    assert [mig_refusal(instance, backend) for backend in ("engine", "restart", "fake")] == [None, None, None]
    assert mig_refusal(whole, "cuda") is None
