"""Processes that use the driver in part only, as helpers, tools and servers of engines do; and an engine's copies.

``python -m bench.gpu.kinds KIND [--gib N]`` says its pid (and that of a forked child), and ends with its stdin. KIND:
``load`` opens libcuda, ``nvml`` NVML, ``init`` calls cuInit, ``count`` asks for the number of GPUs; ``context``,
``memory``, ``managed``, ``fork`` and ``released`` have contexts. ``engine`` calls cuInit and starts
``bench.gpu.target``, which answers in its place. ``arena`` measures copies and ends.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.gpu.load_cuda import managed
from kybernate.dev.fakes.engine.libcuda import Libcuda

GIB, MIB = 1 << 30, 1 << 20
CHUNKS = (2 * MIB, 64 * MIB, GIB)
"""Sizes of the allocations of an engine's pool."""
MOST_CHUNKS = 512
KINDS = ("load", "nvml", "init", "count", "context", "memory", "managed", "fork", "released")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kinds")
    parser.add_argument("kind", choices=(*KINDS, "engine", "arena"))
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--load", default="auto")
    options = parser.parse_args()
    try:
        if options.kind == "arena":
            _say({"rows": Arena(int(options.gib * GIB)).rows()})
        elif options.kind == "engine":
            _call("cuInit", 0)
            command = [sys.executable, "-m", "bench.gpu.target", "--gib", str(options.gib), "--load", options.load]
            sys.exit(subprocess.call(command))  # it inherits the pipes
        else:
            _be(options.kind, int(options.gib * GIB))
    except Exception as error:  # reported to the bench, which decides what it means
        _say({"failed": f"{type(error).__name__}: {error}"[:600]})
        sys.exit(1)


def _be(kind: str, size: int) -> None:
    """Be such a process until stdin ends."""
    other = None
    if kind == "load":
        ctypes.CDLL("libcuda.so.1")
    elif kind == "nvml":
        ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2()
    elif kind in ("init", "count"):
        _call("cuInit", 0)
        if kind == "count":
            _call("cuDeviceGetCount", ctypes.byref(ctypes.c_int()))
    else:
        cuda = Libcuda()
        address = cuda.alloc(0, size) if kind != "context" else 0
        if kind == "managed":
            managed(64 * MIB)
        elif kind == "fork":
            other = os.fork()
            if other == 0:
                sys.stdin.read()
                os._exit(0)
        elif kind == "released":
            cuda.free(0, address)
            _call("cuDevicePrimaryCtxRelease_v2", 0)
    _say({"pid": os.getpid(), "child": other})
    sys.stdin.read()
    os._exit(0)


class Arena:
    """What an engine's own sleep could reach: the price of pinning, and copies to pinned memory that is used again."""

    def __init__(self, size: int) -> None:
        self._size, self._cuda = size, Libcuda()
        self._cuda.synchronize(0)

    def rows(self) -> list[dict[str, Any]]:
        """The findings; what this library cannot do is one of them."""
        found = []
        for part in (self._pinned, self._registered, self._pools):
            try:
                found += part()
            except (AttributeError, CallError) as error:
                found.append({"what": part.__name__.strip("_"), "not_seen": str(error)})
        return found

    def _pinned(self) -> list[dict[str, Any]]:
        """Pin once; copy three times each way."""
        host, size = ctypes.c_void_p(), ctypes.c_size_t(self._size)
        pin = _seconds(lambda: _call("cuMemHostAlloc", ctypes.byref(host), size, 0))
        address = ctypes.c_uint64(self._cuda.alloc(0, self._size))
        ways: dict[str, Callable[[], None]] = {
            "out": lambda: _call("cuMemcpyDtoH_v2", host, address, size),
            "in": lambda: _call("cuMemcpyHtoD_v2", address, host, size),
        }
        speed = {f"{way}_gbps": self._size / 1e9 / min(_seconds(ways[way]) for _ in range(3)) for way in ways}
        _call("cuMemFreeHost", host)
        self._cuda.free(0, address.value)
        return [{"what": "pinned", "pin_s_per_gib": self._per_gib(pin), **speed}]

    def _registered(self) -> list[dict[str, Any]]:
        """Touch and register ordinary memory, without and with huge pages."""
        found = []
        for huge in (False, True):
            area = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if huge:
                with contextlib.suppress(OSError):
                    area.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            here, size = ctypes.c_void_p(address), ctypes.c_size_t(self._size)
            touch = _seconds(lambda: ctypes.memset(address, 1, self._size))  # noqa: B023 - called at once
            register = _seconds(lambda: _call("cuMemHostRegister_v2", here, size, 0))  # noqa: B023
            _call("cuMemHostUnregister", here)
            row = {"touch_s_per_gib": self._per_gib(touch), "register_s_per_gib": self._per_gib(register)}
            found.append({"what": "registered", "huge_pages": huge, **row})
        return found

    def _pools(self) -> list[dict[str, Any]]:
        """Sleep and wake an engine's pool of allocations three times; the first sleep pins."""
        found = []
        for chunk in CHUNKS:
            count = min(self._size // chunk, MOST_CHUNKS)
            if count:
                pool = [_Chunk(chunk) for _ in range(count)]
                volume, rounds = count * chunk / 1e9, []
                for _ in range(3):
                    out = _seconds(lambda: [one.sleep() for one in pool])  # noqa: B023
                    back = _seconds(lambda: [one.wake() for one in pool])  # noqa: B023
                    rounds.append({"sleep_gbps": volume / out, "wake_gbps": volume / back})
                for one in pool:
                    one.end()
                found.append({"what": "pool", "chunk_mib": chunk // MIB, "chunks": count, "rounds": rounds})
        return found

    def _per_gib(self, seconds: float) -> float:
        return seconds / (self._size / GIB)


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of device 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("at_type", ctypes.c_int),
        ("at_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc: device 0 reads and writes."""

    _fields_ = (("at_type", ctypes.c_int), ("at_id", ctypes.c_int), ("flags", ctypes.c_int))


class _Chunk:
    """One allocation of the virtual memory API: its address stays while it sleeps, and so does its pinned copy."""

    def __init__(self, size: int) -> None:
        self._size, self._address, self._handle = ctypes.c_size_t(size), ctypes.c_uint64(), ctypes.c_uint64()
        self._store: ctypes.c_void_p | None = None
        zero = ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), zero, zero)
        self._map()

    def _map(self) -> None:
        zero, made, access = ctypes.c_uint64(0), _Properties(1, 0, 1, 0, None), _Access(1, 0, 3)
        _call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(made), zero)
        _call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, zero)
        _call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def sleep(self) -> None:
        """Copy out and give the memory back."""
        if self._store is None:
            self._store = ctypes.c_void_p()
            _call("cuMemHostAlloc", ctypes.byref(self._store), self._size, 0)
        _call("cuMemcpyDtoH_v2", self._store, self._address, self._size)
        self._unmap()

    def wake(self) -> None:
        """Take memory and copy back."""
        self._map()
        _call("cuMemcpyHtoD_v2", self._address, self._store, self._size)

    def end(self) -> None:
        """Give all of it back."""
        self._unmap()
        _call("cuMemAddressFree", self._address, self._size)
        _call("cuMemFreeHost", self._store)

    def _unmap(self) -> None:
        _call("cuMemUnmap", self._address, self._size)
        _call("cuMemRelease", self._handle)


class CallError(Exception):
    """A call of libcuda failed."""


def _call(name: str, *arguments: Any) -> None:
    """One call. Raises CallError, and AttributeError where the library has no such call."""
    code = int(getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments))
    if code != 0:
        raise CallError(f"{name} answered {code}")


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
