"""A process that makes the calls it reads from stdin with NVIDIA's package, each line in its own thread.

``{"id": 1, "do": "alloc", "with": [4096]}`` → ``{"id": 1, "code": 0, "value": 140…}``.
"""

import ctypes
import json
import sys
import threading
import uuid
from typing import Any

Result = tuple[int, Any]


def raw(text: str) -> bytes:
    """The 16 bytes of ``GPU-…``."""
    return uuid.UUID(text.partition("-")[2]).bytes


class Bindings:
    """The library as cuda-bindings sees it: every function found by cuGetProcAddress."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver

    def _result(self, answer: tuple[Any, ...]) -> Result:
        value = answer[1] if len(answer) > 1 else None
        return int(answer[0]), value if value is None or isinstance(value, bytes) else int(value)

    def init(self) -> Result:
        return self._result(self.driver.cuInit(0))

    def version(self) -> Result:
        return self._result(self.driver.cuDriverGetVersion())

    def count(self) -> Result:
        return self._result(self.driver.cuDeviceGetCount())

    def device(self, ordinal: int) -> Result:
        number = self.driver.cuDeviceGet(ordinal)[1]
        code, name = self.driver.cuDeviceGetName(100, number)
        identity, bus_id = self.driver.cuDeviceGetUuid(number)[1], self.driver.cuDeviceGetPCIBusId(32, number)[1]
        size = self.driver.cuDeviceTotalMem(number)[1]
        texts = [text.split(b"\0")[0].decode() for text in (name, bus_id)]
        return int(code), [texts[0], str(uuid.UUID(bytes=bytes(identity.bytes))), texts[1], int(size)]

    def retain(self, ordinal: int) -> Result:
        code, context = self.driver.cuDevicePrimaryCtxRetain(ordinal)
        return int(code) or self._result(self.driver.cuCtxSetCurrent(context))[0], None

    def create(self, ordinal: int) -> Result:
        return int(self.driver.cuCtxCreate(None, 0, ordinal)[0]), None

    def alloc(self, count: int) -> Result:
        return self._result(self.driver.cuMemAlloc(count))

    def managed(self, count: int) -> Result:
        return self._result(self.driver.cuMemAllocManaged(count, 1))

    def free(self, address: int) -> Result:
        return self._result(self.driver.cuMemFree(address))

    def info(self) -> Result:
        code, room, total = self.driver.cuMemGetInfo()
        return int(code), [room, total]

    def write(self, address: int, text: str) -> Result:
        data = text.encode()
        return self._result(self.driver.cuMemcpyHtoD(address, data, len(data)))

    def read(self, address: int, count: int) -> Result:
        data = bytearray(count)
        return int(self.driver.cuMemcpyDtoH(data, address, count)[0]), data.decode()

    def share(self, address: int) -> Result:
        return int(self.driver.cuIpcGetMemHandle(address)[0]), None

    def synchronize(self) -> Result:
        return self._result(self.driver.cuCtxSynchronize())

    def synchronize_stream(self) -> Result:
        return self._result(self.driver.cuStreamSynchronize(0))

    def error(self, code: int) -> Result:
        result, name = self.driver.cuGetErrorName(self.driver.CUresult(code))
        return int(result), name.decode()

    def state(self, pid: int) -> Result:
        return self._result(self.driver.cuCheckpointProcessGetState(pid))

    def tid(self, pid: int) -> Result:
        return self._result(self.driver.cuCheckpointProcessGetRestoreThreadId(pid))

    def lock(self, pid: int, timeout_ms: int = 0) -> Result:
        arguments = self.driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        return self._result(self.driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> Result:
        return self._result(self.driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, moves: list[list[str]] | None = None) -> Result:
        if moves is None:
            return self._result(self.driver.cuCheckpointProcessRestore(pid, None))
        pairs = [self.driver.CUcheckpointGpuPair() for _ in moves]
        for pair, (old, new) in zip(pairs, moves, strict=True):
            for name, text in (("oldUuid", old), ("newUuid", new)):  # a CUuuid has no setter; assigning one copies it
                sixteen = ctypes.create_string_buffer(raw(text), 16)
                setattr(pair, name, self.driver.CUuuid(ctypes.addressof(sixteen)))
        arguments = self.driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs, arguments.gpuPairsCount = pairs, len(pairs)
        return self._result(self.driver.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> Result:
        return self._result(self.driver.cuCheckpointProcessUnlock(pid, None))


def main() -> None:
    """Serve until stdin closes."""
    calls = Bindings()
    printing = threading.Lock()
    current = threading.local()
    ordinals: list[int] = []  # contexts are a matter of threads: each takes over what was retained

    def answer(request: dict[str, Any]) -> None:
        if ordinals and getattr(current, "ordinal", None) is None and request["do"] not in ("retain", "create"):
            calls.retain(ordinals[-1])
        try:
            code, value = calls.__getattribute__(request["do"])(*request["with"])
            reply = {"id": request["id"], "code": int(code), "value": value}
        except Exception as error:
            reply = {"id": request["id"], "code": -1, "value": f"{type(error).__name__}: {error}"}
        with printing:
            if request["do"] in ("retain", "create") and reply["code"] == 0:
                ordinals.append(request["with"][0])
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
