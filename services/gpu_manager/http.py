"""What the manager answers over HTTP: its seats (for routers that lost NATS), why each group is as it
is."""

import contextlib
from dataclasses import asdict
from typing import Any

from aiohttp import web

from kybernate.http_api import ApiError
from kybernate.node.host_memory import HostMemory
from kybernate.node.run_files import GpuFaults
from kybernate.seat import LEDGER_FORMAT, SeatState
from kybernate.topology import Group
from services.gpu_manager.core import obstacles, view
from services.gpu_manager.core.inputs import Now, RouterAskedOverHttp
from services.gpu_manager.core.managed_seat import ManagedSeat
from services.gpu_manager.core.phases import going_on
from services.gpu_manager.core.state import NodeState, Rider
from services.gpu_manager.live_policy import GuardedPolicy
from services.gpu_manager.manager import Manager
from services.gpu_manager.publish import record


def routes(manager: Manager, policy: GuardedPolicy, memory: HostMemory) -> list[web.RouteDef]:
    """The routes under ``/v1``."""

    def recovered() -> NodeState:
        if not manager.node.recovered:
            raise ApiError(503, "not_ready", "the manager has just started and reads its seats; ask again")
        return manager.node

    async def seats(_: web.Request) -> web.Response:
        node = recovered()
        await manager.receive(RouterAskedOverHttp())  # before the answer is made: a drain that begins now waits for it
        await manager.until_recorded()
        now = manager.now()
        owned = [seat for seat in node.seats.values() if seat.state is not SeatState.FREE]
        records = [record(node, seat, now).model_dump(mode="json") for seat in owned]
        texts = {name: group.why for name, group in node.groups.items() if group.why}
        return web.json_response({"seats": records, "why": texts})

    async def reasons(_: web.Request) -> web.Response:
        body = why_answer(recovered(), policy, manager.now()) | {"unread": manager.unread}
        with contextlib.suppress(OSError):
            body["note"] = GpuFaults.read(manager.gate.run_dir).note
            body.setdefault("host_memory", {})["available_bytes"] = await memory.free_bytes()
        return web.json_response(body)

    async def pod(request: web.Request) -> web.Response:
        """The seat's record, for the pod's ``kyb-probe`` and for the check before an uninstall. 404: no seat of this
        node belongs to this pod; 503: not known yet."""
        uid = request.match_info["uid"]
        await manager.until_recorded()
        node = recovered()
        for seat in node.seats.values():
            if seat.pod is not None and seat.pod.uid == uid and seat.state is not SeatState.FREE:
                return web.json_response(record(node, seat, manager.now()).model_dump(mode="json"))
        raise ApiError(404, "not_found", f"no seat of node {node.name} belongs to pod {uid}")

    async def stop(request: web.Request) -> web.Response:
        """For the preStop hook of an engine: ``wait`` is true while kubelet should not signal it yet, since its
        deletion has not been seen (``deleted``) or the checkpointer ends its processes."""
        uid = request.match_info["uid"]
        seat = next((s for s in manager.node.seats.values() if s.pod is not None and s.pod.uid == uid), None)
        waits = seat is not None and seat.facts.alive
        deleted = seat is not None and seat.state is SeatState.RELEASING
        if seat is not None and deleted:
            waits = waits and seat.ended_here is not False
        return web.json_response({"wait": waits, "deleted": deleted})

    shown = {"seats": seats, "why": reasons, "pods/{uid}": pod, "pods/{uid}/stop": stop}
    return [web.get(f"/v1/{path}", handler) for path, handler in shown.items()]


# --- why --------------------------------------------------------------------------------------------------------------


def why_answer(node: NodeState, policy: GuardedPolicy, now: Now) -> dict[str, Any]:
    """``GET /v1/why``, shown by ``kyb why``: the policy, the reason of its last decision about each group, and the
    numbers that it sees there."""
    return {
        "node": node.name,
        "ledger_format": LEDGER_FORMAT,
        "policy": policy.name,
        "errors": policy.errors,
        "last_error": policy.last_error,
        "groups": [_why_group(node, group, now) for group in node.setup.groups],
        **{rider.name: said for rider in node.riders[Rider.why] if (said := rider.why(node, None, now)) is not None},
        "silent_routers": [
            f"router {name} lives and acknowledges no drain, for {seconds:.0f} s: it has no lease of this node, and "
            "switches do not wait for it"
            for name, seconds in sorted(node.routers.silent(now).items())
        ],
        "problems": [text for seat in node.seats.values() for text in seat.terms.problems],
    }


def _of_riders(node: NodeState, of: Group | ManagedSeat, now: Now) -> dict[str, Any]:
    said = (rider.why(node, of, now) or {} for rider in node.riders[Rider.why])
    return {name: value for one in said for name, value in one.items()}


def _why_group(node: NodeState, group: Group, now: Now) -> dict[str, Any]:
    return {
        "group": group.name,
        "why": node.groups[group.name].why,
        **_of_riders(node, group, now),
        "phases": going_on(node, group, now),
        "peers": [peer.name for peer in node.groups[group.name].peers],
        "seats": [_why_seat(node, seat, now) for seat in view.seats_on(node, group) if seat.pod is not None],
    }


def _why_seat(node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
    seen = view.seat_view(node, seat, now)
    return {
        "seat": seen.seat,
        "model": seat.model,
        "blocked": obstacles.blocked(node, seat, now),
        "stage": obstacles.stage(node, seat, now).as_json(now),
        "also": [one.stage.as_json(now) for one in obstacles.also(node, seat, now)],
        "state": str(seat.state),
        "cold": seat.acts_as is SeatState.WAITING,
        "tier": seen.tier,
        "weight": seen.weight,
        "slo_seconds": seen.slo_seconds,
        "pinned": seen.pinned,
        "waiting": seen.waiting,
        "in_flight": seen.in_flight,
        "oldest_wait_seconds": round(seen.oldest_wait_seconds, 3),
        "rate_fast": round(seen.rate_fast, 5),
        "rate_slow": round(seen.rate_slow, 5),
        "service_seconds": round(seen.service_seconds, 3),
        "park_seconds": round(seen.park_seconds, 3),
        "activate_seconds": round(seen.activate_seconds, 3),
        "backend": seat.backend,
        "way": seat.durable.way,
        "used_bytes": seat.used_bytes,
        "woke": asdict(woke) if (woke := node.woke.get(seat.id)) is not None and woke.model == seat.model else None,
        **_of_riders(node, seat, now),
        "verify_seconds": round(seat.durable.costs.verify_seconds, 3),
    }
