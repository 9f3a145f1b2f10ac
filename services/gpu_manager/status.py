"""What the manager shows over HTTP: its seats (for routers that lost NATS) and its metrics."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.seat import SeatState
from services.gpu_manager import showing, telling
from services.gpu_manager.inputs import AskedOverHttp
from services.gpu_manager.pod_route import pod_route

if TYPE_CHECKING:
    from services.gpu_manager.manager import Manager
    from services.gpu_manager.thinking import Thinking


def routes(manager: "Manager", thinking: "Thinking", registry: CollectorRegistry) -> list[web.RouteDef]:
    """The routes under ``/v1`` and, into the registry, the metrics of the board and the policies."""
    registry.register(_BoardMetrics(manager))
    registry.register(_PolicyMetrics(manager, thinking))

    async def seats(_: web.Request) -> web.Response:
        if not manager.board.recovered:
            return web.json_response({"error": {"message": "the manager has just started"}}, status=503)
        await manager.hear(AskedOverHttp())  # before the answer is made: a drain that begins now waits for it
        now = manager.now()
        owned = [row for row in manager.board.rows.values() if row.state is not SeatState.FREE]
        records = [showing.record(manager.board, row, now).model_dump(mode="json") for row in owned]
        return web.json_response({"seats": records, "why": manager.board.why})

    async def why(_: web.Request) -> web.Response:
        return web.json_response(telling.why(manager.board, thinking, manager.now()))

    return [web.get("/v1/seats", seats), web.get("/v1/why", why), pod_route(manager)]


class _BoardMetrics(Collector):
    """Read at scrape time, so that nothing has to be kept in step."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        board = self._manager.board
        state = GaugeMetricFamily(
            "kybernate_seat_state", "1 for the state a seat is in", labels=["node", "group", "seat", "model", "state"]
        )
        for row in board.rows.values():
            state.add_metric([board.node, row.group.name, row.seat, row.model, str(row.state)], 1)
        yield state
        yield GaugeMetricFamily("kybernate_lease_epoch", "Highest epoch given out on this node", value=board.epoch)
        switching = GaugeMetricFamily("kybernate_group_switching", "1 while a group switches", labels=["node", "group"])
        for group in board.groups:
            switching.add_metric([board.node, group.name], float(group.name in board.operations))
        yield switching


class _PolicyMetrics(Collector):
    """The live policy's failures, and how the shadow compares."""

    def __init__(self, manager: "Manager", thinking: "Thinking") -> None:
        self._manager, self._thinking = manager, thinking

    def collect(self) -> Iterable[Metric]:
        node, thinking = self._manager.board.node, self._thinking
        failed = CounterMetricFamily(
            "kybernate_policy_errors", "Looks at which the policy failed and a plain rule decided", labels=["node"]
        )
        failed.add_metric([node], thinking.brain.errors)
        yield failed
        if thinking.shadow is None:
            return
        looks = CounterMetricFamily(
            "kybernate_shadow_looks",
            "Decisions of the shadow policy: same as the live one's, different, error",
            labels=["node", "group", "policy", "outcome"],
        )
        apart = CounterMetricFamily(
            "kybernate_shadow_disagreements",
            "Times that the shadow policy began to want something else",
            labels=["node", "group", "policy"],
        )
        gain = GaugeMetricFamily(
            "kybernate_shadow_gain_seconds",
            "Estimated request-seconds of waiting that the shadow policy would have saved; below 0: cost",
            labels=["node", "group", "policy"],
        )
        for group, score in thinking.shadow.scores.items():
            for outcome in ("same", "different", "error"):
                looks.add_metric([node, group, thinking.shadow.name, outcome], score.looks[outcome])
            apart.add_metric([node, group, thinking.shadow.name], score.disagreements)
            gain.add_metric([node, group, thinking.shadow.name], score.gain_seconds)
        yield from (looks, apart, gain)
