"""``python -m bench.loop_steps FILE MODULE [ARGUMENT …]``: runs a module, and writes its longest step to FILE.

A step is what an event loop does between two looks at its sockets and timers for one handle, in CPU time of its
thread: a machine that is busy with other work does not lengthen it. What Python's collector took of it is named
beside it. SIGUSR2 begins anew.
"""

import asyncio
import gc
import os
import runpy
import signal
import sys
import time

WIDTH = 400
"""Bytes of FILE: always written whole and at once, since it may be read at any moment."""


def main() -> None:
    file, module = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    run, longest, collected, collecting = asyncio.Handle._run, 0.0, 0.0, 0.0

    def show(text: str) -> None:
        os.pwrite(file, text.encode().ljust(WIDTH)[:WIDTH], 0)

    def begin(*_: object) -> None:
        nonlocal longest
        longest = 0.0
        show("0")

    def collector(phase: str, _: object) -> None:
        nonlocal collected, collecting
        if phase == "start":
            collecting = time.thread_time()
        else:
            collected += time.thread_time() - collecting

    def measured(handle: asyncio.Handle) -> None:
        nonlocal longest, collected
        collected, began = 0.0, time.thread_time()
        run(handle)
        took = time.thread_time() - began
        if took > longest:
            longest = took
            task = getattr(getattr(handle, "_callback", None), "__self__", None)
            what = task.get_coro() if isinstance(task, asyncio.Task) else handle
            show(f"{took * 1e3:.2f} ms, {collected * 1e3:.2f} of it the collector: {what!r}")

    show("0")
    gc.callbacks.append(collector)
    asyncio.Handle._run = measured  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR2, begin)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
