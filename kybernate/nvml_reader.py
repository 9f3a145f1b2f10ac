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

    def gpus(self) -> list[GpuReading]:
        """All GPUs in index order."""
        return self._read(lambda: [self._gpu(index) for index in range(self._nvml.nvmlDeviceGetCount())])

    def memory(self, gpus: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """(bytes in use, bytes that can be used at all) by UUID; without the driver's own reserve in either.

        So their difference is what can be allocated. ``gpus``: only these; then others may be broken.
        """
        return self._read(lambda: {uuid: self._memory(handle) for uuid, handle in self._handles(gpus)})

    def processes(self, gpus: Iterable[str] | None = None) -> list[ProcessReading]:
        """Processes with a compute context. ``gpus``: only on these; then others may be broken."""
        return self._read(
            lambda: [entry for uuid, handle in self._handles(gpus) for entry in self._processes(uuid, handle)]
        )

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

    def _handles(self, gpus: Iterable[str] | None) -> Iterable[tuple[str, Any]]:
        nvml = self._nvml
        if gpus is not None:
            return [(uuid, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in gpus]
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [(_text(nvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]

    def _gpu(self, index: int) -> GpuReading:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        persistence = self._optional(lambda: int(nvml.nvmlDeviceGetPersistenceMode(handle)))
        mig = self._optional(lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]))
        return GpuReading(
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
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

    def _processes(self, uuid: str, handle: Any) -> Iterable[ProcessReading]:
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            size = process.usedGpuMemory  # None is how pynvml says NVML_VALUE_NOT_AVAILABLE
            if size is None:
                yield ProcessReading(int(process.pid), uuid, self._memory(handle)[0], exact=False)
            else:
                yield ProcessReading(int(process.pid), uuid, int(size), exact=True)


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
