"""Names, versions and UUIDs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate.cuda import CudaResult, CudaState, gpu_pairs, result_name, state_name, support, why_no_checkpoint

uuids = st.uuids().map(lambda uuid: f"GPU-{uuid}")


def test_names_are_those_of_the_driver_header() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    for code in CudaResult:
        assert driver.CUresult(int(code)).name in (f"CUDA_{code.name}", f"CUDA_ERROR_{code.name}")
    assert {f"CU_PROCESS_STATE_{state.name}": int(state) for state in CudaState} == {
        state.name: int(state) for state in driver.CUprocessState
    }


def test_a_number_without_a_name_stays_a_number() -> None:
    assert result_name(2) == "OUT_OF_MEMORY"
    assert result_name(12345) == "RESULT_12345"
    assert state_name(5) == "RESTORING"
    assert state_name(9) == "STATE_9"


@pytest.mark.parametrize(
    ("cuda", "works"),
    [
        (12040, ()),
        (12080, ("checkpoint",)),
        (13000, ("checkpoint", "gpu_map")),
        (13010, ("checkpoint", "gpu_map", "launch_job")),
        (13040, ("checkpoint", "gpu_map", "launch_job", "custom_storage")),
    ],
)
def test_what_works_follows_from_the_version(cuda: int, works: tuple[str, ...]) -> None:
    assert tuple(name for name, there in support(cuda)._asdict().items() if there) == works


def test_an_old_driver_is_named_as_people_know_it() -> None:
    assert why_no_checkpoint(12080) is None
    text = "driver 550 has no checkpoint API; needs 570 or newer (580 recommended)"
    assert why_no_checkpoint(12040, "550.163.01") == text
    assert str(why_no_checkpoint(12040)).startswith("the driver (CUDA 12.4) has no checkpoint API")


@given(st.lists(uuids, min_size=2, unique=True))
def test_a_permutation_becomes_pairs_and_the_identity_becomes_none(gpus: list[str]) -> None:
    moved = [*gpus[1:], gpus[0]]
    pairs = gpu_pairs(dict(zip(gpus, moved, strict=True)))
    assert [f"{old.hex()}>{new.hex()}" for old, new in pairs] == [
        f"{old[4:]}>{new[4:]}".replace("-", "") for old, new in zip(gpus, moved, strict=True)
    ]
    assert gpu_pairs({gpu: gpu for gpu in gpus}) is None


@pytest.mark.parametrize(
    "moves",
    [
        {"GPU-" + "0" * 32: "GPU-" + "1" * 32},
        {"0" * 32: "0" * 32},
        {"MIG-" + "0" * 32: "MIG-" + "0" * 32},
        {"GPU-xyz": "GPU-xyz"},
    ],
)
def test_what_is_no_permutation_of_whole_gpus_is_refused(moves: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"GPU map|UUID of a whole GPU"):
        gpu_pairs(moves)
