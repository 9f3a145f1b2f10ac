"""A thread that does blocking work for the event loop, one piece after the other."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


class WorkThread:
    """Begun with its first work. An executor of one thread does the same for twice the CPU time: a lock, a condition
    and two chained futures per call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._works: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._under_way: dict[asyncio.Future[Any], float] = {}

    @property
    def since(self) -> float | None:
        """When the oldest work was given that is waited for; monotonic seconds."""
        return min(self._under_way.values(), default=None)

    def do(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        """Have it done, in order; the future gets what it returns or raises. It is done also if no caller waits.

        Raises RuntimeError as ``put`` does.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[R] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            del self._under_way[done]
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, raised = None, None
            try:
                result = work()
            except Exception as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no caller waits
                loop.call_soon_threadsafe(settle, result, raised)

        self.put(run)
        self._under_way[done] = time.monotonic()  # before it is settled, which this event loop does
        return done

    def put(self, work: Callable[[], object]) -> None:
        """Have it done, in order, from any thread; no caller learns of its end, and it must not raise.

        Raises RuntimeError after ``close``, or if the system starts no more threads; then it is not done.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"thread {self._name} is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._works.put(work)

    def close(self) -> None:
        """Wait until all is done, and end the thread; it takes no more work. Blocking."""
        with self._lock:
            self._closed, thread, self._thread = True, self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work()
