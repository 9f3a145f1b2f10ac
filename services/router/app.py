"""The router's HTTP surface: which call goes where. Only ``/v1/*`` is ever forwarded."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from kybernate.health import Health
from kybernate.logs import get_logger
from services.router.admin import VERBS, Admin
from services.router.answers import ApiError
from services.router.auth import Doorkeeper
from services.router.calls import Calls
from services.router.events import EventLog
from services.router.gateways import Gateways

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build(
    *,
    calls: Calls,
    gateways: Gateways,
    admin: Admin,
    events: EventLog,
    health: Health,
    doorkeeper: Doorkeeper,
    body_bytes: int,
) -> web.Application:
    """The application; ``body_bytes`` is the largest body that it reads. Health and metrics are open to everybody."""
    needs = doorkeeper.needs
    app = web.Application(client_max_size=body_bytes, middlewares=[_errors])
    app.add_routes(
        [
            *health.routes(),
            web.get("/v1/models", needs("infer", "view")(admin.models)),
            web.get("/v1/models/{model:.+}", needs("infer", "view")(admin.model)),
            web.get("/v1/hold", needs("infer")(gateways.hold)),
            web.post("/v1/wake", needs("infer")(gateways.wake)),
            web.post("/v1/signals", needs("signals")(gateways.signals)),
            web.get("/v1/events", needs("view")(events.handle)),
            web.get("/v1/seats", needs("view")(admin.seats)),
            web.get("/v1/why", needs("view")(admin.why)),
            web.post("/v1/seats/{seat:.+}/{verb:" + "|".join(VERBS) + "}", needs("admin")(admin.command)),
            web.post("/v1/{path:.+}", needs("infer")(calls.handle)),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's shape, also those that aiohttp finds."""
    try:
        if not {".", ".."}.isdisjoint(request.path.split("/")):
            raise web.HTTPNotFound  # some server before an engine may resolve dots, and /v1/../admin leads out of /v1
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = "not_found" if error.status == 404 else "http_error"
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return ApiError(error.status, code, f"{request.method} {request.path}: {error.reason}").response(allow)
    except Exception as error:
        if request.writer.output_size > 0:
            raise  # half an answer is out: only the broken connection says so
        get_logger().error("request.failed", method=request.method, path=request.path, exc_info=error)
        return ApiError(500, "internal_error", "the router failed at this request; its log says how").response()
