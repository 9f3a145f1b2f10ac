"""The wire to kubelet: translates the device plugin calls of one resource. Decisions are in ``devices``."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from kybernate.logs import get_logger
from kybernate.pb import deviceplugin_pb2 as pb
from kybernate.pb import deviceplugin_pb2_grpc as rpc
from services.plugin.book import Book, Held
from services.plugin.devices import Answer, Offer, RefusedError
from services.plugin.faults import GONE, Probation
from services.plugin.gate import NotGrantedError, StartGate
from services.plugin.wishes import Wishes

OPTIONS = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
HURRY_SECONDS = 2.0
"""How much earlier than kubelet's deadline a refusal is sent, so that its text arrives."""

TOGETHER_SECONDS = 0.05
"""Changes that come so close together are one list: kubelet takes each complete list through its one lock."""

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass
class Node:
    """What the servicers of all resources share."""

    offer: Offer
    """Replaced as a whole when the configuration changes."""
    gate: StartGate
    probation: Probation
    allocated: Callable[[str], None]
    """Told each allocated seat after the answer is made; must not block."""
    book: Book = field(default_factory=Book)
    wishes: Wishes = field(default_factory=Wishes)
    _watchers: set[asyncio.Event] = field(default_factory=set)

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> tuple[str, ...]:
        """The seats to take; grants a wish that fits."""
        offer = self.offer
        groups = {offer.seats[seat].group.name for seat in available if seat in offer.seats}
        wish = self.wishes.fitting(resource, groups, time.time())
        wished = wish.group if wish is not None else ""
        faulty = self.probation.faulty
        chosen = offer.preferred(available, must, size, faulty, in_use=self.book.held, wish=wished)
        if wish is not None and any(offer.seats[seat].group.name == wished for seat in chosen[len(must) :]):
            self.wishes.grant(wish)
            get_logger().info("wish.granted", group=wished, seats=chosen, why=wish.why)
        return chosen

    def allocate(self, resource: str, requests: Sequence[Sequence[str]]) -> list[Answer]:
        """What the containers get; remembers who has which seat. Raises RefusedError, and then nobody has anything."""
        offer = self.offer
        answers = [offer.answer(resource, seat_ids) for seat_ids in requests]
        for answer in answers:
            seat = offer.seats[answer.envs["KYB_GPU_SEAT"]]
            self.book.allocate(Held(seat.id, resource, tuple(gpu.uuid for gpu in seat.group.gpus)))
            self.allocated(seat.id)
        return answers

    def missing(self, seat_id: str) -> str | None:
        """Why a container with this seat cannot start, when a GPU of its group is not there."""
        group, reasons = self.offer.seats[seat_id].group, self.probation.reasons
        reason = next(
            (
                f"GPU {gpu.index} ({gpu.uuid}) of group {group.name}: {reasons[gpu.uuid]}"
                for gpu in group.gpus
                if reasons.get(gpu.uuid, "").startswith(GONE)
            ),
            None,
        )
        return None if reason is None else f"seat {seat_id} cannot start: {reason}; or delete the pod"

    def changed(self) -> None:
        """Seats or their health are others now: every open ListAndWatch sends the complete list again."""
        for watcher in self._watchers:
            watcher.set()

    def watch(self) -> asyncio.Event:
        """An event that is set at every change."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Forget it."""
        self._watchers.discard(event)


class SeatPlugin(rpc.DevicePluginServicer):
    """DevicePlugin for one resource, for one registration."""

    def __init__(self, node: Node, resource: str) -> None:
        self._node = node
        self._resource = resource
        self.streaming = asyncio.Event()
        """Kubelet listens: the registration counts."""
        self.ended = asyncio.Event()
        """Kubelet does not listen any more and will not come back by itself: register again."""

    async def GetDevicePluginOptions(  # noqa: N802  (the wire's names)
        self,
        request: pb.Empty,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions],  # noqa: ARG002
    ) -> pb.DevicePluginOptions:
        """The same options as in Register."""
        return OPTIONS

    async def ListAndWatch(  # noqa: N802
        self,
        request: pb.Empty,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse],  # noqa: ARG002
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """The complete list now and at every change; never returns by itself."""
        changed = self._node.watch()
        self.streaming.set()
        try:
            while True:
                changed.clear()
                yield self._list()
                await changed.wait()
                await asyncio.sleep(TOGETHER_SECONDS)
        finally:
            self._node.unwatch(changed)
            self.ended.set()

    async def GetPreferredAllocation(  # noqa: N802
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[pb.PreferredAllocationRequest, pb.PreferredAllocationResponse],  # noqa: ARG002
    ) -> pb.PreferredAllocationResponse:
        """A hint. Never an error: kubelet would fail the pod for good."""
        answer = pb.PreferredAllocationResponse()
        for wanted in request.container_requests:
            available, must = wanted.available_deviceIDs, wanted.must_include_deviceIDs
            chosen = self._node.preferred(self._resource, available, must, wanted.allocation_size)
            answer.container_responses.add(deviceIDs=chosen)
        return answer

    async def Allocate(  # noqa: N802
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """From memory, at once: kubelet waits without a time-out and does nothing else meanwhile."""
        try:
            answers = self._node.allocate(self._resource, [r.devices_ids for r in request.container_requests])
        except RefusedError as refusal:
            get_logger().warning("plugin.allocation_refused", resource=self._resource, reason=str(refusal))
            await _refuse(context, str(refusal))
        return pb.AllocateResponse(container_responses=[_container_response(answer) for answer in answers])

    async def PreStartContainer(  # noqa: N802
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """The start gate. Waits without blocking anybody else."""
        seat_ids = set(request.devices_ids)
        if len(seat_ids) != 1 or not seat_ids <= self._node.offer.seats.keys():
            await _refuse(context, f"seats {', '.join(sorted(seat_ids))} are not on this node; delete the pod")
        (seat_id,) = seat_ids
        missing = self._node.missing(seat_id)
        if missing is not None:
            await _refuse(context, missing)
        remaining = context.time_remaining()
        try:
            await self._node.gate.wait(seat_id, None if remaining is None else max(0.0, remaining - HURRY_SECONDS))
        except NotGrantedError as refusal:
            await _refuse(context, str(refusal))
        return pb.PreStartContainerResponse()

    def _list(self) -> pb.ListAndWatchResponse:
        answer = pb.ListAndWatchResponse()
        for seat in self._node.offer.listed(self._resource, self._node.probation.faulty):
            device = answer.devices.add(ID=seat.id, health="Healthy" if seat.healthy else "Unhealthy")
            for numa_node in seat.numa_nodes:
                device.topology.nodes.add(ID=numa_node)
        return answer


def _container_response(answer: Answer) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[pb.Mount(container_path=inside, host_path=host, read_only=True) for inside, host in answer.mounts],
        devices=[pb.DeviceSpec(container_path=path, host_path=path, permissions="rw") for path in answer.devices],
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi],
    )


async def _refuse(context: grpc.aio.ServicerContext[Request, Response], text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    raise AssertionError("abort returned")
