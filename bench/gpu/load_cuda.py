"""GPU work without PyTorch: memory and copies through libcuda alone. For machines without torch, and for the stub."""

import ctypes
import random
import time
import zlib
from typing import Any

from kybernate.dev.fakes.engine.libcuda import CudaError, Libcuda

BLOCK = 1 << 30
PIECE = 1 << 24
COPY = 1 << 28
_REPEATS = 3


class CudaLoad:
    """So many bytes of seeded data on the first visible GPU."""

    kind = "libcuda"

    def __init__(self, gib: float, seed: int) -> None:
        self._cuda = Libcuda()
        self._pattern = random.Random(seed).randbytes(PIECE)
        self._blocks: list[tuple[int, int]] = []
        left = int(gib * BLOCK)
        while left > 0:
            size = min(BLOCK, left)
            address = self._cuda.alloc(0, size)
            self._blocks.append((address, size))
            for at in range(0, size, PIECE):
                self._cuda.write(0, address + at, self._pattern[: min(PIECE, size - at)])
            left -= size
        self._cuda.synchronize(0)

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(size for _, size in self._blocks)

    def checksum(self) -> list[int]:
        """One number per block."""
        found = []
        for address, size in self._blocks:
            crc = 0
            for at in range(0, size, PIECE):
                crc = zlib.crc32(self._cuda.read(0, address + at, min(PIECE, size - at)), crc)
            found.append(crc)
        return found

    def work(self) -> list[Any]:
        """A copy there and back; nothing is computed and there is no graph without torch."""
        address, size = self._blocks[0]
        self._cuda.write(0, address, self._pattern[: min(64, size)])
        self._cuda.synchronize(0)
        return [self._cuda.read(0, address, min(64, size)).hex()]

    def graph(self) -> list[float] | None:
        """There is none."""
        return None

    def busy(self, seconds: float) -> None:
        """Cannot be done without a kernel. Raises CudaError."""
        raise CudaError(f"{seconds:g} s of GPU work need PyTorch", 801)

    def synchronize(self) -> None:
        """A synchronize as the first call (H4)."""
        self._cuda.synchronize(0)

    def managed(self, count: int) -> int:
        """Managed memory (H10); the result code."""
        return managed(count)


block = CudaLoad


def managed(count: int) -> int:
    """Take managed memory in the current context. The CUresult; 801 where the library has no such call."""
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "cuMemAllocManaged"):
        return 801
    address = ctypes.c_uint64()
    return int(library.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(count), 1))


def copy_limits() -> dict[str, float]:
    """GB/s of plain copies by kind and direction; only what this library offers."""
    cuda = Libcuda()
    library = ctypes.CDLL("libcuda.so.1")
    address = cuda.alloc(0, COPY)
    pageable = ctypes.create_string_buffer(COPY)
    buffers = {"pageable": ctypes.addressof(pageable)}
    if hasattr(library, "cuMemHostAlloc"):
        pinned = ctypes.c_void_p()
        if library.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(COPY), 0) == 0 and pinned.value:
            buffers["pinned"] = pinned.value
    found = {}
    for kind, host in buffers.items():
        for way, call, arguments in (
            ("out", library.cuMemcpyDtoH_v2, (ctypes.c_void_p(host), ctypes.c_uint64(address))),
            ("in", library.cuMemcpyHtoD_v2, (ctypes.c_uint64(address), ctypes.c_void_p(host))),
        ):
            best = min(_seconds(call, *arguments, ctypes.c_size_t(COPY)) for _ in range(_REPEATS))
            found[f"{kind}_{way}"] = COPY / best / 1e9
    return found


def _seconds(call: Any, *arguments: Any) -> float:
    began = time.perf_counter()
    code = call(*arguments)
    if code != 0:
        raise CudaError(f"a copy answered {code}", code)
    return max(time.perf_counter() - began, 1e-9)
