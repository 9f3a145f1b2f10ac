"""One supervised process: started, logged, restarted with backoff, ended."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.dev.fakes.kubelet import launch

CANNOT_START = 126
"""Counts as the exit code of a process that could not be made."""
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 5.0
SETTLED_SECONDS = 10.0
"""A process that lived this long has proven itself: its next restart begins with the first backoff again."""
MOST_RESTARTS = 20
"""Restarts that are remembered."""
BAD_CONFIGURATION = 2
"""Exit code of a process that refuses its settings; a restart cannot help."""


_LAUNCH = str(Path(launch.__file__))

LineSink = Callable[[str, str], None]
"""Called with (process name, line without its end)."""


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """How to start a process."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """The whole environment."""
    stop_seconds: float = 3.0
    """After SIGTERM, how long until SIGKILL."""


class SupervisedProcess:
    """A command that is kept running until it is stopped. All times are wall time."""

    def __init__(self, command: ProcessCommand, log: Path, sink: LineSink | None = None) -> None:
        self.command = command
        self.log = log
        self.starts = 0
        """How often it has been started."""
        self.restarts: deque[float] = deque(maxlen=MOST_RESTARTS)
        """When it was started again by itself, unix seconds."""
        self.exits: list[int] = []
        """Exit codes so far; negative: ended by that signal."""
        self.refused = False
        """It ended with the code for bad configuration and is not started again."""
        self.on_start: Callable[[], None] | None = None
        self._sink = sink
        self._child: asyncio.subprocess.Process | None = None
        self._wanted = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its name in logs and in the stack's calls."""
        return self.command.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Begin to keep it running; starting again what was stopped is allowed."""
        if self._task is None or self._task.done():
            self._wanted = True
            self._task = asyncio.create_task(self._supervise(), name=f"process {self.name}")

    def send(self, signum: int) -> int | None:
        """Send a signal to it; returns its pid, or None when it is not running. It is restarted if that ends it."""
        if self._child is None or self._child.returncode is not None:
            return None
        with contextlib.suppress(ProcessLookupError):
            # Not Popen.send_signal: before Python 3.13 its poll() can reap the child before asyncio's watcher does,
            # which then warns on stderr and reports code 255.
            os.kill(self._child.pid, signum)
        return self._child.pid

    async def stop(self, *, patience: float | None = None, deadline: float | None = None) -> None:
        """End it: SIGTERM, then SIGKILL after its time, ``patience`` (seconds) in place of that, or at ``deadline``
        (monotonic seconds), and keep it ended."""
        self._wanted = False
        task, self._task = self._task, None
        if task is None:
            return
        patience = self.command.stop_seconds if patience is None else patience
        if deadline is not None:
            patience = min(patience, max(0.0, deadline - time.monotonic()))
        try:
            self.send(signal.SIGTERM)
            self.send(signal.SIGCONT)  # a stopped process cannot end
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            self.say(f"did not end within {patience:.1f} s; killed")
        finally:
            self.send(signal.SIGKILL)
            await self._ended.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def abandon(self) -> None:
        """Kill it without waiting, and keep it ended."""
        self._wanted = False
        self.send(signal.SIGKILL)
        if self._task is not None:
            self._task.cancel()

    def tail(self, lines: int = 20) -> str:
        """The last lines that it wrote."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def say(self, text: str) -> None:
        """A line of the supervisor's own in this process's log."""
        with contextlib.suppress(OSError), self.log.open("a") as file:  # a full disk
            file.write(f"[supervisor] {text}\n")
        if self._sink is not None:
            self._sink(self.name, f"[supervisor] {text}")

    async def _supervise(self) -> None:
        # The pipe outlives each child, since a grandchild may go on writing after its parent is gone.
        read_end, write_end = os.pipe()
        copying = asyncio.create_task(self._copy(read_end))
        try:
            await self._keep_running(write_end)
        finally:
            os.close(write_end)
            await asyncio.wait([copying], timeout=0.2)
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)

    async def _keep_running(self, output: int) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while self._wanted:
            began = time.monotonic()
            try:
                code = await self._once(output)
            except OSError as error:  # no memory or no process number left, say: it may be there in a moment
                self.say(f"cannot be started: {error}")
                code = CANNOT_START
            self.exits.append(code)
            if not self._wanted:
                return
            self.restarts.append(time.time())
            if code == BAD_CONFIGURATION:
                self.refused = True
                self.say(f"ended with code {code}: it refuses its configuration; not started again")
                return
            if time.monotonic() - began >= SETTLED_SECONDS:
                backoff = FIRST_BACKOFF_SECONDS
            self.say(f"ended {_how(code)}; started again in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, LONGEST_BACKOFF_SECONDS)

    async def _once(self, output: int) -> int:
        """Run it to its end; returns the exit code."""
        self._ended.clear()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), "0"),
                *self.command.argv,
                env=dict(self.command.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends them in order
            )
            if not self._wanted:  # stopped while it was being started
                self.send(signal.SIGTERM)
            self.starts += 1
            if self.on_start is not None:
                with contextlib.suppress(OSError):  # the stack's file is for others; the process runs all the same
                    self.on_start()
            return await self._child.wait()
        finally:
            self._child = None
            self._ended.set()

    async def _copy(self, read_end: int) -> None:
        """Append what it writes to its log file, and hand on each line."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        rest = b""
        try:
            with self.log.open("ab", buffering=0) as file:
                while chunk := await reader.read(65536):
                    with contextlib.suppress(OSError):  # a full disk: an unread pipe would stop the process
                        file.write(chunk)
                    *lines, rest = (rest + chunk).split(b"\n")
                    if self._sink is not None:
                        for line in lines:
                            self._sink(self.name, line.decode(errors="replace"))
        finally:
            transport.close()


def _how(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"
