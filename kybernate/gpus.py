"""Which GPUs this machine has, and which processes use their memory: NVML, or the fake driver.

The only file that imports pynvml, and only when NVML is asked for, so that a laptop needs no NVIDIA library.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from kybernate.fakes.gpu.client import DriverError, FakeDriverClient

T = TypeVar("T")


class GpuError(Exception):
    """The GPUs cannot be read; the text says what failed and what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical GPU."""

    index: int
    """NVML's index; may change with a reboot, unlike the UUID."""
    uuid: str
    minor: int
    """N of /dev/nvidiaN."""
    pci_bus_id: str
    name: str
    memory_bytes: int
    """All of its memory, in use or not."""
    numa_node: int | None
    """Nearest NUMA node; None where the machine does not say."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. One entry for each of its GPUs; parked processes do not appear."""

    pid: int
    gpu: str
    """UUID."""
    bytes: int
    """Its memory there; may be 0. Where the driver does not tell, all that is used on the GPU."""


class Gpus(Protocol):
    """What is read of GPUs. Each call may raise GpuError."""

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs in index order."""
        ...

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID."""
        ...

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a context on a GPU."""
        ...

    async def close(self) -> None:
        """Let go of the library or the connection."""
        ...


def open_gpus(kind: Literal["nvml", "fake"], socket: Path | None = None) -> Gpus:
    """GPUs of this machine (``nvml``) or of the fake driver at ``socket``. Raises GpuError."""
    if kind == "nvml":
        return NvmlGpus()
    if socket is None:
        raise GpuError("fake GPUs need the socket of the fake driver; set KYB_FAKE_DRIVER")
    return FakeGpus(socket)


class NvmlGpus:
    """GPUs as NVML tells. Calls run in a thread, one at a time; pass ``nvml`` only to replace the library in tests."""

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self._ready = False

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs in index order. Raises GpuError."""
        return await self._in_thread(lambda: tuple(self._gpu(i) for i in range(self._nvml.nvmlDeviceGetCount())))

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID, without what the driver reserves for itself. Raises GpuError."""
        return await self._in_thread(lambda: {self._uuid(handle): self._used(handle) for handle in self._handles()})

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context. Raises GpuError."""
        return await self._in_thread(self._processes)

    async def close(self) -> None:
        """Shut NVML down."""
        if self._ready:
            self._ready = False
            await asyncio.to_thread(self._nvml.nvmlShutdown)

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
        if self._ready:
            return
        remedy = "install the NVIDIA driver here, give this container runtimeClass nvidia, or use KYB_GPUS=fake"
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                raise GpuError(f"no NVML: {error}; pip install nvidia-ml-py, or use KYB_GPUS=fake") from error
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise GpuError(f"no NVML on this machine: {error}; {remedy}") from error
        self._ready = True

    def _handles(self) -> tuple[Any, ...]:
        return tuple(self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount()))

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(
            index=index,
            uuid=self._uuid(handle),
            minor=nvml.nvmlDeviceGetMinorNumber(handle),
            pci_bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            numa_node=self._numa_node(handle),
        )

    def _uuid(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetUUID(handle))

    def _used(self, handle: Any) -> int:
        # Version 1 of this struct counts the driver's own reserve (hundreds of MiB) as used; version 2 does not.
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2).used)

    def _numa_node(self, handle: Any) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetNumaNodeId(handle))
        except self._nvml.NVMLError:  # not supported: one node only, or an old driver
            return None

    def _processes(self) -> tuple[GpuProcess, ...]:
        found = []
        for handle in self._handles():
            uuid = self._uuid(handle)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                known = process.usedGpuMemory
                found.append(GpuProcess(process.pid, uuid, self._used(handle) if known is None else known))
        return tuple(found)


class FakeGpus:
    """GPUs as the fake driver tells; connects at the first call, and again after the driver was restarted."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._client: FakeDriverClient | None = None
        self._connecting = asyncio.Lock()

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs in index order. Raises GpuError."""
        fields = Gpu.__dataclass_fields__
        return tuple(Gpu(**{name: gpu[name] for name in fields}) for gpu in (await self._call("devices"))["gpus"])

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID. Raises GpuError."""
        return {gpu["uuid"]: gpu["used_bytes"] for gpu in (await self._call("devices"))["gpus"]}

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a context. Raises GpuError."""
        found = (await self._call("processes"))["processes"]
        return tuple(GpuProcess(entry["pid"], entry["gpu"], entry["bytes"]) for entry in found)

    async def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def _call(self, name: str) -> dict[str, Any]:
        try:
            async with self._connecting:
                if self._client is None or self._client.closed:
                    self._client = await FakeDriverClient.connect(self._socket)
            return await self._client.call(name)
        except (DriverError, ConnectionError) as error:
            raise GpuError(str(error)) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
