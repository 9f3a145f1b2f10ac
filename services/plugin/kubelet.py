"""Being registered with kubelet, whatever happens to it: one socket and one registration per resource.

Kubelet dials back inside Register, so the socket is served first. It forgets a plugin whose ListAndWatch ends, and
everybody when it restarts; both mean: begin again, with a new server on a new socket. The old server is stopped
before, since a gRPC server that stops late would unlink its successor's socket of the same name.
"""

import asyncio
import contextlib
import os
import random
import socket
import stat
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio

from kybernate.logs import OnceLogger, get_logger
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from kybernate.slugs import slug
from services.plugin.servicer import OPTIONS, Node, SeatPlugin

PREFIX = "kyb-"
WATCH_SECONDS = 0.25
"""How often kubelet's socket and the own one are looked at."""
REGISTER_SECONDS = 15.0
"""Kubelet itself gives the dial-back 10 s."""
FIRST_LIST_SECONDS = 10.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 5.0
MAX_SOCKET_PATH = 107


class NotRegisteredError(Exception):
    """A registration did not come about, or ended; the text says why."""


@dataclass
class Registration:
    """One resource at one kubelet."""

    node: Node
    resource: str
    folder: Path
    """Kubelet's device plugin folder."""
    refused: Callable[[], str | None] = lambda: None
    """Why this node's seats must not be offered now; asked before each registration. A standing one stays: ending it
    would take containers that restart their start gate."""
    unmet: str | None = "not yet registered with kubelet"
    """Why it is not registered; None when it is."""
    _tried: tuple[int, ...] | None = None
    """The kubelet of the last try."""

    def why_not(self) -> str | None:
        """Why it is not registered; None when it is."""
        return self.unmet

    async def keep(self) -> NoReturn:
        """Register and register again, for ever."""
        pause, failed = FIRST_RETRY_SECONDS, OnceLogger("plugin.not_registered")
        while True:
            began = time.monotonic()
            try:
                await self._once()
            except NotRegisteredError as error:
                if self.unmet is None:
                    failed.clear()
                failed.log(resource=self.resource, reason=str(error))
                self.unmet = f"{self.resource}: {error}"
            lasted = time.monotonic() - began
            pause = FIRST_RETRY_SECONDS if lasted > LAST_RETRY_SECONDS else min(LAST_RETRY_SECONDS, pause * 2)
            await self._rest(pause * random.uniform(0.5, 1.0))

    async def _rest(self, seconds: float) -> None:
        """Back off, but never from a kubelet that was not tried yet: it restarted, which is nobody's failure."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if _identity(self.folder / "kubelet.sock") not in (None, self._tried):
                return
            await asyncio.sleep(min(left, WATCH_SECONDS))

    async def _once(self) -> NoReturn:
        """One registration from its beginning to its end. Raises NotRegisteredError."""
        kubelet = self.folder / "kubelet.sock"
        self._tried = _identity(kubelet)
        reason = self.refused()
        if reason is not None:
            raise NotRegisteredError(reason)
        identity = self._tried = await self._kubelet_there(kubelet)
        own = self.folder / f"{PREFIX}{slug(self.resource.rpartition('/')[2])}-{uuid.uuid4().hex[:8]}.sock"
        if len(os.fsencode(own)) > MAX_SOCKET_PATH:
            raise NotRegisteredError(f"{own} is too long for a socket; use a shorter KYB_DEVICE_PLUGIN_DIR")
        plugin = SeatPlugin(self.node, self.resource)
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(plugin, server)
        try:
            server.add_insecure_port(f"unix:{own}")
            await server.start()
            await self._join(plugin, kubelet, identity, own)
            self.unmet = None
            get_logger().info("plugin.registered", resource=self.resource, endpoint=own.name)
            await self._until_over(plugin, kubelet, identity, own)
        except RuntimeError as error:  # grpc.aio could not bind
            raise NotRegisteredError(f"cannot serve {own}: {error}") from error
        finally:
            await server.stop(grace=0)
            own.unlink(missing_ok=True)

    async def _kubelet_there(self, kubelet: Path) -> tuple[int, ...]:
        while (identity := _identity(kubelet)) is None:
            self.unmet = f"{self.resource}: kubelet is not there (no {kubelet})"
            await asyncio.sleep(WATCH_SECONDS)
        return identity

    async def _join(self, plugin: SeatPlugin, kubelet: Path, identity: tuple[int, ...], own: Path) -> None:
        """Register and be listened to, unless kubelet goes away meanwhile: its time-outs are long."""
        joining = asyncio.create_task(self._register(plugin, kubelet, own.name))
        try:
            while not (await asyncio.wait((joining,), timeout=WATCH_SECONDS))[0]:
                _check_unchanged(kubelet, identity, own)
            await joining
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    async def _register(self, plugin: SeatPlugin, kubelet: Path, endpoint: str) -> None:
        """Register, and wait for kubelet to listen. Raises NotRegisteredError."""
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=self.resource, options=OPTIONS)
        # A subchannel pool of its own: a socket that refused once must not make the next channel fail unseen.
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=options) as channel:
            stub: rpc.RegistrationAsyncStub = rpc.RegistrationStub(channel)
            try:
                await stub.Register(request, timeout=REGISTER_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise NotRegisteredError(f"kubelet refused ({error.code().name}): {error.details()}") from error
        await self._listened_to(plugin)

    async def _listened_to(self, plugin: SeatPlugin) -> None:
        """Kubelet counts the seats only from the first list on."""
        try:
            async with asyncio.timeout(FIRST_LIST_SECONDS):
                await plugin.streaming.wait()
        except TimeoutError:
            raise NotRegisteredError("kubelet accepted, but did not ask for the list of seats") from None

    async def _until_over(self, plugin: SeatPlugin, kubelet: Path, identity: tuple[int, ...], own: Path) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await plugin.ended.wait()
                raise NotRegisteredError("kubelet ended the list of seats")
            except TimeoutError:
                _check_unchanged(kubelet, identity, own)


def _check_unchanged(kubelet: Path, identity: tuple[int, ...], own: Path) -> None:
    """Raise NotRegisteredError when kubelet's socket is another one, or the own socket is gone."""
    if _identity(kubelet) != identity:
        raise NotRegisteredError("kubelet restarted")
    if _identity(own) is None:
        raise NotRegisteredError("somebody removed the plugin's socket")


def remove_stale(folder: Path) -> list[str]:
    """Remove sockets that earlier plugins left behind: those on which nobody listens. Blocking.

    Returns those on which somebody does, with the process if it can be told: another plugin serves this node.
    """
    live = []
    for path in sorted(folder.glob(f"{PREFIX}*.sock")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and (owner := _owner(path)) is not None:
                live.append(f"{path}{owner}")
    return live


def _owner(path: Path) -> str | None:
    """Who listens there; None when nobody did, and then the socket is gone."""
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


def _identity(path: Path) -> tuple[int, ...] | None:
    """Which file this is: a restarted kubelet may get the same inode again, but not the same ctime."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
