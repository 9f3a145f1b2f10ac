"""The daemon: the machine behind a unix socket. JSON lines; callers by SO_PEERCRED, deaths by pidfd."""

import asyncio
import contextlib
import functools
import glob
import json
import os
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kybernate.dev.fakes.gpu.machine import Machine
from kybernate.dev.fakes.gpu.process import Answer, Caller, CallTarget, Code, DriverCall, Effect, Kill, Tell
from kybernate.logs import get_logger

_CGROUPS = "/sys/fs/cgroup"
_UNIFIED = (_CGROUPS, f"{_CGROUPS}/unified")
"""Where v2 is mounted, alone or beside v1."""
_MAX_DEPTH = 8
"""No container lies deeper."""
_FREEZER_FUNCTIONS = frozenset({"do_freezer_trap", "get_signal"})
"""The trap of v2 and the function that compilers put it into; a process stopped there is recognised by its state."""


@dataclass(frozen=True, slots=True)
class ProcStat:
    """Parts of /proc/<pid>/stat."""

    state: str
    start: int
    """Start time in clock ticks after boot: with the pid it names a process for good."""


def read_stat(pid: int) -> ProcStat | None:
    """None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content[content.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return ProcStat(fields[0].decode(), int(fields[19]))


def read_target(pid: int) -> CallTarget:
    """What a checkpoint call has to know about its target."""
    stat = read_stat(pid)
    if stat is None:
        return CallTarget(exists=False)
    stopped = stat.state in "Tt" or (stat.state in "SD" and is_frozen(pid))
    return CallTarget(zombie=stat.state in "ZX", stopped=stopped)


def is_frozen(pid: int) -> bool:
    """Whether the cgroup freezer holds it, for then /proc shows it asleep (v2: S, v1: D) and not as stopped.

    Asked are the cgroup's own files (v2: ``frozen 1`` in cgroup.events, v1: freezer.state) where this mount namespace
    shows them, else (v2 only) the kernel function that its main thread waits in, where the kernel tells that.
    """
    return _is_frozen_cgroup(pid) or _read(f"/proc/{pid}/wchan").strip() in _FREEZER_FUNCTIONS


def _is_frozen_cgroup(pid: int) -> bool:
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" and any(
            "frozen 1" in _read(f"{cgroup_folder(root, path)}/cgroup.events") for root in _UNIFIED
        ):
            return True
        freezer = f"{cgroup_folder(f'{_CGROUPS}/freezer', path)}/freezer.state"
        if "freezer" in controllers.split(",") and _read(freezer).strip() == "FROZEN":
            return True
    return False


@functools.lru_cache(maxsize=1024)
def cgroup_folder(root: str, path: str) -> str:
    """The folder of a control group. From a control group namespace of one's own, as containers of version 2 have, a
    path begins with ``/..`` and does not name the levels in between: the rest is looked for below ``root``."""
    rest = re.sub(r"^(/\.\.)+", "", path).lstrip("/")
    if not path.startswith("/..") or not rest:
        return root + path
    patterns = (f"{root}/{'*/' * depth}{glob.escape(rest)}" for depth in range(_MAX_DEPTH))
    return next((found for pattern in patterns for found in glob.iglob(pattern)), root + path)


def _read(path: str) -> str:
    """The file's text; empty when it is not there, or not for us."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end as the kernel knows it; 0 if it lives in a pid namespace that we cannot see."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None: it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


_POLL_SECONDS = 0.005
"""How often a stopped process with waiting calls is looked at; there is no event for SIGCONT."""
_LINE_LIMIT = 1 << 20


@dataclass(slots=True)
class _Tracked:
    """An attached process until it has ended and its connections are closed."""

    caller: Caller
    pidfd: int
    connections: set["_Connection"]
    ended: bool = False


class Daemon:
    """Feeds the machine and does what it says."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._log = get_logger()
        self._tracked: dict[int, _Tracked] = {}
        self._connections: set[_Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._violations_logged = 0

    def connected(self, connection: "_Connection") -> None:
        """A client is there."""
        self._connections.add(connection)

    def disconnected(self, connection: "_Connection") -> None:
        """A client's connection is closed."""
        self._connections.discard(connection)
        tracked = self._tracked.get(connection.pid)
        if tracked is not None:
            tracked.connections.discard(connection)
            self._forget_if_gone(tracked)

    def handle(self, connection: "_Connection", line: bytes) -> None:
        """One line from a client."""
        try:
            message = json.loads(line)
            number, name = message.pop("id"), message.pop("call")
        except (ValueError, KeyError, TypeError, AttributeError):
            text = 'not a call; write {"id": 1, "call": "devices"} and a line feed'
            connection.send({"id": None, "code": 1, "name": Code.INVALID_VALUE.name, "text": text})
            return
        call = DriverCall((connection, number), name, message)
        pid = message.get("pid")
        target = read_target(pid) if isinstance(pid, int) and name != "inject" else CallTarget()
        if name == "attach" and not self._track(connection):
            return
        caller = tracked.caller if (tracked := self._tracked.get(connection.pid)) else Caller(connection.pid, 0)
        self._do(self._machine.call(call, caller, time.monotonic(), target))

    def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in tuple(self._connections):
            connection.close()
        for tracked in self._tracked.values():
            self._stop_watching(tracked)
        self._tracked.clear()

    def _track(self, connection: "_Connection") -> bool:
        """Watch the caller's life; False: it has ended already."""
        pid = connection.pid
        tracked = self._tracked.get(pid)
        stat = read_stat(pid)
        if tracked is not None and stat is not None and tracked.caller.start != stat.start:
            self._forget(tracked)  # the pid came back before its former owner's last connection was seen closed
            tracked = None
        if tracked is None:
            pidfd = None if stat is None else open_pidfd(pid)
            if stat is None or pidfd is None:
                connection.close()
                return False
            tracked = self._tracked[pid] = _Tracked(Caller(pid, stat.start), pidfd, set())
            self._loop.add_reader(pidfd, self._ended, tracked)
        tracked.connections.add(connection)
        return True

    def _ended(self, tracked: _Tracked) -> None:
        tracked.ended = True
        self._loop.remove_reader(tracked.pidfd)
        self._forget_if_gone(tracked)

    def _forget_if_gone(self, tracked: _Tracked) -> None:
        """A process counts until it has ended and its connections are closed, as with /dev/nvidia*."""
        if tracked.ended and not tracked.connections:
            self._forget(tracked)

    def _forget(self, tracked: _Tracked) -> None:
        self._stop_watching(tracked)
        del self._tracked[tracked.caller.pid]
        self._do(self._machine.gone(tracked.caller.pid, time.monotonic()))

    def _stop_watching(self, tracked: _Tracked) -> None:
        self._loop.remove_reader(tracked.pidfd)
        os.close(tracked.pidfd)

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Answer((_Connection() as connection, number), code, result):
                    connection.send({"id": number, "code": int(code), "name": code.name, **result})
                case Tell(pid, state):
                    tracked = self._tracked.get(pid)
                    for connection in tracked.connections if tracked else ():
                        connection.send({"event": "state", "state": state.value})
                case Kill(pid, number):
                    self._kill(pid, number)
        self._say_violations()
        self._arm()

    def _kill(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            self._log.error("process.kill_refused", pid=pid, remedy="run the fake driver as the engines' user or root")

    def _say_violations(self) -> None:
        new = self._machine.violations.count - self._violations_logged
        if new:
            self._violations_logged = self._machine.violations.count
            for one in list(self._machine.violations.recent)[-new:]:
                self._log.warning("driver.violation", kind=one.kind, seat=one.seat, pid=one.pid, text=one.text)

    def _arm(self) -> None:
        """One timer for whatever comes first: an operation's end, or the next look at stopped processes."""
        watched = self._machine.watched()
        when = self._machine.next_time()
        if any(self._machine.processes[pid].stopped for pid in watched):
            poll = time.monotonic() + _POLL_SECONDS
            when = poll if when is None else min(when, poll)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        effects: list[Effect] = []
        for pid in self._machine.watched():
            effects += self._machine.observe(pid, stopped=read_target(pid).stopped, now=time.monotonic())
        self._do([*effects, *self._machine.tick(time.monotonic())])


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._buffer = b""
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.pid = peer_pid(transport.get_extra_info("socket"))
        self._daemon.connected(self)
        if self.pid == 0:
            text = "the caller's pid namespace is not visible here; let daemon and callers share one (pid: host)"
            self.send({"id": None, "code": int(Code.OPERATING_SYSTEM), "name": "OPERATING_SYSTEM", "text": text})
            self.close()

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._daemon.handle(self, line)
        if len(self._buffer) > _LINE_LIMIT:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._daemon.disconnected(self)

    def send(self, message: dict[str, Any]) -> None:
        if not self._transport.is_closing():
            self._transport.write(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def listening(machine: Machine, path: Path, mode: int | None = None) -> AsyncIterator[Daemon]:
    """Serve the machine at ``path``, which is removed at the end. Raises OSError if another daemon serves there.

    ``mode``: permissions of the socket; None: as the umask has it.
    """
    _remove_stale(path)
    daemon = Daemon(machine)
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(daemon), str(path), backlog=1024)
    try:
        if mode is not None:
            os.chmod(path, mode)
        yield daemon
    finally:
        server.close()
        daemon.close()
        _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _remove_stale(path: Path) -> None:
    """A socket without a listener is left over from a daemon that was killed."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(f"another fake GPU driver serves {path}; stop it or give another --socket")
