"""Settings of the checkpointer."""

from typing import Literal

from pydantic import Field

from kybernate.cuda import Binding
from kybernate.settings import NodeSettings


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
