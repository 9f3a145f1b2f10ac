"""How a process runs and ends: named jobs in one TaskGroup, cancellation as the only stop signal.

A job runs until it is cancelled. One that returns is a bug and, like one that raises, ends the process with code 1,
so that whoever supervises it restarts it from a known state. SIGTERM and SIGINT cancel all jobs and end with code 0.
"""

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from kybernate.logs import get_logger


class JobReturnedError(Exception):
    """A job ended by itself; jobs run until they are cancelled."""


async def run(**jobs: Coroutine[Any, Any, object]) -> None:
    """Run named jobs until one fails or SIGTERM/SIGINT arrives. Raises what the failing job raised."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_forever(name, job), name=name) for name, job in jobs.items()]
            await _first(stop, tasks)
            for task in reversed(tasks):
                task.cancel()
    finally:
        if not stop.is_set():  # a second signal while resources are being closed must not cut that short
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)


async def together(**jobs: Coroutine[Any, Any, object]) -> None:
    """Run named jobs until one fails; signals are somebody else's. Raises what the failing job raised."""
    async with asyncio.TaskGroup() as group:
        for name, job in jobs.items():
            group.create_task(_forever(name, job), name=name)


def main(serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Body of a console script: run ``serve`` and turn an unexpected end into a logged exit code 1."""
    # What was imported stays; without it the collector's pauses, which show in the tail of every switch, are short.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve())
    except* Exception as group:
        for error in _each(group):
            get_logger().error("process.failed", error=repr(error), exc_info=error)
        sys.exit(1)


def _each(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors of a group and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _each(error)
        else:
            yield error


async def _forever(name: str, job: Coroutine[Any, Any, object]) -> None:
    await job
    raise JobReturnedError(f"job {name!r} returned")


async def _first(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Until asked to stop, or until a job is done (the TaskGroup then cancels the rest by itself)."""
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter
