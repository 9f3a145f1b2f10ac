"""The gRPC service ``DevicePlugin`` for one resource each, and the node's seats that all of them share."""

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
from kybernate.topology import AllocatedSeat
from services.plugin.allocations import Allocations
from services.plugin.core.devices import NotGrantedError, Offer
from services.plugin.core.faults import GONE, Probation
from services.plugin.core.placement import OpenWishes
from services.plugin.gate import StartGate

OPTIONS = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
DEADLINE_MARGIN_SECONDS = 2.0
"""How much earlier than kubelet's deadline a refusal is sent, so that its text arrives."""
BATCH_SECONDS = 0.05
"""Changes within this time are sent as one list: kubelet processes each complete list under its one lock."""

Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass
class NodeSeats:
    """The state that the servicers of all resources share."""

    offer: Offer
    """Replaced as a whole by ``replace_offer``."""
    gate: StartGate
    probation: Probation
    on_allocated: Callable[[str], None]
    """Called with the ID of each allocated seat after the answer is made; must not block."""
    allocations: Allocations = field(default_factory=Allocations)
    wishes: OpenWishes = field(default_factory=OpenWishes)
    watchers: set[asyncio.Event] = field(default_factory=set)
    """``notify`` sets them: one per open ListAndWatch."""

    def replace_offer(self, offer: Offer) -> None:
        """Offer other seats from now on."""
        self.offer = offer
        self.notify()

    def preferred(self, resource: str, available: Sequence[str], must: Sequence[str], size: int) -> tuple[str, ...]:
        """Return the seats to take; grants a wish that fits."""
        offer = self.offer
        groups = {offer.seats[seat].name for seat in available if seat in offer.seats}
        wish = self.wishes.matching(resource, groups, time.time())
        wished = wish.group if wish is not None else ""
        faulty = self.probation.faulty
        chosen = offer.preferred(available, must, size, faulty, allocated=self.allocations.seats, wish=wished)
        if wish is not None and any(offer.seats[seat].name == wished for seat in chosen[len(must) :]):
            self.wishes.grant(wish)
            get_logger().info("wish.granted", group=wished, seats=chosen, why=wish.why)
        return chosen

    def allocate(self, resource: str, requests: Sequence[Sequence[str]]) -> list[pb.ContainerAllocateResponse]:
        """Return one answer per container and record the seats. Raises NotGrantedError, recording nothing."""
        answers = [self.offer.answer(resource, seat_ids) for seat_ids in requests]
        for seat_id, *_ in requests:
            group = self.offer.seats[seat_id]
            self.allocations.allocate(AllocatedSeat(seat_id, resource, group.uuids, self.offer.reach(group)))
            self.on_allocated(seat_id)
        return answers

    def reach(self, seat_id: str) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs that the container of a seat has; empty when unknown."""
        known = self.allocations.seats.get(seat_id)
        return known.reach if known is not None else ()

    def closed(self, seat_id: str) -> list[str]:
        """Return the groups on which a seat cannot start."""
        return [group.name for group in self.offer.groups if self.missing(seat_id, group.name) is not None]

    def missing(self, seat_id: str, group_name: str = "") -> str | None:
        """Return why a seat cannot start on this group, else on its own: it, or a GPU, is gone, or its container was
        made without that GPU; None: it can."""
        if seat_id not in self.offer.seats:
            return "its seat is not on this node any more; delete the pod"
        own, reasons, reach = self.offer.seats[seat_id], self.probation.reasons, self.reach(seat_id)
        group = next((one for one in self.offer.groups if one.name == group_name), own)
        for gpu in group.gpus:
            reason, which = gpu.fault(reasons), f"GPU {gpu.index} ({gpu.uuid}) of group {group.name}"
            if reason.startswith(GONE):
                return f"it cannot start: {which}: {reason}; or delete the pod"
            if reach and gpu.uuid not in reach:
                return f"it cannot start: its container was made without {which}; a new pod has it"
        return None

    def notify(self) -> None:
        """Make every open ListAndWatch send the complete list again: seats or their health changed."""
        for watcher in self.watchers:
            watcher.set()


class SeatPlugin(rpc.DevicePluginServicer):
    """DevicePlugin for one resource, for one registration."""

    def __init__(self, node: NodeSeats, resource: str) -> None:
        self._node = node
        self._resource = resource
        self.streaming = asyncio.Event()
        """Set when kubelet has opened ListAndWatch: the registration is complete."""
        self.ended = asyncio.Event()
        """Set when ListAndWatch has ended; kubelet opens it again only after a new registration."""

    async def GetDevicePluginOptions(  # noqa: N802  (names of the API)
        self,
        request: pb.Empty,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions],  # noqa: ARG002
    ) -> pb.DevicePluginOptions:
        """Return the same options as Register sent."""
        return OPTIONS

    async def ListAndWatch(  # noqa: N802
        self,
        request: pb.Empty,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse],  # noqa: ARG002
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Stream the complete list now and at every change; never returns."""
        changed = asyncio.Event()
        self._node.watchers.add(changed)
        self.streaming.set()
        try:
            while True:
                changed.clear()
                yield self._node.offer.listed(self._resource, self._node.probation.faulty)
                await changed.wait()
                await asyncio.sleep(BATCH_SECONDS)
        finally:
            self._node.watchers.discard(changed)
            self.ended.set()

    async def GetPreferredAllocation(  # noqa: N802
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[pb.PreferredAllocationRequest, pb.PreferredAllocationResponse],  # noqa: ARG002
    ) -> pb.PreferredAllocationResponse:
        """Return a hint. Never an error, since kubelet would fail the pod for good."""
        answer = pb.PreferredAllocationResponse()
        for wanted in request.container_requests:
            available, must = wanted.available_deviceIDs, wanted.must_include_deviceIDs
            chosen = self._node.preferred(self._resource, available, must, wanted.allocation_size)
            answer.container_responses.add(deviceIDs=chosen)
        return answer

    async def Allocate(  # noqa: N802
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        """Answer from memory: kubelet waits without a time-out and does nothing else meanwhile."""
        try:
            answers = self._node.allocate(self._resource, [r.devices_ids for r in request.container_requests])
        except NotGrantedError as refusal:
            get_logger().warning("plugin.allocation_refused", resource=self._resource, reason=str(refusal))
            await _refuse(context, str(refusal))
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(  # noqa: N802
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        """Wait at the start gate until the seat has a ticket. Other calls are served meanwhile."""
        seat_ids = set(request.devices_ids)
        if len(seat_ids) != 1 or not seat_ids <= self._node.offer.seats.keys():
            await _refuse(context, "its seat is not on this node; delete the pod")
        (seat_id,) = seat_ids
        missing = self._node.missing(seat_id)
        if missing is not None:
            await _refuse(context, missing)
        remaining, closed = context.time_remaining(), self._node.closed(seat_id)
        limit = None if remaining is None else max(0.0, remaining - DEADLINE_MARGIN_SECONDS)
        try:
            await self._node.gate.wait(seat_id, limit, closed=closed)
        except NotGrantedError as refusal:
            await _refuse(context, str(refusal))
        return pb.PreStartContainerResponse()


async def _refuse(context: grpc.aio.ServicerContext[Request, Response], text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    raise AssertionError("abort returned")
