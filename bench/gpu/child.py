"""Child processes of the bench with JSON lines as protocol; every request has a deadline."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any

LINE_BYTES = 1 << 24


class ChildError(Exception):
    """A child ended, reported a failure, or did not reply in time; the text ends with its last output."""


class Child:
    """One child process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, errors: IO[bytes]) -> None:
        self._process, self._name, self._errors = process, name, errors

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until it ended."""
        return self._process.returncode is None

    def send(self, op: str, **arguments: Any) -> None:
        """Send a request without waiting for the reply. Raises ChildError if it ended."""
        assert self._process.stdin is not None
        if not self.running:
            raise ChildError(self._gone())
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")

    async def answer(self, seconds: float) -> dict[str, Any]:
        """The next reply. Raises ChildError, or TimeoutError after the deadline."""
        assert self._process.stdout is not None
        async with asyncio.timeout(seconds):
            line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            raise ChildError(self._gone())
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            raise ChildError(f"{self._name}: {reply['failed']}")
        return reply

    async def ask(self, op: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.send(op, **arguments)
        return await self.answer(seconds)

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to the whole process group; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                os.killpg(self.pid, signum)

    async def kill(self) -> None:
        """SIGKILL, and wait."""
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def end(self, seconds: float) -> None:
        """Let it exit, which is safer for a process that was restored once; after a deadline SIGKILL."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self.signal(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        await self.kill()
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.wait_closed()
        await self._process.stdout.read()
        self._errors.close()

    def _gone(self) -> str:
        self._errors.seek(0)
        last = self._errors.read()[-800:].decode(errors="replace").strip()
        return f"{self._name} (pid {self.pid}) ended with code {self._process.returncode}: {last or 'no output'}"


@asynccontextmanager
async def child(
    module: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    end_seconds: float = 30.0,
    prefix: Sequence[str] = (),
) -> AsyncIterator[Child]:
    """``python -m module`` in a new session; ended with the block. ``env`` is added to this environment; ``prefix``: a
    program that becomes it."""
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-m", module, *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            limit=LINE_BYTES,
        )
        started = Child(process, module, errors)
        try:
            yield started
        finally:
            await started.end(end_seconds)
