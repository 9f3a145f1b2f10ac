"""How a process runs and ends: named jobs in one TaskGroup, cancellation as the only stop signal, one process per node.

A job runs until it is cancelled. One that returns is a bug and, like one that raises, ends the process with code 1, so
that its supervisor restarts it from a known state, also where something ignores that it was cancelled. SIGTERM and
SIGINT cancel all jobs and end with code 0. SIGHUP ends nothing: files are followed without it.
"""

import asyncio
import contextlib
import errno
import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kybernate.logs import get_logger

T = TypeVar("T")

PREDECESSOR_SECONDS = 5.0
"""How long to wait for a predecessor that is still ending."""
STOP_SECONDS = 120.0
"""How long what runs jobs may take to end once one has failed: as long as a node's pod may take at SIGTERM."""

UNUSABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
    | {errno.ENOSPC, errno.EDQUOT, errno.EIO}
)
"""Errors of files that tell about the machine and not about this program."""

A_SECOND_NODE = "for a second node on this machine give its services another KYB_NODE, KYB_RUN_DIR and KYB_STATE_DIR"


class CannotRunError(Exception):
    """This process cannot run; the text says what is wrong, where, and the remedy, so that no traceback is logged."""


class CannotListenError(CannotRunError):
    """An address is in use, or not one of this machine; the text names it, its settings and the remedy."""


@contextlib.contextmanager
def listening(host: str, port: int, prefix: str) -> Iterator[None]:
    """Wrap what binds the address of the settings ``<prefix>_HOST`` and ``<prefix>_PORT``. Raises CannotListenError.

    Without a prefix it is the address of the options ``--host`` and ``--port``.
    """
    host_name, port_name = (f"{prefix}_HOST", f"{prefix}_PORT") if prefix else ("--host", "--port")
    try:
        yield
    except OSError as error:
        why, remedy = str(error), f"correct {host_name} or {port_name}"
        if error.errno == errno.EADDRINUSE:
            why, remedy = "another process has this port", f"stop it (ss -ltnp lists it), or set {port_name}"
        raise CannotListenError(f"cannot listen on {host} port {port}: {why}; {remedy}") from error


async def run(**jobs: Coroutine[Any, Any, object]) -> None:
    """Run named jobs until one fails or SIGTERM/SIGINT arrives. Raises what the failing job raised."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not ignored: processes that are started would inherit that
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = _started(group, jobs)
            await _first(stop, tasks)
            for task in reversed(tasks):
                task.cancel()
    finally:
        if not stop.is_set():  # a second signal while resources are being closed must not cut that short
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)


def spawn(tasks: set[asyncio.Task[T]], work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Start a task beside the jobs, which is one of ``tasks`` until it ends."""
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def together(**jobs: Coroutine[Any, Any, object]) -> None:
    """Run named jobs until one fails; signals are handled elsewhere. Raises what the failing job raised."""
    async with asyncio.TaskGroup() as group:
        _started(group, jobs)


def main(serve: Callable[[], Coroutine[Any, Any, None]], *explained: type[Exception]) -> None:
    """Body of a console script: run ``serve`` and turn an unexpected end into a logged exit code 1.

    ``explained``: further errors whose text says what an operator must know.
    """
    # Imported objects live forever; without them the collector's pauses are short, which otherwise delay switches.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(serve())
        return
    except* Exception as group:
        for error in _each(group):
            if isinstance(error, (CannotRunError, *explained)):
                get_logger().error("process.cannot_run", reason=str(error))
            elif isinstance(error, OSError) and error.errno in UNUSABLE and error.filename is not None:
                get_logger().error("process.cannot_run", reason=_unusable(error.filename, error))
            else:
                get_logger().error("process.failed", error=repr(error), exc_info=error)
    sys.exit(1)  # raised among the errors above, it would be one of a group, with its traceback


@contextlib.contextmanager
def alone(run_dir: Path, name: str) -> Iterator[str]:
    """Be the only process of this kind on the node: hold ``<run_dir>/<name>.lock``, which is lost with the process.

    Yields the identity of the file, the same for all processes that ever hold this lock until the machine starts again.
    Ends the process with code 1 when another one holds it, or the folder cannot be used.
    """
    path = run_dir / f"{name}.lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        sys.stderr.write(f"kyb-{name}: {_unusable(path, error)}\n")
        raise SystemExit(1) from None
    try:
        holder = os.read(file, 32).decode().strip()
        deadline = time.monotonic() + PREDECESSOR_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"kyb-{name}: process {holder} holds {path}; one per node: stop it; {A_SECOND_NODE}\n"
                    sys.stderr.write(text)
                    raise SystemExit(1) from None
                time.sleep(0.05)
        if holder:
            get_logger().warning("lock.left_behind", file=str(path), by_pid=holder)
        with contextlib.suppress(OSError):  # on a full disk the lock does not name its holder
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        stat = os.fstat(file)
        yield f"{boot_id()}:{stat.st_dev}:{stat.st_ino}"
        os.ftruncate(file, 0)
    finally:
        os.close(file)


@contextlib.contextmanager
def alone_in_both(run_dir: Path, state_dir: Path, name: str) -> Iterator[str]:
    """``alone`` in both folders; yields the identity of the file in ``run_dir``.

    A second process with another ``run_dir`` would replay the jobs, or write the ledger, of the first one.
    """
    with contextlib.ExitStack() as stack:
        folders = dict.fromkeys((run_dir.resolve(), state_dir.resolve()))
        identities = [stack.enter_context(alone(folder, name)) for folder in folders]
        yield identities[0]


def boot_id() -> str:
    """Return the ID of this boot of the machine; empty where the kernel does not provide it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _unusable(path: object, error: OSError) -> str:
    remedy = "check the folder of this path, its permissions and its disk, or correct the setting that names it"
    return f"cannot use {path}: {error.strerror}; {remedy}"


def _each(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors of a group and of the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _each(error)
        else:
            yield error


def _started(group: asyncio.TaskGroup, jobs: dict[str, Coroutine[Any, Any, object]]) -> list[asyncio.Task[None]]:
    """Start jobs. Once one has failed, the process ends unless the present task, which runs them, ends in time."""
    loop, runner = asyncio.get_running_loop(), asyncio.current_task()

    def end(error: BaseException | None) -> None:
        if runner is not None and not runner.done():
            stayed = [task.get_name() for task in asyncio.all_tasks() if task.cancelling()]
            get_logger().error("process.stuck", tasks=stayed, error=repr(error), meaning="they were cancelled and stay")
            os._exit(1)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            loop.call_later(STOP_SECONDS, end, task.exception())

    tasks = [group.create_task(_forever(name, job), name=name) for name, job in jobs.items()]
    for task in tasks:
        task.add_done_callback(ended)
    return tasks


async def _forever(name: str, job: Coroutine[Any, Any, object]) -> None:
    await job
    raise RuntimeError(f"job {name!r} returned")


async def _first(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for the stop, or for a job that is done (the TaskGroup then cancels the others)."""
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter
