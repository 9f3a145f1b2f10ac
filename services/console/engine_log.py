"""``GET /ui/log?seat=KEY``: the end of an engine's log, where it is a file of this machine; else how to read it.

In a cluster the kubelet has the log, and the console no right to read it: kubectl asks with the operator's own. With
Compose the container has it in which the engines run.
"""

import asyncio
import os
import shlex
from collections.abc import Callable
from typing import Any

from aiohttp import web

from kybernate.http_api import ApiError
from kybernate.local_stack import container_logs, engine_log, log_lines
from kybernate.redaction import without_secrets
from services.console.core.cluster import Cluster
from services.console.problems import local_stack

LINES = 200
MOST_BYTES = 256 * 1024
"""Of an answer."""


class EngineLog:
    """``url``: of the console."""

    def __init__(self, cluster: Cluster, url: Callable[[], str]) -> None:
        self._cluster, self._url = cluster, url

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Return ``{"command"}``, and ``{"lines"}``, oldest first, where this machine has the log."""
        row = self._cluster.seats.rows.get(request.query.get("seat", ""))
        if row is None or not row.pod:
            raise ApiError(404, "no_pod", "this seat has no pod, so there is no log")
        return web.json_response(await asyncio.to_thread(self._read, row.pod, row.pod_uid, row.model))

    def _read(self, pod: str, uid: str, model: str) -> dict[str, Any]:
        namespace, _, name = pod.partition("/")
        stack = local_stack(self._url())
        if stack is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            return {"command": shlex.join(["kubectl", "-n", namespace, "logs", name, f"--tail={LINES}"])}
        if stack is None:
            tail = shlex.quote(f"tail -n {LINES} /run/kybernate/{container_logs(pod, uid)}")
            return {"command": f"docker exec $(docker ps -qf 'name=kybernate.*kubelet') sh -c {tail}"}
        try:
            file = engine_log(stack, pod, uid)
            lines = list(log_lines(file, last=LINES, follow=False)) if file is not None else []
        except OSError as error:
            raise ApiError(503, "log_unreadable", f"the log cannot be read: {error.strerror}") from error
        text = without_secrets("\n".join(lines))[-MOST_BYTES:]
        return {"command": shlex.join(["kyb", "logs", model]), "lines": text.splitlines()}
