"""Helper processes, one per group: started ahead, one call at a time, killed when a call overruns its deadline.

A file names each living helper, so that a restarted checkpointer can first end the helpers of a killed one: a driver
call begun before the restart must not take effect after the replay has read the states. A process inside the driver may
survive even SIGKILL (state D). Then it counts as stuck, and its group gets a new helper.
"""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from kybernate.clock import within
from kybernate.lifecycle import cancelled, spawn
from kybernate.logs import get_logger
from services.checkpointer.processes import ProcessIdentity, alive, ended, identify, send

STDERR = 2
ANSWER_BYTES = 1 << 22
"""Maximum length of a reply; enough for thousands of GPU processes."""
MOST_STUCK = 3
"""Maximum number of stuck helpers per key; then calls of that key fail at once."""


class HelperCall(NamedTuple):
    """One call. ``deadline``: wall seconds from the answer to the one before it."""

    verb: str
    deadline: float
    arguments: dict[str, Any]


class HelperHungError(Exception):
    """A call overran its deadline; the helper was killed and the next call gets a new one."""

    def __init__(self, text: str, verb: str = "") -> None:
        """``verb``: of the call; empty if no helper could be had."""
        super().__init__(text)
        self.verb = verb


class HelperDiedError(Exception):
    """The helper ended during a call, or cannot be started."""


def sigkill(process: ProcessIdentity) -> None:
    """SIGKILL, if this very process still exists."""
    send(process, signal.SIGKILL)


@dataclass
class HelperProcess:
    """A running helper; ``note`` is the file that names it for the next checkpointer."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    who: ProcessIdentity
    note: Path
    last_id: int = 0

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path) -> "HelperProcess":
        """Start a helper and write its note. Raises HelperDiedError."""
        process, ours = _spawn([*command])
        who = identify(process.pid) or ProcessIdentity(pid=process.pid, start=0)  # 0: it ended already
        note = folder / f"{who.pid}-{who.start}"
        note.touch()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=ANSWER_BYTES)
        except BaseException:  # cancelled; it has been asked for nothing, and ends at once
            ours.close()
            process.kill()
            process.wait()
            note.unlink()
            raise
        return cls(process, reader, writer, who, note)

    @property
    def ended(self) -> bool:
        """True if it ended."""
        return not alive(self.who)

    async def ask(self, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
        """Send calls; the answers in their order. A socket takes far more than all calls of a step.

        Raises HelperHungError or HelperDiedError for the first that fails.
        """
        first, replies = self.last_id + 1, list[dict[str, Any]]()
        self.last_id += len(calls)
        asked = [json.dumps({"id": first + i, "verb": call.verb, **call.arguments}) for i, call in enumerate(calls)]
        self.writer.write("".join(f"{line}\n" for line in asked).encode())
        for number, (verb, deadline, _) in enumerate(calls, first):
            try:
                async with within(deadline):
                    replies.append(_reply(await self.reader.readline(), number, verb))
            except TimeoutError:
                raise HelperHungError(f"{verb} did not end within {deadline:.1f} s", verb) from None
            except (ConnectionError, ValueError) as error:  # ValueError: more than ANSWER_BYTES
                raise HelperDiedError(f"the helper ended during {verb}: {error}") from error
        return replies

    async def gone(self) -> None:
        """Wait until it has ended, then close the connection and remove the note."""
        await ended(self.who)
        self.process.wait()  # it is a zombie now
        self.writer.close()
        self.note.unlink(missing_ok=True)


@dataclass
class _Line:
    """The helper of one group, if any, and the lock that serializes its calls."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    helper: HelperProcess | None = None


@dataclass
class HelperPool:
    """All helpers of this checkpointer. Entering ends the helpers of an earlier one; leaving ends its own."""

    command: Sequence[str]
    """Starts a helper on the socket that is its stdin."""
    folder: Path
    """Folder of the notes."""
    start_seconds: float = 60.0
    """Deadline (wall) for a new helper to initialize the driver; cuInit takes seconds on large machines."""
    kill_seconds: float = 5.0
    """A killed helper that still exists after this time (wall) counts as stuck."""
    kill: Callable[[ProcessIdentity], None] = sigkill
    hangs: int = 0
    """Calls that overran their deadline since the start."""
    stuck: dict[ProcessIdentity, str] = field(default_factory=dict)
    """Helpers that were killed and do not end, with their keys; the empty one stands for spares."""
    _lines: dict[str, _Line] = field(default_factory=dict)
    _spares: list[HelperProcess] = field(default_factory=list)
    _filling: asyncio.Task[None] | None = None
    _ending: set[asyncio.Task[str]] = field(default_factory=set)
    _watching: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(*self._end_leftovers())
        self._fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(*([] if self._filling is None else [self._filling]))
        helpers = [(line.helper, key) for key, line in self._lines.items() if line.helper is not None]
        helpers += [(spare, "") for spare in self._spares]
        self._lines.clear()
        self._spares.clear()
        await asyncio.gather(*self._ending, *(self._end(helper, key) for helper, key in helpers))
        await cancelled(*self._watching)

    @property
    def pids(self) -> frozenset[int]:
        """Pids of its helpers, which the driver lists as users of every GPU."""
        lines = (line.helper for line in self._lines.values())
        return frozenset(helper.who.pid for helper in (*lines, *self._spares) if helper is not None)

    async def call(self, key: str, verb: str, *, deadline: float, **arguments: Any) -> dict[str, Any]:
        """One driver call through the helper of ``key``, in order of arrival.

        ``deadline``: wall seconds for this call alone. Raises HelperHungError or HelperDiedError.
        """
        return (await self.calls(key, [HelperCall(verb, deadline, arguments)]))[0]

    async def calls(self, key: str, calls: Sequence[HelperCall]) -> list[dict[str, Any]]:
        """Readings that belong together, sent at once; each has its own deadline. The answers in their order. Raises
        HelperHungError or HelperDiedError for the first that fails, and then none of them counts."""
        line = self._lines.setdefault(key, _Line())
        async with line.lock:
            helper = line.helper = line.helper or await self._take(key)
            try:
                return await helper.ask(calls)
            except HelperHungError as error:
                line.helper = None
                self.hangs += 1
                ending = await self._end(helper, key)
                raise HelperHungError(f"{error}; {ending}", error.verb) from None
            except BaseException:  # death or cancellation: replies would no longer match calls
                line.helper = None
                await self._end(helper, key)
                raise

    async def warm(self, key: str) -> None:
        """Have a helper ready for ``key``."""
        line = self._lines.setdefault(key, _Line())
        async with line.lock:
            line.helper = line.helper or await self._take(key)

    async def close(self, key: str) -> None:
        """End the helper of ``key``, if there is one, after the calls that arrived earlier."""
        line = self._lines.get(key)
        if line is None:
            return
        async with line.lock:  # the line stays: calls may wait for its lock
            helper, line.helper = line.helper, None
            if helper is not None:
                await self._end(helper, key)

    async def _take(self, key: str) -> HelperProcess:
        """Take the spare, or start a helper; then start the next spare in the background."""
        self._refuse_more(key, f"no more helpers for {key}")
        while self._spares:
            helper = self._spares.pop()
            if not helper.ended:
                break
            await self._end(helper, "")
        else:
            helper = await self._start()
        self._fill()
        helper.note.write_text(key)
        return helper

    def _refuse_more(self, key: str, what: str) -> None:
        stuck = [_hangs(who) for who, of in self.stuck.items() if of == key]
        if len(stuck) >= MOST_STUCK:
            raise HelperHungError(f"{what}: {'; '.join(stuck)}; this node needs a restart")

    def _fill(self) -> None:
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._start_spare(), name="spare-helper")

    async def _start_spare(self) -> None:
        if not self._spares:
            with contextlib.suppress(HelperDiedError, HelperHungError):  # the next call tries again and reports it
                self._spares.append(await self._start())

    async def _start(self) -> HelperProcess:
        """A helper that has tried to initialize the driver; if that failed, its calls report why."""
        self._refuse_more("", "no more helpers: new ones hang while they initialize the driver")
        helper = await HelperProcess.start(self.command, self.folder)
        try:
            await helper.ask([HelperCall("init", self.start_seconds, {})])
        except HelperHungError:
            self.hangs += 1
            ending = await self._end(helper, "")
            text = f"a new helper could not initialize the driver within {self.start_seconds:.0f} s; {ending}"
            raise HelperHungError(text) from None
        except BaseException:
            await self._end(helper, "")
            raise
        return helper

    async def _end(self, helper: HelperProcess, key: str) -> str:
        """Kill it and wait up to ``kill_seconds``, also if the caller is cancelled. Returns the result as text."""
        ending = self._kill_and_wait(helper.who, key, helper.gone())
        return await asyncio.shield(spawn(self._ending, ending, f"end-helper-{helper.who.pid}"))

    async def _kill_and_wait(self, who: ProcessIdentity, key: str, end: Coroutine[Any, Any, None]) -> str:
        """It is gone or marked as stuck when this returns; the text says which. ``end``: waits until it is gone."""
        self.kill(who)
        gone = asyncio.create_task(end, name=f"gone-helper-{who.pid}")
        await asyncio.wait([gone], timeout=self.kill_seconds)
        if gone.done():
            await gone
            return "its helper was killed"
        self.stuck[who] = key  # until it ends; its note stays for the next checkpointer
        get_logger().error("helper.stuck", pid=who.pid, key=key)

        async def forget() -> None:
            await gone
            del self.stuck[who]
            get_logger().warning("helper.stuck_ended", pid=who.pid, key=key)

        spawn(self._watching, forget(), "stuck-helper")
        return _hangs(who)

    def _end_leftovers(self) -> Iterator[Coroutine[Any, Any, str]]:
        """End the helpers of a killed checkpointer that files are named after; other files are ignored."""
        for note in self.folder.iterdir():
            pid, _, start = note.name.partition("-")
            if not (pid.isdecimal() and start.isdecimal()):
                continue
            who = ProcessIdentity(pid=int(pid), start=int(start))
            if alive(who):
                get_logger().warning("helper.leftover_ended", pid=who.pid)
            yield self._kill_and_wait(who, note.read_text(), _gone(who, partial(note.unlink, missing_ok=True)))


def _hangs(who: ProcessIdentity) -> str:
    return f"helper {who.pid} was killed but does not end: it hangs inside the driver"


async def _gone(who: ProcessIdentity, forget: Callable[[], None]) -> None:
    await ended(who)
    forget()


def _spawn(command: list[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process and this side of the socket that is its stdin. Raises HelperDiedError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:  # output of libraries is for the log
            return subprocess.Popen(command, stdin=theirs.fileno(), stdout=STDERR, start_new_session=True), ours
        except OSError as error:
            ours.close()
            raise HelperDiedError(f"no helper: {command[0]}: {error.strerror}") from error


def _reply(line: bytes, number: int, verb: str) -> dict[str, Any]:
    """The parsed reply. Raises HelperDiedError if it does not belong to the call."""
    if not line.endswith(b"\n"):
        raise HelperDiedError(f"the helper ended during {verb}")
    with contextlib.suppress(ValueError):
        reply = json.loads(line)
        if isinstance(reply, dict) and reply.get("id") == number:
            return reply
    raise HelperDiedError(f"the helper answered {verb} with {line[:200]!r}; it was ended")
