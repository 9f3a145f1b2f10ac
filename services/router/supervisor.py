"""``KYB_WORKERS``: starts the workers of a router, again when they end, and replaces them without a refused connection.

The listening sockets belong to this process. So the queue of a worker's socket lives on while the worker is replaced,
and connections wait there. A queue that ends with the last descriptor of its socket would reset them, unless the kernel
moves them to another socket of the port (``net.ipv4.tcp_migrate_req``, off by default).
"""

import asyncio
import contextlib
import math
import signal
import socket
import sys
from typing import Any, NoReturn

from kybernate import lifecycle
from kybernate.logs import get_logger
from services.router.settings import RouterSettings
from services.router.worker import DRAIN, READY, REFUSED

BACKLOG = 1024
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0
"""Between the end of a worker and the next one; connections wait as long."""
STEADY_SECONDS = 60.0
"""A worker that lived longer is started again after the first pause."""
SILENT_SECONDS = 60
"""A worker that reports nothing for so long hangs, and is killed. Counted one by one: a pause of the machine is one."""
READY_SECONDS = 60.0
"""How long a successor may take until it is ready; then its predecessor stays."""
STOP_SECONDS = 20.0
"""How long workers may take to stop; then they are killed."""
PATIENCE_SECONDS = 3.0
"""After it a worker without a predecessor takes connections though it is not ready, so that its health can be asked."""
NAMES = "abcdefgh"
"""The last letters of the names of one worker's processes: it has one, and others that still end."""
COMMAND = (sys.executable, "-m", "services.router.worker")


class WorkerFailedError(lifecycle.CannotRunError):
    """A worker did not stop as it should have."""


class Worker:
    """One process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self.name, self._process, self._link = name, process, link
        self.began = asyncio.get_running_loop().time()
        self.ready = asyncio.Event()
        self.ended = asyncio.create_task(self._listen())
        """Done with the exit code."""

    async def _listen(self) -> int:
        reader, self._writer = await asyncio.open_connection(sock=self._link)
        silent = 0
        try:
            while silent < SILENT_SECONDS:
                try:
                    async with asyncio.timeout(1.0):
                        received = await reader.read(64)
                except TimeoutError:
                    silent += 1
                    continue
                silent = 0
                if not received:
                    break
                if READY in received:
                    self.ready.set()
            else:
                get_logger().error("worker.hangs", worker_pid=self._process.pid, silent_seconds=silent)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        except OSError:
            pass  # it has ended
        finally:
            self._writer.close()
        return await self._process.wait()

    async def becomes_ready(self) -> bool:
        """Return whether the worker is ready in time."""
        ready = asyncio.create_task(self.ready.wait())
        await asyncio.wait((ready, self.ended), timeout=READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self.ready.is_set() and not self.ended.done()

    def drain(self) -> None:
        """Have the worker end after its requests."""
        self._writer.write(DRAIN)

    async def stop(self) -> int:
        """Stop the worker; return its exit code, 0 where SIGTERM found it before or after it handles signals."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait((self.ended,), timeout=STOP_SECONDS)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        code = await self.ended
        return 0 if code == -signal.SIGTERM else code


class Slot:
    """The sockets of one worker, and the worker that serves them now."""

    def __init__(self, settings: RouterSettings, number: int, api: socket.socket, operations: socket.socket) -> None:
        self._settings, self._number, self._sockets = settings, number, (api, operations)
        self._letter = NAMES[0]
        self._starting = asyncio.Lock()
        self._workers: set[Worker] = set()
        self._worker: Worker | None = None
        self._replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._served = False

    async def keep(self) -> NoReturn:
        """Start the worker, again when it has ended. Raises WorkerFailedError when it refuses its configuration."""
        clock, pause = asyncio.get_running_loop().time, 0.0
        while True:
            began = clock()
            try:
                async with self._starting:
                    if self._worker is None or self._worker.ended.done():
                        self._worker = await self._start()
                why, began = await self._ends(self._worker), self._worker.began
            except OSError as error:
                why = {"error": str(error)}
            pause = FIRST_PAUSE_SECONDS if clock() - began > STEADY_SECONDS or not pause else 2 * pause
            pause = min(pause, LONGEST_PAUSE_SECONDS)
            get_logger().error("worker.ended", worker=self._number, **why, again_in_seconds=pause)
            await asyncio.sleep(pause)

    async def _ends(self, worker: Worker) -> dict[str, Any]:
        """Return why the slot has no worker: ``worker``, or its successor by then, has ended."""
        while not worker.ended.done():
            await asyncio.wait((worker.ended, self._replaced), return_when=asyncio.FIRST_COMPLETED)
            worker = self._worker or worker
        code = worker.ended.result()
        self._served |= worker.ready.is_set()
        if code == REFUSED and not self._served:
            raise WorkerFailedError(f"worker {self._number} refuses its configuration; its message is above")
        return {"code": code}

    async def replace(self) -> bool:
        """Start a successor; once it is ready, have the worker end after its requests. False: the worker stays."""
        async with self._starting:
            try:
                successor = await self._start()
            except OSError as error:
                get_logger().error("worker.not_started", worker=self._number, error=str(error))
                return False
            if not await successor.becomes_ready():
                get_logger().error("worker.not_ready", worker=self._number, meaning="its predecessor stays")
                await successor.stop()
                return False
            before, self._worker = self._worker, successor
            self._letter, self._served = successor.name[-1], True
            self._replaced.set_result(None)
            self._replaced = asyncio.get_running_loop().create_future()
        if before is not None and not before.ended.done():
            before.drain()
        return True

    async def stop(self) -> list[int]:
        """Stop the processes; return their exit codes."""
        return await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def _start(self) -> Worker:
        """Start a process. Raises OSError. Names differ, since all of them are on the bus."""
        used = {worker.name[-1] for worker in self._workers}
        letter = next((letter for letter in self._letter + NAMES if letter not in used), None)
        if letter is None:
            raise BlockingIOError(f"{len(used)} processes of this worker still end")
        name = f"{self._settings.instance}-{self._number}{letter}"
        ours, theirs = socket.socketpair()
        descriptors = [sock.fileno() for sock in (*self._sockets, theirs)]
        alone = self._worker is None or self._worker.ended.done()
        patience = PATIENCE_SECONDS if alone else math.inf
        command = (*COMMAND, str(self._number), name, str(patience), *map(str, descriptors))
        try:
            process = await asyncio.create_subprocess_exec(*command, pass_fds=descriptors)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        get_logger().info("worker.started", worker=self._number, name=name, worker_pid=process.pid)
        worker = Worker(name, process, ours)
        self._workers.add(worker)
        worker.ended.add_done_callback(lambda _: self._workers.discard(worker))
        return worker


async def supervise(settings: RouterSettings) -> None:
    """Run the workers until SIGTERM or SIGINT. Raises CannotListenError, WorkerFailedError."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    with contextlib.ExitStack() as sockets:
        api = [sockets.enter_context(sock) for sock in _listening(settings)]
        slots = [
            Slot(
                settings,
                number,
                sock,
                sockets.enter_context(_listen(settings.health_host, settings.health_port + number, "KYB_HEALTH")),
            )
            for number, sock in enumerate(api)
        ]
        try:
            keep = {f"worker {number}": slot.keep() for number, slot in enumerate(slots)}
            await lifecycle.run(**keep, replace=_replace(slots, asked))
        finally:
            codes = [code for found in await asyncio.gather(*(slot.stop() for slot in slots)) for code in found]
        if any(codes):
            raise WorkerFailedError(f"exit codes of the workers: {codes}")


async def _replace(slots: list[Slot], asked: asyncio.Event) -> NoReturn:
    """Replace all workers each time that this is asked, by SIGHUP."""
    while True:
        await asked.wait()
        asked.clear()
        get_logger().info("workers.replacing")
        replaced = await asyncio.gather(*(slot.replace() for slot in slots))
        get_logger().info("workers.replaced", replaced=sum(replaced), workers=len(slots))


def _listening(settings: RouterSettings) -> list[socket.socket]:
    """Return a socket of the API's port for each worker; the kernel spreads connections over them."""
    with socket.socket(_family(settings.host)) as probe, lifecycle.listening(settings.host, settings.port, "KYB"):
        # Sockets that share a port do not notice another router.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((settings.host, settings.port))
        port = probe.getsockname()[1]
    return [_listen(settings.host, port, "KYB", shared=True) for _ in range(settings.workers)]


def _listen(host: str, port: int, prefix: str, *, shared: bool = False) -> socket.socket:
    with lifecycle.listening(host, port, prefix):
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG, reuse_port=shared)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
