"""GPUs as NVML tells.

The library is nvidia-ml-py's module; its traps are listed in docs/nvml.md and dealt with here and in the ``nvml_*``
files beside this one.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kybernate.gpus.nvml_events import EventThread
from kybernate.gpus.nvml_links import read_links
from kybernate.gpus.nvml_names import mig_profile, numa_node_of, pci_address, text
from kybernate.gpus.protocol import GpuError
from kybernate.machine import Gpu, GpuEvent, GpuProcess, Link, Mig

T = TypeVar("T")


class NvmlGpus:
    """GPUs as NVML tells. Calls run in a thread, one at a time.

    ``load`` gives the library when it is first needed; ``pci_devices`` is where sysfs tells NUMA nodes.
    A GPU that fails (lost, in reset) is left out; only when none can be read is it an error.
    """

    def __init__(self, load: Callable[[], Any], pci_devices: Path = Path("/sys/bus/pci/devices")) -> None:
        self._load = load
        self._nvml: Any = None
        self._pci_devices = pci_devices
        self._lock = threading.Lock()
        self._events: EventThread | None = None

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order. Raises GpuError."""
        return await self._in_thread(lambda: self._each(self._gpu))

    async def instances(self) -> tuple[Gpu, ...]:
        """MIG instances. Raises GpuError."""
        return await self._in_thread(lambda: self._flat(self._instances))

    async def links(self) -> tuple[Link, ...]:
        """Every pair of GPUs once. Raises GpuError."""
        return await self._in_thread(lambda: read_links(self._nvml, self._each(lambda _, handle: handle)))

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID, without what the driver reserves for itself; MIG instances too. Raises GpuError."""
        return await self._in_thread(lambda: dict(self._flat(self._used_of)))

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context. Raises GpuError."""
        return await self._in_thread(lambda: self._flat(self._processes_of))

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """XID events; see ``Gpus``. Raises GpuError, also when no GPU here reports any."""
        if self._events is None:
            loop = asyncio.get_running_loop()
            self._events = await self._in_thread(lambda: EventThread(self._nvml, loop))
        return await self._events.next(timeout_seconds)

    async def close(self) -> None:
        """Stop listening and shut NVML down."""
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)
        await asyncio.to_thread(self._shut_down)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        def call() -> T:
            with self._lock:
                self._open()
                try:
                    return read()
                except self._nvml.NVMLError as error:
                    raise GpuError(f"NVML failed: {error}; look for XID events in the kernel log") from error

        return await asyncio.to_thread(call)

    def _open(self) -> None:
        if self._nvml is not None:
            return
        nvml = self._load()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            remedy = "install the NVIDIA driver here, give this container runtimeClass nvidia, or use KYB_GPUS=fake"
            raise GpuError(f"no NVML on this machine: {error}; {remedy}") from error
        self._nvml = nvml

    def _shut_down(self) -> None:
        with self._lock:  # a reading whose caller was cancelled may still be under way
            nvml, self._nvml = self._nvml, None
            if nvml is not None:
                with contextlib.suppress(nvml.NVMLError):  # the driver is gone already
                    nvml.nvmlShutdown()

    def _each(self, read: Callable[[int, Any], T]) -> tuple[T, ...]:
        """What ``read`` says of each GPU by index and handle, without those that fail unless all do."""
        nvml, found, failed = self._nvml, [], None
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(read(index, nvml.nvmlDeviceGetHandleByIndex(index)))
            except nvml.NVMLError as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return tuple(found)

    def _flat(self, read: Callable[[int, Any], Iterator[T]]) -> tuple[T, ...]:
        return tuple(one for part in self._each(lambda index, handle: tuple(read(index, handle))) for one in part)

    def _gpu(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        address = pci_address(nvml.nvmlDeviceGetPciInfo_v3(handle).busId)
        return Gpu(
            index=index,
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            minor=nvml.nvmlDeviceGetMinorNumber(handle),
            pci_bus_id=address,
            name=text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            numa_node=numa_node_of(nvml, handle, self._pci_devices / address),
            mig_enabled=self._in_mig_mode(handle),
        )

    def _in_mig_mode(self, handle: Any) -> bool:
        """Whether only instances of it can be used; what is only pending until a reset does not count."""
        nvml = self._nvml
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                return False
            raise
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

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
                uuid=text(nvml.nvmlDeviceGetUUID(instance)),
                minor=parent.minor,
                pci_bus_id=parent.pci_bus_id,
                name=text(nvml.nvmlDeviceGetName(instance)),
                memory_bytes=nvml.nvmlDeviceGetMemoryInfo(instance).total,
                numa_node=parent.numa_node,
                mig=mig,
            )

    def _used_of(self, _: int, handle: Any) -> Iterator[tuple[str, int]]:
        for one in (handle, *self._instance_handles(handle)):
            yield text(self._nvml.nvmlDeviceGetUUID(one)), self._used(one)

    def _used(self, handle: Any) -> int:
        # Version 1 of this struct counts the driver's own reserve (hundreds of MiB) as used; version 2 does not.
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2).used)

    def _processes_of(self, _: int, handle: Any) -> Iterator[GpuProcess]:
        # In MIG mode the GPU itself would list the same processes once more, with their instances' numbers.
        for one in tuple(self._instance_handles(handle)) or (handle,):
            uuid = text(self._nvml.nvmlDeviceGetUUID(one))
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(one):
                known = process.usedGpuMemory  # None: the driver does not tell (vGPU, WSL)
                yield GpuProcess(process.pid, uuid, self._used(one) if known is None else known)
