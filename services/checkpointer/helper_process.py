"""One helper process and the pipe to it."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.checkpointer.processes import Identity, alive, identify, send

ANSWER_BYTES = 1 << 22
"""No answer is longer; a node with thousands of GPU processes fits."""
POLL_SECONDS = 0.005


class HelperHungError(Exception):
    """A call overran its deadline; the helper was killed and the next call gets a new one."""


class HelperDiedError(Exception):
    """The helper ended during a call, or cannot be started."""


def sigkill(process: Identity) -> None:
    """SIGKILL, if this very process still exists."""
    send(process, signal.SIGKILL)


@dataclass(frozen=True)
class Leftover:
    """A helper of an earlier checkpointer, as its note tells."""

    who: Identity
    key: str
    """Whose it was; empty if nobody's yet."""
    note: Path

    @classmethod
    def read(cls, folder: Path) -> "list[Leftover]":
        """All that are noted in ``folder``; files of other names are somebody else's."""
        found = []
        for note in folder.iterdir():
            pid, _, start = note.name.partition("-")
            if pid.isdecimal() and start.isdecimal():
                found.append(cls(Identity(pid=int(pid), start=int(start)), note.read_text(), note))
        return found

    async def gone(self) -> None:
        """Wait until it has ended; then take the note away."""
        while alive(self.who):  # noqa: ASYNC110 - a process that is not our child has no event to wait for
            await asyncio.sleep(POLL_SECONDS)
        self.note.unlink(missing_ok=True)


@dataclass
class HelperProcess:
    """A helper that runs; ``note`` says so to a checkpointer that comes after us."""

    process: asyncio.subprocess.Process
    who: Identity
    note: Path
    last_id: int = 0

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path) -> "HelperProcess":
        """Start one and note it in ``folder``. Raises HelperDiedError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=ANSWER_BYTES,
            )
        except OSError as error:
            raise HelperDiedError(f"no helper: {command[0]}: {error.strerror}") from error
        who = identify(process.pid) or Identity(pid=process.pid, start=0)  # 0: it ended already
        note = folder / f"{who.pid}-{who.start}"
        note.touch()
        return cls(process, who, note)

    @property
    def ended(self) -> bool:
        """Whether it is known to be gone."""
        return self.process.returncode is not None

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
        except ValueError as error:
            raise HelperDiedError(f"the helper answered {verb} with more than {ANSWER_BYTES} bytes") from error
        if not answer.endswith(b"\n"):
            raise HelperDiedError(f"the helper ended during {verb}")
        reply = self._reply(answer)
        if reply is None:
            raise HelperDiedError(f"the helper answered {verb} with {answer[:200]!r}; it was ended")
        return reply

    def _reply(self, answer: bytes) -> dict[str, Any] | None:
        """None: this is not the answer to the last call."""
        try:
            reply = json.loads(answer)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) and reply.get("id") == self.last_id else None

    async def gone(self) -> None:
        """Wait until it has ended; then close the pipes and take the note away."""
        await self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.wait_closed()
        await self.process.stdout.read()  # to its end, which closes the pipe
        self.note.unlink(missing_ok=True)
