"""The rules about seats that are not parked or moved, one test each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.checkpointer.core.refusals import (
    Allowance,
    DriverInfo,
    ProcessFacts,
    driver_from,
    move_refusal,
    moves,
    park_refusal,
    permutation,
)

A, B, C = "GPU-a", "GPU-b", "GPU-c"
D570, D580, D595 = (DriverInfo(version=v, gpu_map=v > "575") for v in ("570.158.01", "580.95.05", "595.84"))
PLAIN = ProcessFacts(1, environment={})
WATCHDOG = ProcessFacts(1, threads=frozenset({"python", "pt_nccl_watchdg"}), environment={})


def why(
    *processes: ProcessFacts,
    gpus: tuple[str, ...] = (A,),
    driver: DriverInfo = D580,
    neighbours: tuple[str, ...] = ("python",),
    allowed: tuple[str, ...] = (),
) -> str | None:
    return park_refusal(gpus, driver, processes or (PLAIN,), neighbours, allowed)


def test_one_process_on_one_gpu_is_parked() -> None:
    assert why() is None
    assert why(driver=D570) is None
    assert why(driver=DriverInfo(version="fake")) is None


def test_an_arm_host_is_refused_before_the_lock_which_would_succeed() -> None:
    refused = park_refusal((A,), D580, (PLAIN,), (), (), machine="aarch64")
    assert "aarch64" in (refused or "")
    assert "backend restart" in (refused or "")


def test_h11_mig_is_refused_by_the_instances_name_and_by_the_gpus_mode() -> None:
    assert "MIG" in (why(gpus=("MIG-1",)) or "")
    assert "MIG" in (why(driver=DriverInfo(mig={A: True})) or "")
    assert why(driver=DriverInfo(mig={A: False, B: True})) is None, "another GPU's mode is no matter"


def test_mps_is_refused_when_its_server_uses_the_gpu() -> None:
    assert "MPS" in (why(neighbours=("python", "nvidia-cuda-mps")) or "")


@pytest.mark.parametrize("name", ["GGML_CUDA_ENABLE_UNIFIED_MEMORY", "TF_FORCE_UNIFIED_MEMORY"])
def test_h10_managed_memory_is_refused_where_the_environment_asks_for_it(name: str) -> None:
    assert "managed memory" in (why(ProcessFacts(1, environment={name: "1"})) or "")
    assert why(ProcessFacts(1, environment={name: "0"})) is None
    assert why(ProcessFacts(1, environment={name: "1"}), allowed=("managed-memory",)) is None


def test_b7_managed_memory_shows_in_the_number_of_mappings_of_the_uvm_device() -> None:
    """gpunap: every CUDA process has one, those with managed memory had 2 and 5."""
    assert why(ProcessFacts(1, uvm_mappings=1, environment={})) is None
    refused = why(PLAIN, ProcessFacts(2, uvm_mappings=2, environment={}), allowed=("several-processes",))
    assert "pid 2 uses managed memory (2 mappings of /dev/nvidia-uvm)" in (refused or "")
    assert why(ProcessFacts(1, uvm_mappings=5, environment={}), allowed=("managed-memory",)) is None


def test_h7_a_process_group_of_one_gpu_is_refused_on_driver_595_where_it_was_seen_to_abort() -> None:
    assert "aborts on driver 595.84" in (why(WATCHDOG, driver=D595) or "")
    assert why(WATCHDOG, driver=D580) is None
    for version in ("590.48.01", "610.10", "615.36.02"):
        assert why(WATCHDOG, driver=DriverInfo(version=version, gpu_map=True)) is None, version
    assert why(WATCHDOG, driver=D595, allowed=("nccl",)) is None


def test_h8_nccl_in_a_seat_of_several_is_refused_even_where_several_are_allowed() -> None:
    both = ("several-gpus", "several-processes")
    assert "NCCL" in (why(WATCHDOG, PLAIN, allowed=both) or "")
    assert "NCCL" in (why(WATCHDOG, gpus=(A, B), allowed=both) or "")
    assert why(WATCHDOG, WATCHDOG, gpus=(A, B), allowed=(*both, "nccl")) is None
    assert why(PLAIN, PLAIN, gpus=(A, B), allowed=both) is None, (
        "a loaded library says nothing: PyTorch always loads it"
    )


def test_h9_several_processes_and_several_gpus_each_need_their_allowance() -> None:
    two = (PLAIN, ProcessFacts(2, environment={}))
    assert "several-gpus" in (why(gpus=(A, B)) or "")
    assert "CUDA IPC" in (why(*two) or "")
    assert why(*two, allowed=("several-processes",)) is None
    assert "several-gpus" in (why(*two, gpus=(A, B), allowed=("several-processes",)) or "")
    assert why(*two, gpus=(A, B), allowed=tuple(Allowance)) is None


def test_driver_info_is_parsed_from_the_helpers_reply() -> None:
    info = driver_from({"driver": "580.95.05", "capabilities": {"gpu_map": True}, "mig": {A: False}})
    assert (info.major, info.gpu_map, info.mig) == (580, True, {A: False})
    assert driver_from({"driver": "fake"}).major == 0
    assert not driver_from({}).gpu_map


def test_h14_the_map_names_every_gpu_and_is_left_out_where_nothing_moves() -> None:
    assert moves((A,), (B,)) == {A: B}
    assert permutation((A, B, C), {A: B}) == {A: B, B: A, C: C}
    assert moves((A, B), (B, A)) == {}, "the same GPUs in another order"
    assert permutation((A, B), {}) is None
    with pytest.raises(ValueError, match="GPU-d"):
        permutation((A, B), {A: "GPU-d"})


@given(gpus=st.lists(st.integers(0, 99).map(lambda n: f"GPU-{n}"), min_size=2, max_size=8, unique=True))
def test_h14_every_map_is_a_permutation(gpus: list[str]) -> None:
    old, new = gpus[0], gpus[-1]
    found = permutation((*gpus, "MIG-1"), {old: new})
    assert sorted(found) == sorted(found.values()) == sorted(gpus)
    assert found[old] == new


def test_h12_several_gpus_or_processes_move_only_where_their_park_is_allowed_and_with_a_new_driver() -> None:
    both = (Allowance.SEVERAL_GPUS, Allowance.SEVERAL_PROCESSES)
    assert move_refusal((A,), 1, (), driver_can=True, driver="580") is None
    assert move_refusal((A, B), 2, both, driver_can=True, driver="580") is None
    several = move_refusal((A, B), 1, both[1:], driver_can=True, driver="580")
    processes = move_refusal((A,), 2, both[:1], driver_can=True, driver="580")
    old = move_refusal((A,), 1, both, driver_can=False, driver="570.1")
    assert [one and one.whose for one in (several, processes, old)] == ["seat", "seat", "node"]
    for refused, text in ((several, "2 GPUs"), (processes, "2 GPU processes"), (old, "580 or newer, this is 570.1")):
        assert text in (refused.reason if refused is not None else "")
