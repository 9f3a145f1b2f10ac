"""Helper processes, one per group: started ahead, given one call at a time, killed when a call overruns its deadline.

Each is noted in a file while it lives, so that a restarted checkpointer can first end those of a killed one: a driver
call of the past must not come true after the replay has looked at the states.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kybernate.logs import get_logger
from services.checkpointer.processes import Identity, alive, identify, send

ANSWER_BYTES = 1 << 22
"""No answer is longer; a node with thousands of GPU processes fits."""


class HelperHungError(Exception):
    """A call overran its deadline; the helper was killed and the next call gets a new one."""


class HelperDiedError(Exception):
    """The helper ended during a call, or cannot be started."""


@dataclass
class _Helper:
    """One helper process and the pipe to it."""

    process: asyncio.subprocess.Process
    note: Path
    last_id: int = 0

    async def call(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One call, without a deadline of its own. Raises HelperDiedError."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.last_id += 1
        line = json.dumps({"id": self.last_id, "verb": verb, **arguments}).encode() + b"\n"
        try:
            self.process.stdin.write(line)
            await self.process.stdin.drain()
            answer = await self.process.stdout.readline()
        except ConnectionError as error:
            raise HelperDiedError(f"the helper ended before {verb}: {error}") from error
        if not answer.endswith(b"\n"):
            raise HelperDiedError(f"the helper ended during {verb}")
        reply: dict[str, Any] = json.loads(answer)
        return reply

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                # Not process.kill(): it polls, and may reap the child before asyncio's watcher does.
                os.kill(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.wait_closed()
        await self.process.stdout.read()  # to its end, which closes the pipe
        self.note.unlink(missing_ok=True)


@dataclass
class _Line:
    """What one group has: its helper, if any, and the turn to use it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    helper: _Helper | None = None


@dataclass
class HelperPool:
    """All helpers of this checkpointer. ``async with`` ends what an earlier one left, and ends its own at exit."""

    command: Sequence[str]
    folder: Path
    """Where living helpers are noted."""
    _lines: dict[str, _Line] = field(default_factory=dict)
    _spares: list[_Helper] = field(default_factory=list)
    _filling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        await self._end_leftovers()
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._filling
        helpers = [line.helper for line in self._lines.values() if line.helper is not None]
        await asyncio.gather(*(helper.end() for helper in [*helpers, *self._spares]))
        self._lines.clear()
        self._spares.clear()

    async def call(self, key: str, verb: str, *, deadline: float, **arguments: Any) -> dict[str, Any]:
        """One driver call through the helper of ``key``, after the calls that came before it.

        ``deadline``: wall seconds for this call alone. Raises HelperHungError or HelperDiedError.
        """
        line = self._lines.setdefault(key, _Line())
        async with line.turn:
            if line.helper is None:
                line.helper = await self._take()
            finished = False
            try:
                async with asyncio.timeout(deadline):
                    reply = await line.helper.call(verb, arguments)
                finished = True
                return reply
            except TimeoutError:
                raise HelperHungError(f"{verb} did not end within {deadline:.1f} s; its helper was killed") from None
            finally:
                if not finished:  # overrun, death or cancellation: the pipe is not in step any more
                    helper, line.helper = line.helper, None
                    await asyncio.shield(helper.end())

    async def warm(self, key: str) -> None:
        """Have a helper ready for ``key``."""
        line = self._lines.setdefault(key, _Line())
        async with line.turn:
            if line.helper is None:
                line.helper = await self._take()

    async def close(self, key: str) -> None:
        """End the helper of ``key``, if there is one."""
        line = self._lines.pop(key, None)
        if line is not None and line.helper is not None:
            await line.helper.end()

    async def _take(self) -> _Helper:
        """A spare if there is one, and start the next spare meanwhile."""
        while self._spares:
            helper = self._spares.pop()
            if helper.process.returncode is None:
                self._fill()
                return helper
            await helper.end()
        helper = await self._start()
        self._fill()
        return helper

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._start_spare(), name="spare-helper")

    async def _start_spare(self) -> None:
        if not self._spares:
            with contextlib.suppress(HelperDiedError):  # the next call tries again and reports it
                self._spares.append(await self._start())

    async def _start(self) -> _Helper:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=ANSWER_BYTES,
            )
        except OSError as error:
            raise HelperDiedError(f"no helper: {self.command[0]}: {error.strerror}") from error
        known = identify(process.pid)
        note = self.folder / f"{process.pid}-{known.start if known else 0}"
        note.touch()
        return _Helper(process, note)

    async def _end_leftovers(self) -> None:
        """End the helpers of a checkpointer that was killed; they are gone when this returns."""
        for note in self.folder.iterdir():
            pid, _, start = note.name.partition("-")
            leftover = Identity(pid=int(pid), start=int(start))
            if send(leftover, signal.SIGKILL):
                get_logger().warning("helper.leftover_ended", pid=leftover.pid)
            while alive(leftover):  # noqa: ASYNC110 - a process that is not our child has no event to wait for
                await asyncio.sleep(0.005)
            note.unlink(missing_ok=True)
