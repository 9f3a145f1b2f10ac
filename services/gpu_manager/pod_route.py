"""``GET /v1/pods/<uid>``: what the seat of a pod does, for its ``kyb-probe`` and for the check before an uninstall."""

from typing import TYPE_CHECKING

from aiohttp import web

from kybernate.seat import SeatState
from services.gpu_manager import showing

if TYPE_CHECKING:
    from services.gpu_manager.manager import Manager


def pod_route(manager: "Manager") -> web.RouteDef:
    """The seat's record. 404: no seat of this node belongs to this pod; 503: not known yet."""

    async def pod(request: web.Request) -> web.Response:
        board, uid = manager.board, request.match_info["uid"]
        if not board.recovered:
            return _error("the manager has just started and looks at its seats; ask again", 503)
        for row in board.rows.values():
            if row.pod is not None and row.pod.uid == uid and row.state is not SeatState.FREE:
                return web.json_response(showing.record(board, row, manager.now()).model_dump(mode="json"))
        return _error(f"no seat of node {board.node} belongs to pod {uid}", 404)

    return web.get("/v1/pods/{uid}", pod)


def _error(text: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)
