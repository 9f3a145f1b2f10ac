"""XID events from NVML: its event set waits in a thread of its own, so that it can be stopped and loses nothing."""

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from typing import Any

from kybernate.gpus.nvml_names import text
from kybernate.gpus.protocol import GpuError
from kybernate.logs import get_logger
from kybernate.machine import GpuEvent

_SLICE_MS = 500
"""How long one wait of the library takes at most, and so a stop."""
_LOOK_AGAIN_SLICES = 10
"""A GPU that could not be listened to is tried again so many slices later."""
_RETRY_SECONDS = 1.0
_NO_INSTANCE = 0xFFFFFFFF


class EventThread:
    """Listens from its construction until ``close``. Construct and close it in a thread: both wait for the driver."""

    def __init__(self, nvml: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._nvml = nvml
        self._loop = loop
        self._found: deque[GpuEvent] = deque()
        self._arrived = asyncio.Event()
        self._trouble: str | None = None
        self._set: Any = None
        self._uuids: dict[int, str] = {}
        """UUIDs by the address in the handle: a GPU that was lost cannot be asked for it any more."""
        self._registered: set[int] = set()
        self._stop = threading.Event()
        self._listen()
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        self._thread.start()

    async def next(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """What came since the last call, or comes first within the time. Raises GpuError when nobody listens."""
        if not self._found:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    await self._arrived.wait()
        found = tuple(self._found)
        self._found.clear()
        self._arrived.clear()
        if not found and self._trouble is not None:
            raise GpuError(f"no XID events: {self._trouble}; GPUs are only looked at")
        return found

    def close(self) -> None:
        """Stop; takes as long as one wait of the library."""
        self._stop.set()
        self._thread.join()
        self._free()

    def _run(self) -> None:
        slices = failures = 0
        while not self._stop.is_set():
            try:
                event = self._wait()
                slices += 1
                if slices % _LOOK_AGAIN_SLICES == 0:
                    self._register()
                failures = 0
            except self._nvml.NVMLError:  # a lost GPU spoils the whole set; one without it hears the others
                failures += 1
                if failures > 1:
                    self._stop.wait(_RETRY_SECONDS)
                self._listen()
                continue
            except Exception as error:  # whatever it is, it must not end the listening unheard
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
        """False: the event loop has ended without ``close``."""

        def add() -> None:
            self._found.append(event)
            self._arrived.set()

        try:
            self._loop.call_soon_threadsafe(add)
        except RuntimeError:
            return False
        return True

    def _listen(self) -> None:
        """A new event set with all GPUs that can be heard; what hinders is kept as trouble."""
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
        self._trouble = None if self._registered else "no GPU here can be listened to"

    def _owner(self, data: Any) -> str | None:
        """Whose event it is: a MIG instance if the driver names one, else the GPU; None if it cannot be known."""
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
