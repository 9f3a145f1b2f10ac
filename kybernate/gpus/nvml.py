"""``Gpus`` by NVML: readings in a worker thread, XID events in a thread of the event set."""

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kybernate.gpus.nvml_hardware import text
from kybernate.gpus.nvml_reader import PCI_DEVICES, NvmlReader
from kybernate.gpus.port import GpuError
from kybernate.logs import get_logger
from kybernate.machine import Gpu, GpuEvent, GpuProcess, GpuSensors, Link

T = TypeVar("T")

_SLICE_MS = 500
"""Duration of one wait of the library, and thereby the longest time that ``close`` takes."""
_REGISTER_SLICES = 10
"""Number of waits after which registration is tried again for GPUs that refused it."""
_RETRY_SECONDS = 1.0
_NO_INSTANCE = 0xFFFFFFFF


class NvmlGpus:
    """GPUs by NVML. Readings run in a worker thread, one at a time."""

    def __init__(self, pci_devices: Path = PCI_DEVICES) -> None:
        self._reader = NvmlReader(pci_devices)
        self._lock = threading.Lock()
        self._events: EventThread | None = None

    async def list(self) -> tuple[Gpu, ...]:
        """All GPUs that answer, in index order. Raises GpuError."""
        return await self._in_thread(self._reader.gpus)

    async def instances(self) -> tuple[Gpu, ...]:
        """MIG instances. Raises GpuError."""
        return await self._in_thread(self._reader.instances)

    async def links(self) -> tuple[Link, ...]:
        """Every pair of GPUs once. Raises GpuError."""
        return await self._in_thread(self._reader.links)

    async def used_bytes(self) -> dict[str, int]:
        """Memory in use by UUID, MIG instances included. Raises GpuError."""
        return await self._in_thread(self._reader.used_bytes)

    async def processes(self) -> tuple[GpuProcess, ...]:
        """Processes with a compute context. Raises GpuError."""
        return await self._in_thread(self._reader.processes)

    async def sensors(self) -> tuple[GpuSensors, ...]:
        """Temperature, power and utilisation of each GPU. Raises GpuError."""
        return await self._in_thread(self._reader.sensors)

    async def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """XID events; see ``Gpus``. Raises GpuError, also if no GPU here reports any."""
        if self._events is None:
            loop = asyncio.get_running_loop()
            self._events = await self._in_thread(lambda: self._reader.call(lambda nvml: EventThread(nvml, loop)))
        return await self._events.next(timeout_seconds)

    async def close(self) -> None:
        """Stop the event thread and shut NVML down."""
        if self._events is not None:
            events, self._events = self._events, None
            await asyncio.to_thread(events.close)
        await self._in_thread(self._reader.close)

    async def _in_thread(self, read: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:  # a reading whose caller was cancelled may still be under way
                return read()

        return await asyncio.to_thread(locked)


class EventThread:
    """A thread that waits for XID events, so that the wait can be stopped and no event is lost.

    Runs from its construction until ``close``. Call both in a worker thread: they block on the driver.
    """

    def __init__(self, nvml: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._nvml = nvml
        self._loop = loop
        self._found: deque[GpuEvent] = deque()
        self._arrived = asyncio.Event()
        self._trouble: str | None = None
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """UUID by the address in the handle, since a lost GPU no longer reports its UUID."""
        self._registered: set[int] = set()
        self._stop = threading.Event()
        self._listen()
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        self._thread.start()

    async def next(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """Events since the last call; waits for the first. Raises GpuError if no GPU could be registered."""
        if not self._found:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._arrived.wait()
        found = tuple(self._found)
        self._found.clear()
        self._arrived.clear()
        if not found and self._trouble is not None:
            raise GpuError(f"no XID events: {self._trouble}; GPUs are only polled")
        return found

    def close(self) -> None:
        """Stop the thread; blocks for up to one wait of the library."""
        self._stop.set()
        self._thread.join()
        self._free()

    def _run(self) -> None:
        slices = failures = 0
        while not self._stop.is_set():
            try:
                event = self._wait()
                slices += 1
                if slices % _REGISTER_SLICES == 0:
                    self._register()
                failures = 0
            except self._nvml.NVMLError:  # a lost GPU makes the whole set fail; a set without it works
                failures += 1
                if failures > 1:
                    self._stop.wait(_RETRY_SECONDS)
                self._listen()
                continue
            except Exception as error:  # any other error is logged and must not end the thread
                get_logger().error("nvml.events_failed", error=repr(error), exc_info=error)
                self._stop.wait(_RETRY_SECONDS)
                continue
            if event is not None and not self._hand_over(event):
                return

    def _wait(self) -> GpuEvent | None:
        nvml = self._nvml
        if not self._registered:  # an empty set may answer at once
            self._stop.wait(_SLICE_MS / 1000)
            return None
        try:
            data = nvml.nvmlEventSetWait_v2(self._set, _SLICE_MS)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return (
            GpuEvent(self._owner(data), int(data.eventData))
            if data.eventType & nvml.nvmlEventTypeXidCriticalError
            else None
        )

    def _hand_over(self, event: GpuEvent) -> bool:
        """Pass an event to the event loop; False if that has ended without ``close``."""

        def add() -> None:
            self._found.append(event)
            self._arrived.set()

        try:
            self._loop.call_soon_threadsafe(add)
        except RuntimeError:
            return False
        return True

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
        for index in range(nvml.nvmlDeviceGetCount()):
            if index in self._registered:
                continue
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = text(nvml.nvmlDeviceGetUUID(handle))
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
                        return text(nvml.nvmlDeviceGetUUID(instance))
        return parent

    def _free(self) -> None:
        if self._set is not None:
            old, self._set = self._set, None
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(old)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
