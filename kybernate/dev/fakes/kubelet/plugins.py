"""Kubelet's side of the device plugin wire: Registration is served, and every plugin that registers is dialled back."""

import asyncio
import contextlib
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kybernate.dev.fakes.kubelet.device_manager import DeviceManager, PluginCallError
from kybernate.logs import get_logger
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc

VERSION = "v1beta1"
_CLOSING = "rpc error: code = Canceled desc = grpc: the client connection is closing"
DIAL_SECONDS = 10.0
PRE_START_SECONDS = 30.0
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a path that failed once must not poison the next plugin on it
    ("grpc.default_authority", "localhost"),  # as grpc-go says it since Kubernetes 1.26
)


DEPRECATION = "DEPRECATION"
"""A plain file that kubelet keeps in the folder; plugins must not trip over it."""


@dataclass(frozen=True, slots=True)
class Call:
    """What kubelet asked of a plugin, or a plugin of kubelet (Register)."""

    resource: str
    name: str
    request: Any
    answer: Any
    """None: it was refused, or kubelet hung up."""
    refusal: str = ""


class PluginClient:
    """A connection of kubelet to one plugin. Finished calls are noted in ``calls``."""

    def __init__(self, resource: str, socket: Path, calls: "deque[Call]") -> None:
        self.resource = resource
        self.socket = socket
        self._calls = calls
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._stub: rpc.DevicePluginAsyncStub = rpc.DevicePluginStub(self._channel)

    async def connect(self) -> pb.DevicePluginOptions:
        """Dial and ask for the options. Raises PluginCallError."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._channel.channel_ready()
        except TimeoutError:
            raise PluginCallError("failed to dial device plugin: context deadline exceeded") from None
        try:
            options: pb.DevicePluginOptions = await self._call("GetDevicePluginOptions", pb.Empty())
        except PluginCallError as error:
            raise PluginCallError(f"failed to get device plugin options: {error}") from error
        return options

    async def watch(self, listed: Callable[[list[pb.Device]], None]) -> str:
        """Hand on every list of devices until the stream ends; returns why it ended."""
        try:
            async for message in self._stub.ListAndWatch(pb.Empty()):
                listed(list(message.devices))
        except grpc.aio.AioRpcError as error:
            return _go_text(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return _CLOSING
        return "EOF"

    async def close(self) -> None:
        """Cut the connection; calls that are under way fail."""
        await self._channel.close()

    async def preferred(self, available: list[str], must_include: list[str], size: int) -> list[str]:
        """GetPreferredAllocation, without a time-out, as kubelet calls it."""
        request = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        answer = await self._call("GetPreferredAllocation", pb.PreferredAllocationRequest(container_requests=[request]))
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    async def allocate(self, device_ids: list[str]) -> pb.AllocateResponse:
        """Allocate, without a time-out, as kubelet calls it."""
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=device_ids)])
        answer: pb.AllocateResponse = await self._call("Allocate", request)
        return answer

    async def pre_start(self, device_ids: list[str]) -> None:
        """PreStartContainer, with 30 s."""
        request = pb.PreStartContainerRequest(devices_ids=device_ids)
        await self._call("PreStartContainer", request, timeout=PRE_START_SECONDS)

    async def _call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        answer, refusal = None, ""
        try:
            with _go_errors():
                answer = await getattr(self._stub, name)(request, timeout=timeout)
        except PluginCallError as error:
            refusal = str(error)
            raise
        finally:
            self._calls.append(Call(self.resource, name, request, answer, refusal))
        return answer


class PluginServer(rpc.RegistrationServicer):
    """``kubelet.sock`` and the clients of everybody who registered on it; ``async with`` serves it."""

    def __init__(self, folder: Path, devices: DeviceManager, changed: Callable[[], None], calls: "deque[Call]") -> None:
        self._folder = folder
        self._devices = devices
        self._changed = changed
        self._calls = calls
        self._clients: dict[str, PluginClient] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> "PluginServer":
        self._folder.mkdir(parents=True, exist_ok=True)
        for entry in self._folder.iterdir():  # kubelet wipes sockets at start and leaves everything else
            with contextlib.suppress(FileNotFoundError):  # plugins remove theirs at the same time
                if stat.S_ISSOCK(entry.lstat().st_mode):
                    entry.unlink()
        (self._folder / DEPRECATION).touch()
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._folder / 'kubelet.sock'}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        watchers = list(self._watchers)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        if self._server is not None:
            await self._server.stop(grace=0)

    async def Register(  # noqa: N802  (the wire's name)
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.Empty]
    ) -> pb.Empty:
        """Check, dial back, ask for options; only then the registration counts."""
        wrong = check_request(request)
        if wrong is None:
            # Joined as text, as kubelet does: a path is looked for inside the folder, and not found there.
            wrong = await self._connect(request.resource_name, Path(f"{self._folder}/{request.endpoint}"))
        if wrong is not None:
            self._calls.append(Call(request.resource_name, "Register", request, None, wrong))
            get_logger().warning("kubelet.register_refused", resource=request.resource_name, reason=wrong)
            await context.abort(grpc.StatusCode.UNKNOWN, wrong)
        self._calls.append(Call(request.resource_name, "Register", request, pb.Empty()))
        get_logger().info("kubelet.registered", resource=request.resource_name, endpoint=request.endpoint)
        return pb.Empty()

    async def _connect(self, resource: str, socket: Path) -> str | None:
        """Take the plugin on; returns why not."""
        client = PluginClient(resource, socket, self._calls)
        self._clients[resource] = client
        try:
            options = await client.connect()
        except PluginCallError as error:
            self._clients.pop(resource, None)  # by name, too
            await client.close()
            return str(error)
        self._devices.connected(resource, client, options)
        watcher = asyncio.create_task(self._watch(client), name=f"watch {resource}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return None

    async def _watch(self, client: PluginClient) -> None:
        resource = client.resource

        def listed(devices: list[pb.Device]) -> None:
            self._devices.listed(resource, devices)
            self._changed()

        reason = await client.watch(listed)
        get_logger().info("kubelet.plugin_disconnected", resource=resource, reason=reason)
        # As in kubelet up to 1.36: the current registration of this name is disconnected, even a successor.
        current = self._clients.pop(resource, None)
        if current is not None:
            self._devices.disconnected(resource)
            self._changed()
            await current.close()
        await client.close()


def check_request(request: pb.RegisterRequest) -> str | None:
    """Why kubelet refuses this registration, or None. Pure."""
    if request.version != VERSION:
        return (
            f'requested API version "{request.version}" is not supported by kubelet. Supported version is ["{VERSION}"]'
        )
    name = request.resource_name
    domain, slash, rest = name.partition("/")
    good = bool(slash) and _DOMAIN.fullmatch(domain) and len(domain) <= 253 and _QUALIFIED.fullmatch(rest)
    if not good or "kubernetes.io/" in name or name.startswith("requests."):
        return f'the ResourceName "{name}" is invalid'
    return None


@contextlib.contextmanager
def _go_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise PluginCallError(_go_text(error)) from error
    except grpc.aio.UsageError as error:  # the channel was closed by a disconnect
        raise PluginCallError(_CLOSING) from error
    except asyncio.CancelledError as error:
        # grpc.aio cancels the calls of a channel that is closed; a caller who was not cancelled sees an error.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PluginCallError(_CLOSING) from error


def _go_text(error: grpc.aio.AioRpcError) -> str:
    """As grpc-go prints it: this is what people read in ``kubectl describe pod``."""
    code = error.code().name.title().replace("_", "")
    return f"rpc error: code = {code} desc = {error.details()}"
