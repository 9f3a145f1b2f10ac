"""The checkpointer's side of ``services/checkpointer/helper/template.py``, the process of which helpers are forked."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.checkpointer.helper_connection import HelperConnection

STDERR = 2


@dataclass
class HelperTemplate:
    """The process of which helpers are forked: started with the first one, and again after it ended."""

    command: Sequence[str]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _process: asyncio.subprocess.Process | None = None
    _control: socket.socket | None = None

    async def fork(self, limit: int) -> HelperConnection:
        """The connection to a new helper, whose first line is its pid. ``limit``: bytes of a line. Raises OSError."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            with theirs:
                socket.send_fds(await self._running(), [b"f"], [theirs.fileno()])
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_unix_connection(lambda: HelperConnection(limit), sock=ours)
            stack.pop_all()
            return connection

    def reap(self) -> None:
        """Have the helpers reaped that ended; until then, or until the next fork, their pids are not reused."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(b"r")

    async def close(self) -> None:
        """Kill it, if it runs. Its helpers live on until their connections close."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = self._control = None

    async def _running(self) -> socket.socket:
        async with self._lock:
            if self._control is None or _closed(self._control):
                await self._close()
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                self._control = ours
                with theirs:  # output of libraries is for the log
                    self._process = await asyncio.create_subprocess_exec(
                        *self.command, stdin=theirs.fileno(), stdout=STDERR, start_new_session=True
                    )
            return self._control


def _closed(control: socket.socket) -> bool:
    """Whether the template ended: it closes its end then, and sends nothing before."""
    try:
        return not control.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
