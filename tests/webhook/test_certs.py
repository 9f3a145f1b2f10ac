"""Certificates, with the real openssl and an API server of a few lines."""

import base64
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kybernate.cli import webhook
from kybernate.cli.webhook import CertsError, Wanted, ensure, good, make
from kybernate.health import HttpServer
from kybernate.kube import Kube

WANTED = Wanted("kyb", "hook-tls", "hook", "hooks")


@dataclass
class Api:
    """Objects by path; writes need the version that was read."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if request.method == "GET":
            return web.json_response(self.objects.get(path, {}), status=200 if path in self.objects else 404)
        body = await request.json()
        path = path if request.method == "PUT" else f"{path}/{body['metadata']['name']}"
        version = self.objects.get(path, {}).get("metadata", {}).get("resourceVersion")
        if version != body["metadata"].get("resourceVersion"):
            return web.json_response({}, status=409)
        body["metadata"]["resourceVersion"] = str(int(version or 0) + 1)
        self.objects[path] = body
        self.written.append(path.rpartition("/")[2])
        return web.json_response(body)

    @property
    def bundle(self) -> str:
        hook = self.objects[CONFIGURATION]["webhooks"][0]
        return base64.b64decode(hook["clientConfig"]["caBundle"]).decode()

    def data(self, key: str) -> str:
        return base64.b64decode(self.objects["/api/v1/namespaces/kyb/secrets/hook-tls"]["data"][key]).decode()


CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hooks"


@pytest.fixture
async def api() -> Api:
    hooks = [{"name": "pods.kyb.ai", "clientConfig": {"service": {"name": "hook"}}}]
    return Api({CONFIGURATION: {"metadata": {"name": "hooks", "resourceVersion": "1"}, "webhooks": hooks}})


@pytest.fixture
async def kube(api: Api, tmp_path: Path) -> AsyncIterator[Kube]:
    (tmp_path / "token").write_text("t")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(HttpServer(app, "127.0.0.1", 0))
        client = Kube(server.url, tmp_path)
        stack.push_async_callback(client.close)
        yield client


async def run(kube: Kube, wanted: Wanted = WANTED, wait: float = 30.0) -> str:
    return await ensure(kube, wanted, wait, lambda _: None)


async def test_a_certificate_is_made_once_and_trusted_before_it_is_used(api: Api, kube: Kube) -> None:
    assert "made a certificate for 3650 days" in await run(kube)
    assert api.written == ["hooks", "hook-tls"]
    assert api.bundle == api.data("ca.crt")
    assert api.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["service"] == {"name": "hook"}
    assert "the certificate is good" in await run(kube)
    assert api.written == ["hooks", "hook-tls"]
    api.objects[CONFIGURATION]["webhooks"][0]["clientConfig"]["caBundle"] = ""  # as after a helm upgrade
    await run(kube)
    assert api.bundle == api.data("ca.crt")


async def test_a_certificate_is_renewed_before_it_expires_and_the_old_authority_stays_trusted(
    api: Api, kube: Kube
) -> None:
    await run(kube, Wanted("kyb", "hook-tls", "hook", "hooks", days=30, renew_days=0))
    before = api.data("tls.crt"), api.data("ca.crt")
    assert "made a certificate" in await run(kube)
    assert api.data("tls.crt") != before[0]
    assert api.bundle.endswith(before[1])
    await run(kube, Wanted("kyb", "hook-tls", "other", "hooks"))  # another service: another name
    assert api.bundle.count("BEGIN CERTIFICATE") == 2  # older authorities are dropped


async def test_a_missing_webhook_configuration_is_an_error(api: Api, kube: Kube) -> None:
    api.objects.clear()
    with pytest.raises(CertsError, match="name the right one with --configuration"):
        await run(kube, wait=0)
    assert api.written == []


async def test_a_strict_client_accepts_the_certificate(tmp_path: Path) -> None:
    made = await make(WANTED)
    assert await good(made, WANTED)
    assert not await good({**made, "tls.key": ""}, WANTED)
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")

    async def ok(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/", ok)
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    async with HttpServer(app, "127.0.0.1", 0, tls=context) as server, aiohttp.ClientSession() as http:
        async with http.get(server.url, ssl=trust, server_hostname=WANTED.names[0]) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(server.url, ssl=trust, server_hostname="elsewhere.svc")


async def test_without_openssl_the_error_names_the_alternative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(CertsError, match=r"openssl is not installed.*webhook.certManager.enabled=true"):
        await webhook.make(WANTED)
