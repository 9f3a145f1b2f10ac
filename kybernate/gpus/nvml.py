"""``Gpus`` by NVML: readings, and waits for XID events, in worker threads."""

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kybernate.gpus.nvml_reader import PCI_DEVICES, NvmlReader
from kybernate.gpus.port import GpuError
from kybernate.machine import Gpu, GpuEvent, GpuProcess, GpuSensors, Link

T = TypeVar("T")

_SLICE_SECONDS = 0.5
"""Duration of one wait of the library, and thereby the longest time that ``close`` takes."""
_REGISTER_SECONDS = 5.0
"""How often registration is tried again for GPUs that refused it."""
_MOST_EVENTS = 1_000
"""Taken by one call."""
_NO_INSTANCE = 0xFFFFFFFF


class NvmlGpus:
    """GPUs by NVML. Readings run in a worker thread, one at a time."""

    def __init__(self, pci_devices: Path = PCI_DEVICES) -> None:
        self._reader = NvmlReader(pci_devices)
        self._lock = threading.Lock()
        self._events: EventSet | None = None

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order. Raises GpuError."""
        return await self._in_thread(self._reader.gpus)

    async def instances(self) -> tuple[Gpu, ...]:
        """MIG instances. Raises GpuError."""
        return await self._in_thread(self._reader.instances)

    async def links(self) -> tuple[Link, ...]:
        """Every pair of GPUs once. Raises GpuError."""
        return await self._in_thread(self._reader.links)

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context. Raises GpuError."""
        return await self._in_thread(self._reader.processes)

    async def sensors(self) -> tuple[GpuSensors, ...]:
        """Temperature, power and utilisation of each GPU. Raises GpuError."""
        return await self._in_thread(self._reader.sensors)

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """XID events; see ``Gpus``. Raises GpuError, also if no GPU here reports any."""
        if self._events is None:
            self._events = await self._in_thread(lambda: self._reader.call(EventSet))
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = await asyncio.to_thread(self._events.wait, min(left, _SLICE_SECONDS))
            if found or not left:
                return found

    async def close(self) -> None:
        """Shut NVML down, after the wait for events under way."""
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)
        await self._in_thread(self._reader.close)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:  # a reading whose caller was cancelled may still be under way
                return read()

        return await asyncio.to_thread(locked)


class EventSet:
    """NVML's set of events, with all GPUs that accept registration; it keeps what arrives between two waits. All calls
    block on the driver."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()
        self._trouble: str | None = None
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """UUID by the address in the handle, since a lost GPU no longer reports its UUID."""
        self._registered: set[int] = set()
        self._register_at = 0.0
        self._listen()

    def wait(self, seconds: float) -> tuple[GpuEvent, ...]:
        """The events that are there, after a wait for the first. Raises GpuError if no GPU could be registered."""
        found: list[GpuEvent] = []
        with self._lock:  # a wait whose caller was cancelled may still be under way
            try:
                if time.monotonic() >= self._register_at:
                    self._register()
                if not self._registered:  # an empty set may answer at once
                    time.sleep(seconds)
                while self._registered and len(found) < _MOST_EVENTS:
                    event = self._next(0.0 if found else seconds)
                    if event is None:
                        break
                    found.append(event)
            except self._nvml.NVMLError:  # a lost GPU makes the whole set fail; a set without it works
                self._listen()
                time.sleep(0.0 if found else seconds)
            except Exception as error:  # a fault of the library must not end the process
                if not found:
                    raise GpuError(f"no XID events: {error}; GPUs are only polled") from error
        if not found and self._trouble is not None:
            raise GpuError(f"no XID events: {self._trouble}; GPUs are only polled")
        return tuple(found)

    def close(self) -> None:
        """Free the set, after the wait under way."""
        with self._lock:
            self._free()

    def _next(self, seconds: float) -> GpuEvent | None:
        """One event; None if there is none in time, or one of another kind."""
        nvml = self._nvml
        try:
            data = nvml.nvmlEventSetWait_v2(self._set, round(seconds * 1000))
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        if not data.eventType & nvml.nvmlEventTypeXidCriticalError:
            return None
        return GpuEvent(self._owner(data), int(data.eventData))

    def _listen(self) -> None:
        """Create a new event set with all GPUs that accept registration; keep the reason if none does."""
        self._free()
        self._registered.clear()
        try:
            self._set = self._nvml.nvmlEventSetCreate()
            self._register()
        except self._nvml.NVMLError as error:
            self._trouble = f"NVML failed: {error}"

    def _register(self) -> None:
        nvml = self._nvml
        self._register_at = time.monotonic() + _REGISTER_SECONDS
        for index in range(nvml.nvmlDeviceGetCount()):
            if index in self._registered:
                continue
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                if nvml.nvmlDeviceGetSupportedEventTypes(handle) & nvml.nvmlEventTypeXidCriticalError:
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                    self._uuids[_address(handle)] = uuid
                    self._registered.add(index)
        self._trouble = None if self._registered else "no GPU here reports events"

    def _owner(self, data: Any) -> str | None:
        """UUID of the MIG instance that the driver names, else of the GPU; None if unknown."""
        nvml = self._nvml
        if not data.device:
            return None
        parent = self._uuids.get(_address(data.device))
        if _NO_INSTANCE in (data.gpuInstanceId, data.computeInstanceId):
            return parent
        with contextlib.suppress(nvml.NVMLError):
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(data.device)):
                with contextlib.suppress(nvml.NVMLError):
                    instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(data.device, number)
                    own = nvml.nvmlDeviceGetGpuInstanceId(instance), nvml.nvmlDeviceGetComputeInstanceId(instance)
                    if own == (data.gpuInstanceId, data.computeInstanceId):
                        return str(nvml.nvmlDeviceGetUUID(instance))
        return parent

    def _free(self) -> None:
        if self._set is not None:
            old, self._set = self._set, None
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(old)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
