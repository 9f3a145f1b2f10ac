"""The checkpoint API through NVIDIA's cuda-bindings (13.0.2 or newer, not 13.3.0)."""

import ctypes
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from kybernate.cuda.port import CudaUnavailableError, GpuPairs

_NEEDED = (
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "CUcheckpointGpuPair",
    "CUcheckpointLockArgs",
    "CUcheckpointRestoreArgs",  # cuda-bindings 13.3.0 lacks it
)
_UNKNOWN_NUMBER = re.compile(r"(-?\d+) is not a valid (CUresult|CUprocessState)")
_WANTED = "install cuda-bindings>=13.0.2,<14,!=13.3.0, or set KYB_CUDA_BINDING=ctypes"


class BindingsApi:
    """Implements CheckpointApi. cuda-bindings releases the GIL during a call."""

    def __init__(self) -> None:
        """Import the package. Raises CudaUnavailableError when it is absent, too old, or finds no libcuda."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaUnavailableError(f"no cuda-bindings: {error}; {_WANTED}") from error
        self._driver: Any = driver
        version = metadata.version("cuda-bindings")
        missing = [name for name in _NEEDED if not hasattr(driver, name)]
        if missing:
            raise CudaUnavailableError(f"cuda-bindings {version} lacks {missing[0]}; {_WANTED}")
        self.binding = f"cuda-bindings {version}"
        self.driver_version()  # loads libcuda, so that its absence shows here

    def init(self) -> int:
        """``cuInit(0)``."""
        return self._call("cuInit", 0)[0]

    def driver_version(self) -> tuple[int, int]:
        """(result, CUDA version)."""
        code, version = self._call("cuDriverGetVersion")
        return code, max(version, 0)

    def state(self, pid: int) -> tuple[int, int]:
        """(result, state number or -1)."""
        return self._call("cuCheckpointProcessGetState", pid)

    def restore_tid(self, pid: int) -> tuple[int, int]:
        """(result, thread id or -1)."""
        return self._call("cuCheckpointProcessGetRestoreThreadId", pid)

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        """RUNNING → LOCKED."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        return self._call("cuCheckpointProcessLock", pid, arguments)[0]

    def checkpoint(self, pid: int) -> int:
        """LOCKED → CHECKPOINTED."""
        return self._call("cuCheckpointProcessCheckpoint", pid, None)[0]

    def restore(self, pid: int, pairs: GpuPairs | None = None) -> int:
        """CHECKPOINTED → LOCKED."""
        arguments = None
        if pairs:
            arguments = self._driver.CUcheckpointRestoreArgs()
            arguments.gpuPairs = [self._pair(old, new) for old, new in pairs]
            arguments.gpuPairsCount = len(pairs)
        return self._call("cuCheckpointProcessRestore", pid, arguments)[0]

    def unlock(self, pid: int) -> int:
        """LOCKED → RUNNING."""
        return self._call("cuCheckpointProcessUnlock", pid, None)[0]

    def _pair(self, old: bytes, new: bytes) -> Any:
        pair = self._driver.CUcheckpointGpuPair()
        # A CUuuid has no setter; it can only refer to other bytes, and assigning it copies them.
        for name, raw in (("oldUuid", old), ("newUuid", new)):
            buffer = ctypes.create_string_buffer(raw, 16)
            setattr(pair, name, self._driver.CUuuid(ctypes.addressof(buffer)))
        return pair

    def _call(self, name: str, *arguments: object) -> tuple[int, int]:
        """(result, value or -1). cuda-bindings raises ValueError for a number that it does not know yet."""
        function: Callable[..., tuple[Any, ...]] = getattr(self._driver, name)
        try:
            code, *values = function(*arguments)
        except ValueError as error:
            unknown = _UNKNOWN_NUMBER.search(str(error))
            if unknown is None:
                raise
            number = int(unknown[1])
            return (number, -1) if unknown[2] == "CUresult" else (0, number)
        except RuntimeError as error:  # no libcuda (DynamicLibNotFoundError is one too), or a function is not in it
            raise CudaUnavailableError(
                f"cuda-bindings cannot call {name}: {str(error).rstrip('.')}; the NVIDIA driver (570 or newer, 580 "
                "recommended) must be installed and visible here"
            ) from error
        value = values[0] if values else None
        return int(code), -1 if value is None or int(code) != 0 else int(value)
