"""Waits for XID events survive unexpected errors of the library."""

import ctypes
from types import SimpleNamespace

import pytest

from kybernate.gpus import GpuError
from kybernate.gpus.nvml import EventSet
from kybernate.machine import GpuEvent

NO_INSTANCE = 0xFFFFFFFF
HANDLE = ctypes.c_void_p(1)


class OddNvml:
    """One GPU; the first wait fails as no NVML call should, the second returns XID 79, the others time out."""

    NVMLError = OSError
    NVML_ERROR_TIMEOUT = 10
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - the library's name

    def __init__(self) -> None:
        self.waits = 0

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": HANDLE,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetSupportedEventTypes": 8,
        }
        return lambda *_: answers.get(name)

    def nvmlEventSetWait_v2(self, *_: object) -> SimpleNamespace:  # noqa: N802 - the library's name
        self.waits += 1
        if self.waits == 1:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "made up")
        kind = 8 if self.waits == 2 else 0
        return SimpleNamespace(
            eventType=kind, eventData=79, device=HANDLE, gpuInstanceId=NO_INSTANCE, computeInstanceId=NO_INSTANCE
        )


def test_an_error_that_is_not_nvmls_own_is_one_of_the_gpus_and_the_next_wait_works() -> None:
    events = EventSet(OddNvml())
    with pytest.raises(GpuError, match="made up"):
        events.wait(0.0)
    assert events.wait(0.0) == (GpuEvent("GPU-1", 79),)
