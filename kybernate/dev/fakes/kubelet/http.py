"""Kubelet over HTTP: ``/pods`` and ``/node`` as v1 JSON, and what ``kubectl`` would do to it under ``/control``."""

import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import yaml
from aiohttp import web

from kybernate.dev.fakes.kubelet.kubelet import Kubelet, PodExistsError, UnknownPodError
from kybernate.dev.fakes.kubelet.manifest import ManifestError, parse
from kybernate.dev.fakes.kubelet.pod import Pod

_Body = dict[str, Any]


class RequestError(Exception):
    """A call that cannot be understood."""


def application(kubelet: Kubelet) -> web.Application:
    """The HTTP side of a kubelet."""

    async def pods(_: web.Request) -> web.Response:
        return web.json_response(kubelet.pod_list())

    async def node(_: web.Request) -> web.Response:
        return web.json_response(kubelet.node())

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def create(request: web.Request) -> web.Response:
        try:
            specs = parse(await request.text(), "request")
            created = [kubelet.create(spec) for spec in specs]
        except ManifestError as error:
            return _error(400, str(error))
        except PodExistsError as error:
            return _error(409, str(error))
        return web.json_response({"items": [pod.document() for pod in created]}, status=201)

    app = web.Application()
    app.add_routes(
        [
            web.get("/pods", pods),
            web.get("/node", node),
            web.get("/healthz", healthz),
            web.post("/control/create", create),
            *(web.post(f"/control/{verb}", _call(kubelet, act)) for verb, act in _VERBS.items()),
        ]
    )
    return app


def _delete(kubelet: Kubelet, body: _Body) -> Pod:
    grace = body.get("grace_seconds")
    return kubelet.delete(*_name(body), None if grace is None else _number(body, "grace_seconds"))


def _force_delete(kubelet: Kubelet, body: _Body) -> Pod:
    return kubelet.force_delete(*_name(body), _number(body, "linger_seconds"))


def _restart_container(kubelet: Kubelet, body: _Body) -> Pod:
    try:
        signum = signal.Signals[f"SIG{str(body.get('signal', 'KILL')).upper().removeprefix('SIG')}"]
    except KeyError:
        raise RequestError(f"signal: {body['signal']!r}; name one such as KILL or TERM") from None
    return kubelet.restart_container(*_name(body), body.get("container"), signum)


async def _restart_kubelet(kubelet: Kubelet, body: _Body) -> None:
    await kubelet.restart(_number(body, "down_seconds"))


_VERBS: dict[str, Callable[[Kubelet, _Body], Pod | Awaitable[None]]] = {
    "delete": _delete,
    "force-delete": _force_delete,
    "restart-container": _restart_container,
    "restart-kubelet": _restart_kubelet,
}


def _call(
    kubelet: Kubelet, act: Callable[[Kubelet, _Body], Pod | Awaitable[None]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            text = await request.text()
            body = yaml.safe_load(text) if text.strip() else {}
            if not isinstance(body, dict):
                raise RequestError("the body must be a JSON object")
            done = act(kubelet, body)
            if isinstance(done, Pod):
                return web.json_response(done.document())
            await done
            return web.json_response({"status": "ok"})
        except (RequestError, json.JSONDecodeError, yaml.YAMLError) as error:
            return _error(400, str(error))
        except UnknownPodError as error:
            return _error(404, str(error))

    return handle


def _name(body: _Body) -> tuple[str, str]:
    if not isinstance(body.get("name"), str):
        raise RequestError('name: is missing; say {"namespace": "default", "name": "<pod>"}')
    return str(body.get("namespace", "default")), body["name"]


def _number(body: _Body, name: str) -> float:
    value = body.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise RequestError(f"{name}: {value!r}; must be a number of seconds")
    return float(value)


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
