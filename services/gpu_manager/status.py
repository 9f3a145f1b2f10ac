"""What the manager shows over HTTP: its seats (for routers that lost NATS) and its metrics."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kybernate.seat import SeatState
from services.gpu_manager import looking
from services.gpu_manager.inputs import AskedOverHttp

if TYPE_CHECKING:
    from services.gpu_manager.manager import Manager


def routes(manager: "Manager", registry: CollectorRegistry) -> list[web.RouteDef]:
    """``GET /v1/seats`` and, into the registry, the board's metrics."""
    registry.register(_BoardMetrics(manager))

    async def seats(_: web.Request) -> web.Response:
        if not manager.board.recovered:
            return web.json_response({"error": {"message": "the manager has just started"}}, status=503)
        await manager.hear(AskedOverHttp())  # before the answer is made: a drain that begins now waits for it
        now = manager.now()
        owned = [row for row in manager.board.rows.values() if row.state is not SeatState.FREE]
        records = [looking.record(manager.board, row, now).model_dump(mode="json") for row in owned]
        return web.json_response({"seats": records, "why": manager.board.why})

    return [web.get("/v1/seats", seats)]


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
