"""What the manager answers over HTTP: its seats (for routers that lost NATS), why each group is as it is, its
metrics."""

from collections.abc import Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.seat import SeatState
from kybernate.topology import Group
from services.gpu_manager import view
from services.gpu_manager.inputs import Now, RouterAskedOverHttp
from services.gpu_manager.live_policy import LivePolicy
from services.gpu_manager.manager import Manager
from services.gpu_manager.shadow import Shadow
from services.gpu_manager.state import ManagedSeat, NodeState


def routes(manager: Manager, policy: LivePolicy, registry: CollectorRegistry) -> list[web.RouteDef]:
    """The routes under ``/v1`` and, into the registry, the metrics of the board and the policies."""
    registry.register(_NodeMetrics(manager.node, policy))

    async def seats(_: web.Request) -> web.Response:
        if not manager.node.recovered:
            return _error("the manager has just started", 503)
        await manager.receive(RouterAskedOverHttp())  # before the answer is made: a drain that begins now waits for it
        node, now = manager.node, manager.now()
        owned = [seat for seat in node.seats.values() if seat.state is not SeatState.FREE]
        records = [node.record(seat, now).model_dump(mode="json") for seat in owned]
        reasons = {name: group.why for name, group in node.groups.items() if group.why}
        return web.json_response({"seats": records, "why": reasons})

    async def why(_: web.Request) -> web.Response:
        return web.json_response(why_answer(manager.node, policy, manager.now()))

    return [web.get("/v1/seats", seats), web.get("/v1/why", why), pod_route(manager)]


def pod_route(manager: Manager) -> web.RouteDef:
    """``GET /v1/pods/<uid>``: the seat's record, for the pod's ``kyb-probe`` and for the check before an uninstall.

    404: no seat of this node belongs to this pod; 503: not known yet.
    """

    async def pod(request: web.Request) -> web.Response:
        node, uid = manager.node, request.match_info["uid"]
        if not node.recovered:
            return _error("the manager has just started and reads its seats; ask again", 503)
        for seat in node.seats.values():
            if seat.pod is not None and seat.pod.uid == uid and seat.state is not SeatState.FREE:
                return web.json_response(node.record(seat, manager.now()).model_dump(mode="json"))
        return _error(f"no seat of node {node.name} belongs to pod {uid}", 404)

    return web.get("/v1/pods/{uid}", pod)


def _error(text: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)


# --- why --------------------------------------------------------------------------------------------------------------


def why_answer(node: NodeState, policy: LivePolicy, now: Now) -> dict[str, Any]:
    """``GET /v1/why``, shown by ``kyb why``: the policy, the reason of its last decision about each group, and the
    numbers that it sees there."""
    recorder = policy.recorder
    return {
        "node": node.name,
        "policy": policy.guarded.name,
        "errors": policy.guarded.errors,
        "last_error": policy.guarded.last_error,
        "groups": [_why_group(node, group, now) for group in node.setup.groups],
        "problems": [text for seat in node.seats.values() for text in seat.owner.terms.problems],
        "shadow": None if policy.shadow is None else _why_shadow(policy.shadow, now),
        "recording": None if recorder is None else {"written": recorder.written, "left_out": recorder.left_out},
    }


def _why_shadow(shadow: Shadow, now: Now) -> dict[str, Any]:
    return {
        "policy": shadow.name,
        "last_error": shadow.last_error,
        "groups": [
            {
                "group": name,
                "same": score.evaluations["same"],
                "different": score.evaluations["different"],
                "errors": score.evaluations["error"],
                "disagreements": score.disagreements,
                "gain_seconds": round(score.gain_seconds, 3),
                "live": score.live,
                "shadow": score.shadow,
            }
            for name, score in sorted(shadow.scores.items())
        ],
        "recent": [
            {
                "group": each.group,
                "age_seconds": round(float(now.model) - each.at, 3),
                "live": each.live,
                "shadow": each.shadow,
                "gain_seconds": round(each.gain_seconds, 3),
            }
            for each in reversed(shadow.recent)
        ],
    }


def _why_group(node: NodeState, group: Group, now: Now) -> dict[str, Any]:
    switch = node.switches.get(group.name)
    return {
        "group": group.name,
        "why": node.groups[group.name].why,
        "switch": None
        if switch is None
        else {"out": switch.victim, "in": switch.incoming, "phase": str(switch.phase), "op": switch.op},
        "seats": [_why_seat(node, seat, now) for seat in node.seats_on(group) if seat.pod is not None],
    }


def _why_seat(node: NodeState, seat: ManagedSeat, now: Now) -> dict[str, Any]:
    seen = view.seat_view(node, seat, now)
    return {
        "seat": seen.seat,
        "model": seat.model,
        "blocked": node.blocked(seat, now),
        "state": str(seen.state),
        "tier": seen.tier,
        "weight": seen.weight,
        "slo_seconds": seen.slo_seconds,
        "stall_budget_seconds": seen.stall_budget_seconds,
        "pinned": seen.pinned,
        "waiting": seen.waiting,
        "in_flight": seen.in_flight,
        "oldest_wait_seconds": round(seen.oldest_wait_seconds, 3),
        "rate_fast": round(seen.rate_fast, 5),
        "rate_slow": round(seen.rate_slow, 5),
        "service_seconds": round(seen.service_seconds, 3),
        "park_seconds": round(seen.park_seconds, 3),
        "activate_seconds": round(seen.activate_seconds, 3),
    }


# --- metrics ----------------------------------------------------------------------------------------------------------


class _NodeMetrics(Collector):
    """The seats, the live policy's failures and the shadow's comparison. Read at scrape time, so there is no copy."""

    def __init__(self, node: NodeState, policy: LivePolicy) -> None:
        self._node, self._policy = node, policy

    def collect(self) -> Iterable[Metric]:
        yield from self._of_board(self._node)
        yield from self._of_policy(self._node.name)

    def _of_board(self, node: NodeState) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "kybernate_seat_state", "1 for the state a seat is in", labels=["node", "group", "seat", "model", "state"]
        )
        for seat in node.seats.values():
            state.add_metric([node.name, seat.group.name, seat.id, seat.model, str(seat.state)], 1)
        yield state
        yield GaugeMetricFamily("kybernate_lease_epoch", "Highest epoch given out on this node", value=node.epoch)
        switching = GaugeMetricFamily("kybernate_group_switching", "1 while a group switches", labels=["node", "group"])
        for name in node.groups:
            switching.add_metric([node.name, name], float(name in node.switches))
        yield switching
        broken = CounterMetricFamily(
            "kybernate_invariant_violations", "Broken invariants; nothing is granted on their GPUs", labels=["node"]
        )
        broken.add_metric([node.name], node.violations)
        yield broken

    def _of_policy(self, node: str) -> Iterable[Metric]:
        shadow = self._policy.shadow
        failed = CounterMetricFamily(
            "kybernate_policy_errors",
            "Policy evaluations that raised and were replaced by the fallback",
            labels=["node"],
        )
        failed.add_metric([node], self._policy.guarded.errors)
        yield failed
        if shadow is None:
            return
        evaluations = CounterMetricFamily(
            "kybernate_shadow_looks",
            "Decisions of the shadow policy: same as the live one's, different, error",
            labels=["node", "group", "policy", "outcome"],
        )
        apart = CounterMetricFamily(
            "kybernate_shadow_disagreements",
            "Times that the shadow policy began to decide differently",
            labels=["node", "group", "policy"],
        )
        gain = GaugeMetricFamily(
            "kybernate_shadow_gain_seconds",
            "Estimated request-seconds of waiting that the shadow policy would have saved; below 0: cost",
            labels=["node", "group", "policy"],
        )
        for group, score in shadow.scores.items():
            for outcome in ("same", "different", "error"):
                evaluations.add_metric([node, group, shadow.name, outcome], score.evaluations[outcome])
            apart.add_metric([node, group, shadow.name], score.disagreements)
            gain.add_metric([node, group, shadow.name], score.gain_seconds)
        yield from (evaluations, apart, gain)
