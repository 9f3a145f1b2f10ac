"""``KYB_WORKERS``: starts the workers of a router, again when they end, and replaces them without a refused connection.

The listening sockets belong to this process. So the queue of a worker's socket lives on while the worker is replaced,
and connections wait there. A queue that ends with the last descriptor of its socket would reset them, unless the kernel
moves them to another socket of the port (``net.ipv4.tcp_migrate_req``, off by default).
"""

import asyncio
import contextlib
import signal
import socket
import sys
from typing import NoReturn

from kybernate import lifecycle
from kybernate.logs import get_logger
from services.router.settings import RouterSettings
from services.router.worker import DRAIN, READY

BACKLOG = 1024
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""Between the end of a worker and the next one; connections wait as long."""
STEADY_SECONDS = 60.0
"""A worker that lived longer is started again after the first pause."""
SILENT_SECONDS = 60.0
"""A worker that reports nothing for so long hangs, and is killed."""
READY_SECONDS = 60.0
"""How long a successor may take until it is ready; then its predecessor stays."""
STOP_SECONDS = 20.0
"""How long workers may take to stop; then they are killed."""


class WorkerFailedError(Exception):
    """A worker did not stop as it should have."""


class Worker:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self._process, self._link = process, link
        self._ready = asyncio.Event()
        self.ended = asyncio.create_task(self._listen())
        """Done with the exit code."""

    async def _listen(self) -> int:
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        try:
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    received = await reader.read(64)
                if not received:
                    break
                if READY in received:
                    self._ready.set()
        except TimeoutError:
            get_logger().error("worker.hangs", worker_pid=self._process.pid, silent_seconds=SILENT_SECONDS)
            self._process.kill()
        except OSError:
            pass  # it has ended
        finally:
            self._writer.close()
        return await self._process.wait()

    async def becomes_ready(self) -> bool:
        """Return whether the worker is ready in time."""
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((ready, self.ended), timeout=READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self._ready.is_set() and not self.ended.done()

    def drain(self) -> None:
        """Have the worker end after its requests."""
        self._writer.write(DRAIN)

    async def stop(self) -> int:
        """Stop the worker; return its exit code."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait((self.ended,), timeout=STOP_SECONDS)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return await self.ended


class Slot:
    """The sockets of one worker, and the worker that serves them now."""

    def __init__(self, settings: RouterSettings, number: int, api: socket.socket, operations: socket.socket) -> None:
        self._settings, self._number, self._sockets = settings, number, (api, operations)
        self._letters = 0
        self._starting = asyncio.Lock()
        self._workers: set[Worker] = set()
        self._worker: Worker | None = None

    async def keep(self) -> NoReturn:
        """Start the worker, again when it has ended."""
        clock, pause = asyncio.get_running_loop().time, 0.0
        while True:
            async with self._starting:
                if self._worker is None or self._worker.ended.done():
                    self._worker = await self._start()
            worker, began = self._worker, clock()
            code = await asyncio.shield(worker.ended)
            self._workers.discard(worker)
            if self._worker is worker:
                pause = FIRST_PAUSE_SECONDS if clock() - began > STEADY_SECONDS or not pause else 2 * pause
                pause = min(pause, LONGEST_PAUSE_SECONDS)
                get_logger().error("worker.ended", worker=self._number, code=code, again_in_seconds=pause)
                await asyncio.sleep(pause)

    async def replace(self) -> bool:
        """Start a successor; once it is ready, end the worker after its requests. False: it did not become ready."""
        async with self._starting:
            self._letters += 1  # both are on the bus for a while, so they need two names
            successor = await self._start()
            if not await successor.becomes_ready():
                get_logger().error("worker.not_ready", worker=self._number, meaning="its predecessor stays")
                self._letters += 1
                await successor.stop()
                self._workers.discard(successor)
                return False
            before, self._worker = self._worker, successor
        if before is not None:
            if not before.ended.done():
                before.drain()
            await asyncio.shield(before.ended)
        return True

    async def stop(self) -> list[int]:
        """Stop the processes; return their exit codes."""
        return await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def _start(self) -> Worker:
        ours, theirs = socket.socketpair()
        descriptors = [sock.fileno() for sock in (*self._sockets, theirs)]
        name = f"{self._settings.instance}-{self._number}{'ab'[self._letters % 2]}"
        command = (sys.executable, "-m", "services.router.worker", str(self._number), name, *map(str, descriptors))
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=descriptors)
        finally:
            theirs.close()
        get_logger().info("worker.started", worker=self._number, name=name, worker_pid=process.pid)
        worker = Worker(process, ours)
        self._workers.add(worker)
        return worker


async def supervise(settings: RouterSettings) -> None:
    """Run the workers until SIGTERM or SIGINT. Raises OSError when a port is taken, WorkerFailedError."""
    with contextlib.ExitStack() as sockets:
        api = [sockets.enter_context(sock) for sock in _listening(settings)]
        slots = [
            Slot(
                settings,
                number,
                sock,
                sockets.enter_context(_listen(settings.health_host, settings.health_port + number)),
            )
            for number, sock in enumerate(api)
        ]
        try:
            keep = {f"worker {number}": slot.keep() for number, slot in enumerate(slots)}
            await lifecycle.run(**keep, replace=_replace(slots))
        finally:
            codes = [code for found in await asyncio.gather(*(slot.stop() for slot in slots)) for code in found]
        if any(codes):
            raise WorkerFailedError(f"exit codes of the workers: {codes}")


async def _replace(slots: list[Slot]) -> NoReturn:
    """Replace all workers at each SIGHUP."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    while True:
        await asked.wait()
        asked.clear()
        get_logger().info("workers.replacing")
        replaced = await asyncio.gather(*(slot.replace() for slot in slots))
        get_logger().info("workers.replaced", replaced=sum(replaced), workers=len(slots))


def _listening(settings: RouterSettings) -> list[socket.socket]:
    """Return a socket of the API's port for each worker; the kernel spreads connections over them."""
    with socket.socket(_family(settings.host)) as probe:  # sockets that share a port do not notice another router
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((settings.host, settings.port))
        port = probe.getsockname()[1]
    return [_listen(settings.host, port, shared=True) for _ in range(settings.workers)]


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    return socket.create_server((host, port), family=_family(host), backlog=BACKLOG, reuse_port=shared)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
