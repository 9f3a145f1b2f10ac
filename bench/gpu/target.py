"""What is parked: a process (or a tree of them) that holds GPU memory and answers JSON lines about it.

``python -m bench.gpu.target --gib 8 [--processes 2]`` says first that it is ready, with checksum and first results, and
then makes no CUDA call until it is asked: ``verify``, ``work``, ``busy``, ``managed``, ``nvml``, ``nccl``, ``share``,
``synchronize``. ``--role fill`` takes what is free instead, ``--role limits`` measures plain copies and ends.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.target")
    parser.add_argument("--role", choices=("hold", "fill", "limits"), default="hold")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--step", type=float, default=0.25, help="GiB that fill takes at a time")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--load", choices=("auto", "torch", "libcuda"), default="auto")
    options = parser.parse_args()
    try:
        module = _load(options.load)
        if options.role == "limits":
            _say({"limits": module.copy_limits(), "kind": module.__name__.rpartition(".")[2]})
        elif options.role == "fill":
            _fill(options, module)
        else:
            _hold(options, module)
    except Exception as error:  # reported to the harness, which decides what it means
        _say({"failed": f"{type(error).__name__}: {error}"[:600]})
        sys.exit(1)


def _load(name: str) -> Any:
    """The module with the work: torch where it is, else libcuda alone."""
    if name != "libcuda":
        try:
            from bench.gpu import load_torch
        except ImportError:
            if name == "torch":
                raise
        else:
            return load_torch
    from bench.gpu import load_cuda

    return load_cuda


def _make(module: Any, gib: float, seed: int) -> Any:
    return (module.TorchLoad if hasattr(module, "TorchLoad") else module.CudaLoad)(gib, seed)


def _hold(options: argparse.Namespace, module: Any) -> None:
    began = time.perf_counter()
    load = _make(module, options.gib, options.seed)
    others = [_start_other(options, number) for number in range(1, options.processes)]
    mine = {"pid": os.getpid(), "bytes": load.bytes, "kind": load.kind, **_results(load)}
    answers = [_read(other) for other in others]
    _say(_merged(mine, answers) | {"ready_seconds": time.perf_counter() - began})
    for line in sys.stdin:
        request = json.loads(line)
        for other in others:
            assert other.stdin is not None
            other.stdin.write(line)
            other.stdin.flush()
        began = time.perf_counter()
        answer = _do(load, request)
        _say(_merged(answer, [_read(other) for other in others]) | {"seconds": time.perf_counter() - began})


def _do(load: Any, request: dict[str, Any]) -> dict[str, Any]:
    ops: dict[str, Callable[[], dict[str, Any]]] = {
        "verify": lambda: _results(load),
        "work": lambda: {"work": load.work()},
        "busy": lambda: {"busy": load.busy(request["seconds"])},
        "managed": lambda: {"code": load.managed(64 << 20)},
        "synchronize": lambda: {"synchronized": load.synchronize()},
        "nvml": _open_and_drop_nvml,
        "nccl": _single_nccl,
        "share": _share,
    }
    return ops[request["op"]]()


def _results(load: Any) -> dict[str, Any]:
    """The work first: a write before a synchronize is what a process that was parked may do (H4)."""
    return {"work": load.work(), "graph": load.graph(), "checksum": load.checksum()}


def _merged(mine: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer for the whole tree: sums of bytes, lists of the rest."""
    if not others:
        return mine
    everyone = [mine, *others]
    merged: dict[str, Any] = {key: [one.get(key) for one in everyone] for key in mine if key not in ("pid", "kind")}
    if "bytes" in mine:
        merged["bytes"] = sum(one["bytes"] for one in everyone)
    return {**merged, **{key: mine[key] for key in ("pid", "kind") if key in mine}}


def _fill(options: argparse.Namespace, module: Any) -> None:
    """Take memory until there is none left, or ``--gib``, and write it: what a leak left behind would show later. In
    large blocks first; the last ones have ``--step``."""
    blocks, taken, failure = [], 0.0, ""
    size = options.step * 64
    while size >= options.step:
        if taken + size <= options.gib:
            try:
                blocks.append(module.block(size, options.seed))
                taken += size
                continue
            except Exception as error:
                failure = str(error)[:200]
        size /= 2
    _say({"pid": os.getpid(), "gib": taken, "ended_by": failure})
    sys.stdin.read()


def _start_other(options: argparse.Namespace, number: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.gpu.target", "--gib", str(options.gib), "--load", options.load]
    return subprocess.Popen(
        [*command, "--seed", str(options.seed + number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _read(other: "subprocess.Popen[str]") -> dict[str, Any]:
    assert other.stdout is not None
    line = other.stdout.readline()
    if not line:
        raise RuntimeError(f"child {other.pid} ended with code {other.wait()}")
    reply: dict[str, Any] = json.loads(line)
    if "failed" in reply:
        raise RuntimeError(reply["failed"])
    return reply


def _open_and_drop_nvml() -> dict[str, Any]:
    """NVML initialised and its library closed without nvmlShutdown (H3)."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = int(library.nvmlInit_v2())
    close = ctypes.CDLL(None).dlclose
    close.argtypes = [ctypes.c_void_p]
    return {"code": code, "closed": int(close(library._handle))}


def _single_nccl() -> dict[str, Any]:
    """A process group of one (H7)."""
    import torch
    import torch.distributed as group

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    group.init_process_group("nccl", store=group.HashStore(), rank=0, world_size=1)
    one = torch.ones(1024, device="cuda")
    group.all_reduce(one)
    torch.cuda.synchronize()
    return {"sum": float(one.sum())}


def _share() -> dict[str, Any]:
    """Memory opened to other processes by CUDA IPC (H9)."""
    library = ctypes.CDLL("libcuda.so.1")
    address, handle = ctypes.c_uint64(), ctypes.create_string_buffer(64)
    code = int(library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(4 << 20)))
    return {"code": code or int(library.cuIpcGetMemHandle(handle, address)), "handle": handle.raw.hex()}


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
