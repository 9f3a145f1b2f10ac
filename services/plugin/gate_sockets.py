"""The start gate for kyb-run, which starts an engine again in a container that runs: a socket in each seat folder.

Lines of text, since kyb-run reads no JSON. It sends ``start``; the answer is ``set NAME=VALUE`` for each variable that
this start has in another way than its container, ``within MS``, which is its end, counted from the question on, and
``start``; or ``wait`` and why there is no ticket yet. A process that can connect has the seat folder mounted: it is in
the seat's container, and can start only what that may.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kybernate.lifecycle import cancelled, spawn
from kybernate.logs import get_logger
from services.plugin.core.devices import NotGrantedError
from services.plugin.gate import expires
from services.plugin.servicer import NodeSeats

SOCKET = "gate.sock"
QUESTION_SECONDS = 5.0
"""Wall: how long a caller may take to ask."""
PACE_SECONDS = 0.05
"""Wall: between two connections of one container. What calls without end waits in its own backlog."""


@dataclass
class GateSockets:
    """One listener per seat."""

    node: NodeSeats
    _listeners: dict[str, socket.socket] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _callers: dict[str, asyncio.StreamWriter] = field(default_factory=dict)
    """By seat: the last one. It ends the one before: an engine must not use up the descriptors of the plugin."""

    async def open(self, seat_ids: Iterable[str]) -> None:
        """Listen in the folders of these seats, where it does not yet. One that cannot be made is logged, and tried
        again with the next change of the node; kyb-run waits for it, and says so in the log of its container."""
        for seat_id in seat_ids:
            if seat_id in self._listeners:
                continue
            try:
                listener = await asyncio.to_thread(_bound, self.node.gate.seats_dir / seat_id)
            except OSError as error:
                get_logger().warning("gate.socket_failed", seat=seat_id, reason=str(error))
                continue
            self._listeners[seat_id] = listener
            spawn(self._tasks, self._listen(seat_id, listener))

    async def close(self) -> None:
        """Stop listening; calls that wait are cut off, and asked again of the next plugin."""
        await cancelled(*self._tasks)
        for listener in self._listeners.values():
            listener.close()
        for writer in self._callers.values():
            writer.close()
        self._listeners.clear()

    async def _listen(self, seat_id: str, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):  # too many open files: asked again
                caller, _ = await asyncio.get_running_loop().sock_accept(listener)
                reader, writer = await asyncio.open_unix_connection(sock=caller)
                if (before := self._callers.get(seat_id)) is not None:
                    before.close()
                self._callers[seat_id] = writer
                spawn(self._tasks, self._serve(seat_id, reader, writer))
            await asyncio.sleep(PACE_SECONDS)

    async def _serve(self, seat_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(QUESTION_SECONDS):
                    question = await reader.readline()
                answer = await self._answered(seat_id, reader) if question == b"start\n" else "wait ask for start\n"
                writer.write(answer.encode())
                await writer.drain()
        finally:
            writer.close()

    async def _answered(self, seat_id: str, reader: asyncio.StreamReader) -> str:
        """The answer. A caller that goes away gives up its call: kubelet's next one must not wait behind it."""
        call = asyncio.ensure_future(self._answer(seat_id))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((call, gone), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return ""
            return call.result()
        finally:
            await cancelled(call, gone)

    async def _answer(self, seat_id: str) -> str:
        node, asked = self.node, time.monotonic()
        try:
            ticket = await node.gate.wait(seat_id, inside=True, closed=node.closed(seat_id))
            group = str(ticket.get("group", ""))
            if (why := node.missing(seat_id, group)) is not None:
                return _waits(why)
            variables = node.offer.moved_envs(seat_id, group, node.reach(seat_id))
        except NotGrantedError as refusal:
            return _waits(str(refusal))
        end = expires(ticket)
        within = "" if end is None else f"within {int((end - asked) * 1000)}\n"
        return "".join(f"set {name}={value}\n" for name, value in variables.items()) + f"{within}start\n"


def _waits(why: str) -> str:
    return f"wait {' '.join(why.split())}\n"


def _bound(folder: Path) -> socket.socket:
    """A socket that listens in a seat folder and to which an engine of any user may connect. Raises OSError."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:  # through the open folder: its path may be longer than an address of a socket
        (folder / SOCKET).unlink(missing_ok=True)
        listener.bind(f"/proc/self/fd/{opened}/{SOCKET}")
        (folder / SOCKET).chmod(0o666)
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(opened)
    return listener
