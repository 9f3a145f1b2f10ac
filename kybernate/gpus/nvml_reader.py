"""NVML readings, blocking and light to import: for the checkpointer's helper, ``kyb doctor``, and ``NvmlGpus``.

The library is the module ``pynvml`` of nvidia-ml-py; docs/dev/nvml.md lists its traps. No reading needs or creates a
CUDA context.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kybernate.gpus.nvml_hardware import mig_profile, numa_node_of, pci_address, read_links
from kybernate.gpus.port import GpuError
from kybernate.machine import Gpu, GpuProcess, GpuSensors, Link, Mig

T = TypeVar("T")

PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Where sysfs has the NUMA nodes of PCI devices."""


_FAKE = "use the fake driver: KYB_DRIVER=fake"


class NvmlReader:
    """Opens NVML at the first call. All calls raise GpuError.

    A GPU that fails (lost, in reset) is left out of the results; it is an error only if all fail. ``reopen``: open
    NVML again after an error.
    """

    def __init__(self, pci_devices: Path = PCI_DEVICES, *, reopen: bool = False) -> None:
        self._nvml: Any = None
        self._pci_devices = pci_devices
        self._reopen = reopen

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, in index order."""
        return self.call(lambda _: tuple(self._each(self._gpu)))

    def instances(self) -> tuple[Gpu, ...]:
        """The MIG instances of the GPUs in MIG mode."""
        return self.call(lambda _: self._flat(self._instances))

    def links(self) -> tuple[Link, ...]:
        """The connection of every pair of GPUs, each pair once."""
        return self.call(lambda nvml: read_links(nvml, self._each(lambda _, handle: handle)))

    def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context, by GPU or MIG instance."""
        return self.call(lambda _: self._flat(self._processes_of))

    def sensors(self) -> tuple[GpuSensors, ...]:
        """Temperature, power and utilisation of each GPU."""
        return self.call(lambda _: tuple(self._each(self._sensors)))

    def driver_version(self) -> str:
        """The driver's release, as 580.95.05."""
        return self.call(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))

    def count(self) -> int:
        """Number of GPUs, also of those that do not answer."""
        return self.call(lambda nvml: int(nvml.nvmlDeviceGetCount()))

    def persistence(self) -> dict[str, bool | None]:
        """Persistence mode by GPU; None if the driver does not report it."""
        return self.call(lambda _: dict(self._each(self._persistence)))

    def memory(self, gpus: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """(bytes in use, usable bytes) by UUID, without the driver's own reserve in either; the difference is free.

        ``gpus``: only these, and each must answer.
        """
        return self.call(lambda _: dict(self._chosen(gpus, lambda uuid, handle: (uuid, self._memory(handle)))))

    def gpu_processes(self, gpus: Iterable[str] | None = None) -> list[GpuProcess]:
        """Processes with a compute context on physical GPUs; ``gpus`` as in ``memory``."""
        return self.call(lambda _: [entry for found in self._chosen(gpus, self._readings) for entry in found])

    def close(self) -> None:
        """Shut NVML down; a later call opens it again."""
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):  # the driver is already gone
                nvml.nvmlShutdown()

    def call(self, read: Callable[[Any], T]) -> T:
        """``read`` with the opened library. Raises GpuError."""
        if self._nvml is None:
            self._nvml = _opened()
        error_type: type[Exception] = self._nvml.NVMLError
        try:
            return read(self._nvml)
        except error_type as error:
            if self._reopen:
                self.close()
            raise GpuError(f"NVML failed: {error}; look for XID events in the kernel log") from error

    def _each(self, read: Callable[[int, Any], T]) -> list[T]:
        """``read`` of each GPU by index and handle, without those that fail unless all do."""
        nvml, found, failed = self._nvml, [], None
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(read(index, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found

    def _flat(self, read: Callable[[int, Any], Iterator[T]]) -> tuple[T, ...]:
        return tuple(one for part in self._each(lambda index, handle: tuple(read(index, handle))) for one in part)

    def _chosen(self, gpus: Iterable[str] | None, read: Callable[[str, Any], T]) -> list[T]:
        """``read`` of the GPUs named, each of which must answer, or of all that answer."""
        nvml = self._nvml
        if gpus is None:
            return self._each(lambda _, handle: read(nvml.nvmlDeviceGetUUID(handle), handle))
        return [read(uuid, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in gpus]

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        address = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle).busId)
        return Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            minor=nvml.nvmlDeviceGetMinorNumber(handle),
            pci_bus_id=address,
            name=nvml.nvmlDeviceGetName(handle),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            numa_node=numa_node_of(nvml, handle, self._pci_devices / address),
            mig_enabled=self._in_mig_mode(handle),
        )

    def _optional(self, read: Callable[[], Any]) -> Any:
        """None if this kind of GPU or driver lacks the function."""
        try:
            return read()
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise

    def _in_mig_mode(self, handle: Any) -> bool:
        """True if only its instances can be used; a mode that is pending until a reset does not count."""
        modes = self._optional(lambda: self._nvml.nvmlDeviceGetMigMode(handle))
        return modes is not None and bool(modes[0] == self._nvml.NVML_DEVICE_MIG_ENABLE)

    def _persistence(self, _: int, handle: Any) -> tuple[str, bool | None]:
        mode = self._optional(lambda: self._nvml.nvmlDeviceGetPersistenceMode(handle))
        on = None if mode is None else bool(mode == self._nvml.NVML_FEATURE_ENABLED)
        return self._nvml.nvmlDeviceGetUUID(handle), on

    def _sensors(self, _: int, handle: Any) -> GpuSensors:
        nvml = self._nvml
        milliwatts = self._optional(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        percent = self._optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return GpuSensors(
            gpu=nvml.nvmlDeviceGetUUID(handle),
            celsius=self._optional(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            watts=None if milliwatts is None else milliwatts / 1000,
            utilization=None if percent is None else percent / 100,
        )

    def _instance_handles(self, handle: Any) -> Iterator[Any]:
        """The handles of a GPU's MIG instances; their numbers have gaps."""
        nvml = self._nvml
        if not self._in_mig_mode(handle):
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    raise

    def _instances(self, index: int, handle: Any) -> Iterator[Gpu]:
        nvml = self._nvml
        parent = self._gpu(index, handle)
        for instance in self._instance_handles(handle):
            mig = Mig(
                parent=parent.uuid,
                profile=mig_profile(nvml.nvmlDeviceGetAttributes_v2(instance), parent.memory_bytes),
                gpu_instance=nvml.nvmlDeviceGetGpuInstanceId(instance),
                compute_instance=nvml.nvmlDeviceGetComputeInstanceId(instance),
            )
            yield Gpu(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(instance),
                minor=parent.minor,
                pci_bus_id=parent.pci_bus_id,
                name=nvml.nvmlDeviceGetName(instance),
                memory_bytes=nvml.nvmlDeviceGetMemoryInfo(instance).total,
                numa_node=parent.numa_node,
                mig=mig,
            )

    def _memory(self, handle: Any) -> tuple[int, int]:
        # Version 1 of this struct counts the driver's own reserve (hundreds of MiB) as used; version 2 does not.
        known = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        return int(known.used), int(known.used + known.free)

    def _processes_of(self, _: int, handle: Any) -> Iterator[GpuProcess]:
        # In MIG mode the GPU itself would list the same processes once more, with their instances' numbers.
        for one in tuple(self._instance_handles(handle)) or (handle,):
            yield from self._readings(self._nvml.nvmlDeviceGetUUID(one), one)

    def _readings(self, uuid: str, handle: Any) -> list[GpuProcess]:
        found = []
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle):
            size = process.usedGpuMemory  # pynvml returns None for NVML_VALUE_NOT_AVAILABLE (vGPU, WSL)
            exact = size is not None
            found.append(GpuProcess(int(process.pid), uuid, int(size if exact else self._memory(handle)[0]), exact))
        return found


def _opened() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(f"no NVML: {error}; pip install nvidia-ml-py, or {_FAKE}") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuError(
            f"no NVML on this machine: {error}; install the NVIDIA driver, give this container runtimeClass nvidia and "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility, or {_FAKE}"
        ) from error
    return pynvml
