"""NVML for programs without an event loop: the checkpointer's helper, and ``kyb doctor``. Blocks; light to import.

Services read GPUs through kybernate.gpus. Nothing here needs a CUDA context or makes one.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class NvmlUnreadableError(Exception):
    """NVML does not answer; the text says what failed and what to do."""


class GpuReading(NamedTuple):
    """One physical GPU, as far as parking is concerned."""

    uuid: str
    minor: int
    """N of /dev/nvidiaN."""
    name: str
    total_bytes: int
    persistence: bool | None
    """None where the driver does not say."""
    mig: bool


class ProcessReading(NamedTuple):
    """One process with a compute context on one GPU. Parked processes do not appear."""

    pid: int
    gpu: str
    bytes: int
    exact: bool
    """False where the driver does not tell (NVML_VALUE_NOT_AVAILABLE): ``bytes`` is all that is used on the GPU."""


class NvmlReader:
    """Opens NVML at the first call, and again after an error. All calls raise NvmlUnreadableError."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def driver_version(self) -> str:
        """The driver's release, as 580.95.05."""
        return self._read(lambda: _text(self._nvml.nvmlSystemGetDriverVersion()))

    def count(self) -> int:
        """How many GPUs there are, also those that do not answer."""
        return self._read(lambda: int(self._nvml.nvmlDeviceGetCount()))

    def gpus(self) -> list[GpuReading]:
        """All GPUs that answer, in index order."""
        return self._read(lambda: self._each(None, self._gpu))

    def memory(self, gpus: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """(bytes in use, bytes that can be used at all) by UUID; without the driver's own reserve in either.

        So their difference is what can be allocated. ``gpus``: just these, and each has to answer; otherwise GPUs that
        do not answer are left out.
        """
        return self._read(lambda: dict(self._each(gpus, lambda uuid, handle: (uuid, self._memory(handle)))))

    def processes(self, gpus: Iterable[str] | None = None) -> list[ProcessReading]:
        """Processes with a compute context; ``gpus`` as in ``memory``."""
        return self._read(lambda: [entry for found in self._each(gpus, self._processes) for entry in found])

    def close(self) -> None:
        """Shut NVML down; a later call opens it again."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # it was gone already

    def _read(self, read: Callable[[], T]) -> T:
        if self._nvml is None:
            self._nvml = _opened()
        error_type: type[Exception] = self._nvml.NVMLError
        try:
            return read()
        except error_type as error:
            self.close()
            raise NvmlUnreadableError(f"NVML failed: {error}; look for XID events in the kernel log") from error

    def _each(self, gpus: Iterable[str] | None, read: Callable[[str, Any], T]) -> list[T]:
        """``read`` of the GPUs named, or of all that answer. One broken GPU says nothing about the others."""
        nvml = self._nvml
        if gpus is not None:
            return [read(uuid, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in gpus]
        found, errors = [], []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found.append(read(_text(nvml.nvmlDeviceGetUUID(handle)), handle))
            except nvml.NVMLError as error:
                errors.append(error)
        if errors and not found:
            raise errors[0]
        return found

    def _gpu(self, uuid: str, handle: Any) -> GpuReading:
        nvml = self._nvml
        persistence = self._optional(lambda: int(nvml.nvmlDeviceGetPersistenceMode(handle)))
        mig = self._optional(lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]))
        return GpuReading(
            uuid=uuid,
            minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            persistence=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
            mig=mig == nvml.NVML_DEVICE_MIG_ENABLE,
        )

    def _optional(self, read: Callable[[], int]) -> int | None:
        """None where this kind of GPU or driver has no such thing."""
        try:
            return read()
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return None

    def _memory(self, handle: Any) -> tuple[int, int]:
        # Version 1 of this struct counts the driver's own reserve (hundreds of MiB) as used; version 2 does not.
        known = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        return int(known.used), int(known.used + known.free)

    def _processes(self, uuid: str, handle: Any) -> list[ProcessReading]:
        found = []
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            size = process.usedGpuMemory  # None is how pynvml says NVML_VALUE_NOT_AVAILABLE
            exact = size is not None
            found.append(ProcessReading(int(process.pid), uuid, int(size if exact else self._memory(handle)[0]), exact))
        return found


def _opened() -> Any:
    """pynvml, initialized. Raises NvmlUnreadableError."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlUnreadableError(f"no NVML: {error}; pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnreadableError(
            f"no NVML on this machine: {error}; install the NVIDIA driver, or give this container runtimeClass nvidia "
            "and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
