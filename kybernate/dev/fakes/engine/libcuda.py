"""The part of the CUDA driver that an engine uses for itself, by ctypes on ``libcuda.so.1``: contexts and memory.

Whose ``libcuda.so.1`` it is (NVIDIA's, or the stub in front of the fake GPU driver) is the loader's matter. Every call
blocks, and waits while the process is locked or parked.
"""

import ctypes
from dataclasses import dataclass, field

_SONAME = "libcuda.so.1"


class CudaError(Exception):
    """A call was refused; ``code`` is its CUresult."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Libcuda:
    """The driver as one thread sees it. Raises CudaError when there is no library or no GPU."""

    _contexts: list[ctypes.c_void_p] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self._lib = ctypes.CDLL(_SONAME)
        except OSError as error:
            remedy = "install the NVIDIA driver, or name the folder of the stub in LD_LIBRARY_PATH"
            raise CudaError(f"{error}; {remedy}", -1) from error
        self._do("cuInit", 0)
        count = ctypes.c_int()
        self._do("cuDeviceGetCount", ctypes.byref(count))
        if count.value == 0:
            raise CudaError("no GPU is visible; look at NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES", 100)
        for index in range(count.value):
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._do("cuDeviceGet", ctypes.byref(device), index)
            self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts.append(context)

    @property
    def devices(self) -> int:
        """How many GPUs this process sees; each has a context of it."""
        return len(self._contexts)

    def alloc(self, device: int, count: int) -> int:
        """Address of ``count`` bytes on a GPU."""
        self._enter(device)
        address = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def free(self, device: int, address: int) -> None:
        """Give back what ``alloc`` gave."""
        self._enter(device)
        self._do("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, device: int, address: int, data: bytes) -> None:
        """Copy to the GPU."""
        self._enter(device)
        self._do("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def read(self, device: int, address: int, count: int) -> bytes:
        """Copy from the GPU."""
        self._enter(device)
        buffer = ctypes.create_string_buffer(count)
        self._do("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(address), ctypes.c_size_t(count))
        return buffer.raw

    def synchronize(self, device: int) -> None:
        """Wait for all work of this process on a GPU.

        Never the first call after a park: NVIDIA's driver then ends the process (research: sync while checkpointed).
        """
        self._enter(device)
        self._do("cuCtxSynchronize")

    def _enter(self, device: int) -> None:
        self._do("cuCtxSetCurrent", self._contexts[device])

    def _do(self, call: str, *arguments: object) -> None:
        code = int(getattr(self._lib, call)(*arguments))
        if code != 0:
            raise CudaError(f"{call} answered {self._name(code)} ({code})", code)

    def _name(self, code: int) -> str:
        name = ctypes.c_char_p()
        if self._lib.cuGetErrorName(code, ctypes.byref(name)) != 0 or name.value is None:
            return "an unknown error"
        return name.value.decode()
