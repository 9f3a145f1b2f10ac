"""A whole Kybernate as child processes on this machine: real services, a real nats-server, a kubelet that runs engines
as processes, and fake GPUs or this machine's.

``async with Stack(options) as stack`` starts everything and ends everything. What survives a killed supervisor is
cleared up by its guard (``guard.py``).
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import aiohttp

from kybernate import files
from kybernate.bus import setup
from kybernate.bus.port import BusError
from kybernate.cli.operations import in_brackets
from kybernate.dev import guard
from kybernate.dev.fakes.stubs.build import StubError, build_stubs
from kybernate.dev.stack.layout import Layout, Ports, commands, kind, lay_out, pods_of
from kybernate.dev.stack.options import Plan, StackOptions, check
from kybernate.dev.stack.pod_changes import alone
from kybernate.dev.stack.process import LineSink, SupervisedProcess
from kybernate.dev.stack.stack_file import StackFile
from kybernate.local_stack import stack_file

SERVICES = ("plugin", "gpu_manager", "checkpointer", "router")
"""The programs that calls depend on, by the names they have in a stack; beside them runs the console."""
END_SECONDS = 4.0
"""How long ending everything may take, wall time; what is left then is killed."""
RENEW_SECONDS = 10.0
"""How long a service that is started again may take to end: requests in flight at a router, wall time."""
BUS_SECONDS = 30.0
"""How long the nats-servers may take until they have all streams and buckets, wall time."""
BUS_CHECK_SECONDS = 5.0
"""Wall seconds between two checks that all streams and buckets exist: a nats-server may lose its store."""
_POLL_SECONDS = 0.1
_STOP_ORDER = (("kubelet",), (*SERVICES, "console"), ("driver",), ("nats",))
"""Kubelet first, so that engines end while the driver still knows them; the bus last."""


class StackError(Exception):
    """The stack cannot go on; the text names the process and has the end of its log."""


class NotReadyError(StackError):
    """Not every model is ready in time; the text names those that are not, and why."""

    def __init__(self, text: str, seats: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.seats = seats
        """As far as they are known."""


class Stack:
    """The processes of one stack. Raises ConfigError or OSError (port taken) before anything is started."""

    def __init__(self, options: StackOptions | None = None, *, sink: LineSink | None = None) -> None:
        self.options = options or StackOptions()
        self.plan: Plan = check(self.options)
        self.began = 0.0
        """Monotonic time at which the first process was started."""
        self._sink = sink
        self._file = StackFile()
        self._ports = Ports()
        self._guard: asyncio.subprocess.Process | None = None
        self._processes: dict[str, SupervisedProcess] = {}
        self._keeping_bus: asyncio.Task[NoReturn] | None = None
        self._layout: Layout | None = None

    # --- what others want to know ---------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Paths and ports; there from ``async with`` on."""
        if self._layout is None:
            raise StackError("this stack has not been started")
        return self._layout

    @property
    def url(self) -> str:
        """Where the router answers."""
        return self.layout.url

    @property
    def console(self) -> str:
        """Where the operators' console answers."""
        return self.layout.console

    @property
    def models(self) -> list[str]:
        """The model of every pod: each node has them all."""
        return [pod.model for pod in self.plan.pods] * self.options.nodes

    @property
    def folder(self) -> Path:
        """Sockets, seat folders, ledger, journal, logs; gone when the stack has ended."""
        return self.layout.folder

    @property
    def announced(self) -> bool:
        """Whether ``kyb status`` and the others find this stack by themselves."""
        return self._file.held

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.pid is not None}

    @property
    def starts(self) -> dict[str, int]:
        """How often each process has been started."""
        return {name: process.starts for name, process in self._processes.items()}

    def logs(self, name: str) -> str:
        """Everything that a process has written so far, over all its lives."""
        log = self._process(name).log
        return log.read_text(errors="replace") if log.exists() else ""

    # --- what tests and chaos do to it ----------------------------------------------------------------------------

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int | None:
        """Send a signal to a process; the supervisor starts it again when it ends. Returns its pid, None if down."""
        return self._process(name).send(signum)

    async def pause(self, name: str) -> None:
        """End a process (SIGTERM, then SIGKILL) and do not start it again; its files and ports stay."""
        await self._process(name).stop()

    async def resume(self, name: str) -> None:
        """Start a process that was paused, where it was."""
        self._process(name).start()

    async def pause_nats(self) -> None:
        """Take the nats-servers away; their ports and their stores stay."""
        await asyncio.gather(*(self.pause(name) for name in self.of_kind("nats")))

    async def resume_nats(self) -> None:
        """Start the nats-servers again where they were."""
        for name in self.of_kind("nats"):
            await self.resume(name)

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of the processes of these kinds: ``router`` and ``router-2``."""
        return [name for name in self._processes if kind(name) in kinds]

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def reconfigure(self) -> None:
        """Check the files of configuration and pods, and hand them to services and kubelets, which follow them.

        Raises ConfigError, ChangingError also while ``kyb add`` checks its pods with the configuration before, and
        OSError; then nothing has changed."""
        pods = self.folder / "pods.yaml"
        with alone(self.folder, wait=False):
            plan = check(replace(self.options, pods=self.options.pods or pods), self.plan.hardware)
            files.replace(self.folder / "config.yaml", plan.config_file, durable=False)
            if self.options.pods is not None and pods.read_text() != (text := pods_of(plan, self.options)):
                files.replace(pods, text, durable=False)
        self.plan = plan

    async def renew(self) -> None:
        """Start the services again, one after another, from what is installed now. Kubelet with the engines and the
        nats-servers go on."""
        for name in self.of_kind(*SERVICES, "console"):
            await self._process(name).stop(patience=RENEW_SECONDS)
            self._process(name).start()

    async def ready(
        self, timeout: float = 60.0, progress: Callable[[str], None] = lambda _: None
    ) -> list[dict[str, Any]]:
        """Wait until every pod's model has been started once and is active or parked; returns the seats.

        ``timeout``: wall seconds in which no further model became ready; engines of one group start one after another.
        ``progress`` gets a line when another one is ready. Raises StackError when a process refuses its configuration
        or router or console do not answer, NotReadyError when time is up.
        """
        unmet, most = "router and console do not answer", -1
        seats: list[dict[str, Any]] | None = None
        try:
            async with asyncio.timeout(timeout) as limit, aiohttp.ClientSession() as session:
                while True:
                    self._raise_refusal()
                    seats = await self._seats(session)
                    if seats is not None:
                        missing = self.missing(seats)
                        if missing is None:
                            return seats
                        unmet = missing
                        if (count := len(settled(seats))) > most:
                            progress(missing.partition(";")[0])
                            most = count
                            limit.reschedule(asyncio.get_running_loop().time() + timeout)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            down = [process for name, process in self._processes.items() if name not in self.pids]
            also = f"; not running: {', '.join(process.name for process in down)}" if down else ""
            tails = "".join(f"\nlog of {process.name}:\n{process.tail(8)}" for process in down)
            text = f"not ready after {timeout:g} s: {unmet}{also}{tails}"
            raise (NotReadyError(text, seats) if seats is not None else StackError(text)) from None

    async def failed(self) -> StackError:
        """Wait until a process has refused its configuration; nothing else ends a stack by itself."""
        while True:
            try:
                self._raise_refusal()
            except StackError as error:
                return error
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End everything within five seconds, in order; a second call (or cancellation) kills what is left."""
        deadline = time.monotonic() + END_SECONDS
        if self._keeping_bus is not None:
            self._keeping_bus.cancel()
        try:
            for kinds in _STOP_ORDER:
                there = [self._processes[name] for name in self.of_kind(*kinds)]
                await asyncio.gather(*(process.stop(deadline=deadline) for process in there))
        finally:
            for process in self._processes.values():
                process.abandon()
            self._file.release()
            self._ports.release()
            await self._end_guard()

    async def _start(self) -> None:
        self._layout = lay_out(self.plan, self.options, self._ports, await self._stubs())
        await self._start_guard()
        if self.options.announce:
            self._file.claim()
        slots = max(profile.slots for profile in self.plan.config.profiles)
        for name, command in commands(self.layout, self.options, slots=slots).items():
            process = SupervisedProcess(command, self.folder / "logs" / f"{name}.log", self._sink)
            process.on_start = self._write_file
            self._processes[name] = process
        self.began = time.monotonic()
        # The driver needs no bus; everything else would only find that its buckets are not there yet.
        for name in self.of_kind("nats", "driver"):
            self._processes[name].start()
        await self._set_up_bus()
        self._keeping_bus = asyncio.create_task(self._keep_bus(), name="bus init")
        for process in self._processes.values():
            process.start()

    async def _stubs(self) -> Path | None:
        """NVIDIA's libraries as stubs, where the driver is reached through them."""
        if self.options.driver != "stub":
            return None
        try:
            return await asyncio.to_thread(build_stubs)
        except StubError as error:
            raise StackError(f"--driver stub: {error}") from None

    @property
    def _copies(self) -> int | None:
        """Of each stream: one on each server of the stack; those of another NATS stay as they are."""
        return self.options.servers if self.options.nats_url is None else None

    async def _set_up_bus(self) -> None:
        """Streams and buckets, as soon as the servers answer (several: and have a leader)."""
        own = self.options.nats_url is None
        try:
            await setup.init(
                self.layout.nats_url,
                self._copies,
                credentials=self.options.init_credentials,
                wait=BUS_SECONDS if own else 0.0,
            )
        except BusError as error:
            tails = [self._processes[name].tail(5) for name in self.of_kind("nats")]
            raise StackError("\n".join(part for part in (str(error), *tails) if part)) from None

    async def _keep_bus(self) -> NoReturn:
        """Create lost streams and buckets again until cancelled; results and errors go into the log of ``nats``."""
        nats = self._processes.get("nats")
        await asyncio.sleep(BUS_CHECK_SECONDS)
        await setup.keep(
            self.layout.nats_url,
            self._copies,
            every=BUS_CHECK_SECONDS,
            credentials=self.options.init_credentials,
            report=lambda text: nats.say(f"bus init: {text}") if nats is not None else None,
            last=setup.COMPLETE,  # as it was at the start
        )

    async def _start_guard(self) -> None:
        self._guard = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(guard.__file__)), str(self.folder), str(stack_file())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _end_guard(self) -> None:
        """Its standard input ends; it clears up and ends."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(OSError):
            await self._guard.stdin.wait_closed()
        await self._guard.wait()
        self._guard = None

    def _write_file(self) -> None:
        layout = self.layout
        self._file.write(
            {
                "url": layout.url,
                "secrets": {name: str(Path(file).absolute()) for name, file in self._secrets() if file},
                "console": layout.console,
                "page": layout.page,
                "metrics": [router.metrics for router in layout.routers],
                "pid": os.getpid(),
                "folder": str(layout.folder),
                "pods": str(self.options.pods.absolute()) if self.options.pods is not None else None,
                "speed": self.options.speed,
                "driver_socket": str(layout.driver_socket) if "driver" in self._processes else None,
                "nats_url": layout.nats_url,
                "kubelet_url": layout.kubelet_url,
                "driver": self.options.driver,
                "preset": self.options.preset,
                "gpus": self.options.gpus,
                "memory": self.options.memory,
                "pids": self.pids,
                "restarts": {name: [*process.restarts] for name, process in self._processes.items()},
            }
        )

    def _secrets(self) -> list[tuple[str, str]]:
        """Settings of the router that name files."""
        given = self.options.settings.get("router", {})
        return [(name, given.get(name, "")) for name in ("KYB_TLS_CERT_FILE", "KYB_API_KEYS_FILE")]

    async def _seats(self, session: aiohttp.ClientSession) -> list[dict[str, Any]] | None:
        try:
            for router in self.layout.routers:
                async with session.get(router.readiness, timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    answer.raise_for_status()
            async with session.get(f"{self.console}/v1/seats", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                body = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        seats = body.get("seats") if isinstance(body, dict) else None
        return seats if isinstance(seats, list) else None

    def missing(self, seats: list[dict[str, Any]]) -> str | None:
        """Why these rows of ``GET /v1/seats`` are not this stack, ready; None when they are."""
        return unready(seats, len(self.models))

    def _raise_refusal(self) -> None:
        keeping = self._keeping_bus
        if keeping is not None and keeping.done() and not keeping.cancelled():
            raise StackError(f"streams and buckets are no longer checked: {keeping.exception()}")
        for process in self._processes.values():
            if process.refused:
                raise StackError(f"{process.name} refuses its configuration:\n{process.tail(8)}")

    def _process(self, name: str) -> SupervisedProcess:
        if name not in self._processes:
            known = ", ".join(self._processes) or "none yet"
            raise StackError(f"this stack has no process {name!r}; it has {known}")
        return self._processes[name]


def settled(seats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of ``GET /v1/seats`` whose models are ready."""
    return [seat for seat in seats if seat.get("started") and seat.get("state") in ("active", "parked")]


def unready(seats: list[dict[str, Any]], pods: int) -> str | None:
    """Why these rows of ``GET /v1/seats`` are not a ready stack of so many pods; None when they are."""
    owned, ready = [seat for seat in seats if seat.get("state") != "free"], settled(seats)
    if len(ready) >= pods:
        return None
    late = [f"{seat.get('model') or seat.get('seat')} is {seat.get('state')}{in_brackets(seat)}" for seat in owned]
    late = [text for text, seat in zip(late, owned, strict=True) if seat not in ready]
    return f"{len(ready)} of {pods} models are ready; {', '.join(late) or 'no seat is being started'}"
