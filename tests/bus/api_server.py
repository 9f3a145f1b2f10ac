"""An API server of a few lines: Secrets, with resource versions, over TLS, asking for the account's token."""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "token-of-the-account"


@dataclass
class ApiServer:
    """What is stored, and what was asked."""

    account: Path
    port: int = 0
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    forbidden: set[str] = field(default_factory=set)
    """Methods that the account may not use."""
    between: Callable[[], None] = lambda: None
    """Called after each GET: the change that another client makes then."""

    @property
    def env(self) -> dict[str, str]:
        """As Kubernetes tells a pod."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.port)}

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status"}, status=401)
        if request.method in self.forbidden:
            return web.json_response({"kind": "Status"}, status=403)
        name = request.match_info.get("name")
        if request.method == "GET":
            found = self.secrets.get(str(name))
            answer = web.json_response(found or {"kind": "Status"}, status=200 if found else 404)
            self.between()
            return answer
        body = await request.json()
        return self._write(body, name)

    def _write(self, body: dict[str, Any], name: str | None) -> web.Response:
        meta = body["metadata"]
        present = self.secrets.get(meta["name"])
        if name is None and present is not None:
            return web.json_response({"kind": "Status"}, status=409)
        if name is not None:
            if present is None:
                return web.json_response({"kind": "Status"}, status=404)
            if present["metadata"]["resourceVersion"] != meta.get("resourceVersion"):
                return web.json_response({"kind": "Status"}, status=409)
        version = str(int(present["metadata"]["resourceVersion"]) + 1 if present else 1)
        self.secrets[meta["name"]] = {**body, "metadata": {**meta, "resourceVersion": version}}
        return web.json_response(self.secrets[meta["name"]], status=201 if name is None else 200)


@asynccontextmanager
async def api_server(folder: Path, pki: Path) -> AsyncIterator[ApiServer]:
    """Serves ``/api/v1/namespaces/kyb/secrets``; ``account`` is what a pod of it has mounted."""
    account = folder / "account"
    account.mkdir(parents=True)
    (account / "token").write_text(f"{TOKEN}\n")
    (account / "namespace").write_text("kyb")
    (account / "ca.crt").write_bytes((pki / "ca.crt").read_bytes())
    server = ApiServer(account)
    app = web.Application()
    path = "/api/v1/namespaces/kyb/secrets"
    app.add_routes([web.route("*", path, server.handle), web.route("*", path + "/{name}", server.handle)])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "server.crt", pki / "server.key")
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()
