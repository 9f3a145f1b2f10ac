"""Settings of the checkpointer."""

from typing import Literal

from pydantic import Field, field_validator

from kybernate.cuda import Binding
from kybernate.settings import NodeSettings
from services.checkpointer.backends.inspection import names
from services.checkpointer.backends.refusals import Allowance


class CheckpointerSettings(NodeSettings):
    """What the checkpointer of one node needs to know."""

    driver: Literal["fake", "cuda"] = "fake"
    """Which GPU driver its helpers speak to: the fake one at KYB_FAKE_DRIVER, or the CUDA driver of this machine."""
    cuda_binding: Binding = "auto"
    """How they call the CUDA driver: cuda-bindings, ctypes, or cuda-bindings if it is usable, else ctypes."""
    lock_seconds: float = Field(10.0, gt=0)
    """Model seconds that submitted GPU work may take to finish before a park is given up."""
    transfer_base_seconds: float = Field(30.0, gt=0)
    """Model seconds that a checkpoint or restore may take, plus those per GiB."""
    transfer_seconds_per_gib: float = Field(3.0, gt=0)
    """Model seconds per GiB that a checkpoint or restore may take."""
    room_margin_bytes: int = Field(512 * 2**20, ge=256 * 2**20, le=2**30)
    """Free memory wanted on a GPU beyond a seat's footprint before a restore beside other processes; 256 MiB to 1 GiB.
    On made-up GPUs none is wanted."""
    park_allow: str = ""
    """What is parked through the driver in spite of its hazards, by commas: several-gpus, several-processes, nccl,
    managed-memory. One pod allows the same by this variable in its own environment. See docs/checkpointer.md."""

    @field_validator("park_allow")
    @classmethod
    def _known(cls, text: str) -> str:
        unknown = names(text) - set(Allowance)
        if unknown:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(Allowance)}")
        return text
