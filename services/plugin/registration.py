"""Registration with kubelet, renewed after every failure: one socket and one registration per resource.

Kubelet dials back inside Register, so the socket is served first. It drops a plugin whose ListAndWatch ends, and every
plugin when it restarts; both require a new registration with a new server on a new socket. The old server is stopped
first, since a gRPC server that stops late would unlink its successor's socket of the same name.
"""

import asyncio
import contextlib
import functools
import os
import socket
import stat
import struct
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio

from kybernate.backoff import Backoff
from kybernate.clock import to_beat, wait_for
from kybernate.envelope import slug
from kybernate.health import Health
from kybernate.logs import OnceLogger, get_logger
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from services.plugin.servicer import OPTIONS, NodeSeats, SeatPlugin

PREFIX = "kyb-"
WATCH_SECONDS = 0.25
"""Interval at which kubelet's socket and the plugin's socket are checked."""
REGISTER_SECONDS = 15.0
"""Longer than kubelet's time-out of 10 s for its dial-back."""
FIRST_LIST_SECONDS = 10.0
RETRY_SECONDS = 0.1, 5.0
LASTS_SECONDS = 5.0
"""A registration that ends earlier counts as a failed attempt: the next pause is longer."""
MAX_SOCKET_PATH = 107

Identity = tuple[int, ...]
"""Device, inode and ctime of a socket: a restarted kubelet may reuse the inode, but not the ctime."""


class NotRegisteredError(Exception):
    """A registration failed or ended; the text is the reason."""


@dataclass
class Registration:
    """The registration of one resource; ``run`` keeps it."""

    node: NodeSeats
    resource: str
    folder: Path
    """Kubelet's device plugin folder."""
    refused: Callable[[], str | None] = lambda: None
    """Returns why this node's seats must not be offered now; called before each registration. An existing one stays:
    ending it would remove the start gate of containers that restart."""
    unmet: str | None = "not yet registered with kubelet"
    """Why it is not registered; None when it is."""
    _tried: Identity | None = None
    """Identity of kubelet's socket at the last attempt."""

    async def run(self) -> NoReturn:
        """Register, and again whenever the registration fails or ends."""
        backoff, failed = Backoff(*RETRY_SECONDS), OnceLogger("plugin.registration_failed")
        while True:
            began = time.monotonic()
            try:
                await self._once()
            except NotRegisteredError as error:
                if self.unmet is None:
                    failed.clear()
                failed.log(resource=self.resource, reason=str(error))
                self.unmet = f"{self.resource}: {error}"
            if time.monotonic() - began > LASTS_SECONDS:
                backoff.reset()
            await self._back_off(backoff.pause())

    async def _back_off(self, seconds: float) -> None:
        """Wait, but return at once when kubelet restarts: a new kubelet has not refused anything yet."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if _identity(self.folder / "kubelet.sock") not in (None, self._tried):
                return
            await asyncio.sleep(min(left, to_beat(WATCH_SECONDS)))

    async def _once(self) -> NoReturn:
        """Register once and wait until the registration ends. Raises NotRegisteredError."""
        kubelet = self.folder / "kubelet.sock"
        self._tried = _identity(kubelet)
        reason = self.refused()
        if reason is not None:
            raise NotRegisteredError(reason)
        while (identity := _identity(kubelet)) is None:
            self.unmet = f"{self.resource}: kubelet is not there (no {kubelet})"
            await asyncio.sleep(WATCH_SECONDS)
        self._tried = identity
        own = self.folder / f"{PREFIX}{slug(self.resource.rpartition('/')[2])}-{uuid.uuid4().hex[:8]}.sock"
        if len(os.fsencode(own)) > MAX_SOCKET_PATH:
            raise NotRegisteredError(f"{own} is too long for a socket; use a shorter KYB_KUBELET_DIR")
        plugin = SeatPlugin(self.node, self.resource)
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(plugin, server)
        try:
            server.add_insecure_port(f"unix:{own}")
            await server.start()
            await _while_unchanged(self._register(plugin, kubelet, own.name), kubelet, identity, own)
            self.unmet = None
            get_logger().info("plugin.registered", resource=self.resource, endpoint=own.name)
            await _while_unchanged(plugin.ended.wait(), kubelet, identity, own)
            raise NotRegisteredError("kubelet ended the list of seats")
        except RuntimeError as error:  # grpc.aio could not bind
            raise NotRegisteredError(f"cannot serve {own}: {error}") from error
        finally:
            await server.stop(grace=0)
            own.unlink(missing_ok=True)

    async def _register(self, plugin: SeatPlugin, kubelet: Path, endpoint: str) -> None:
        """Call Register, and wait until kubelet opens ListAndWatch: it counts the seats from the first list on."""
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=self.resource, options=OPTIONS)
        # A local subchannel pool: after one refused connection, a shared one fails the next channel without connecting.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=options) as channel:
            stub: rpc.RegistrationAsyncStub = rpc.RegistrationStub(channel)
            try:
                await stub.Register(request, timeout=REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise NotRegisteredError(f"kubelet refused ({error.code().name}): {error.details()}") from error
        if not await wait_for(plugin.streaming, FIRST_LIST_SECONDS):
            raise NotRegisteredError("kubelet accepted, but did not ask for the list of seats")


async def _while_unchanged(step: Coroutine[Any, Any, object], kubelet: Path, identity: Identity, own: Path) -> None:
    """Await a step. Raises NotRegisteredError once kubelet's socket is replaced or the plugin's socket is gone."""
    task = asyncio.create_task(step)
    try:
        while not task.done():
            if _identity(kubelet) != identity:
                raise NotRegisteredError("kubelet restarted")
            if _identity(own) is None:
                raise NotRegisteredError("the plugin's socket was removed")
            await asyncio.wait((task,), timeout=to_beat(WATCH_SECONDS))
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Registrations:
    """The registrations of a node: one task per resource, so that one fails or ends without affecting the others."""

    def __init__(self, make: Callable[[str], Registration], health: Health) -> None:
        self._make, self._health = make, health
        self._wanted: tuple[str, ...] = ()
        self._changed = asyncio.Event()

    def follow(self, resources: Iterable[str]) -> None:
        """Register exactly these resources from now on; ``run`` does it."""
        self._wanted = tuple(resources)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Start and end registrations as ``follow`` changes them."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                await self._changed.wait()
                self._changed.clear()
                for resource in tasks.keys() - set(self._wanted):
                    get_logger().info("plugin.withdrawn", resource=resource)
                    tasks.pop(resource).cancel()
                    self._health.conditions.pop(resource, None)
                for resource in self._wanted:
                    if resource not in tasks:
                        registration = self._make(resource)
                        self._health.conditions[resource] = functools.partial(getattr, registration, "unmet")
                        tasks[resource] = group.create_task(registration.run(), name=f"register {resource}")


def remove_stale(folder: Path) -> list[str]:
    """Remove stale sockets (without a listener) of earlier plugins. Blocking.

    Returns the sockets with a listener, with its process ID where known: another plugin serves this node.
    """
    live = []
    for path in sorted(folder.glob(f"{PREFIX}*.sock")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and (owner := _owner(path)) is not None:
                live.append(f"{path}{owner}")
    return live


def _owner(path: Path) -> str | None:
    """Return the listener's process for messages; None if there was none, and then the socket is removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            get_logger().info("plugin.stale_socket_removed", socket=path.name)
            return None
        pid = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
        return f" (process {pid})" if pid else ""


def _identity(path: Path) -> Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
