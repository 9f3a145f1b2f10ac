"""The webhook as a process: HTTPS, reviews, a renewed certificate."""

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.webhook.core.mutation import ReviewError, respond
from tests.until import until
from tests.webhook.patching import patched
from tests.webhook.test_mutation import OPTIONS, http, pod


def review(thing: Any, **request: Any) -> dict[str, Any]:
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    fields = {"uid": "r1", "kind": kind, "operation": "CREATE", "namespace": "demo", "object": thing, **request}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": fields}


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "UPDATE"},
        {"subResource": "eviction"},
        {"kind": {"group": "apps", "kind": "Deployment"}},
        {"object": None},
    ],
)
def test_requests_that_do_not_create_a_pod_are_allowed_unchanged(request_: dict[str, Any]) -> None:
    response = respond(review(pod({"livenessProbe": http()}), **request_), OPTIONS)
    assert response["response"] == {"uid": "r1", "allowed": True}


@pytest.mark.parametrize("wrong", [{}, [], {"apiVersion": "v1"}, {"apiVersion": "admission.k8s.io/v1", "request": {}}])
def test_a_body_that_is_not_a_review_is_an_error(wrong: Any) -> None:
    with pytest.raises(ReviewError):
        respond(wrong, OPTIONS)


def self_signed(folder: Path, name: str) -> None:
    key, cert = folder / "tls.key", folder / "new.crt"
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name}"
    subprocess.run(
        [*make.split(), "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    cert.rename(folder / "tls.crt")


def env(folder: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KYB_")}
    files = {"KYB_TLS_CERT_FILE": str(folder / "tls.crt")}
    return {**clean, **files, "KYB_PORT": "0", "KYB_LOG_FORMAT": "json", "KYB_PROBE_IMAGE": "i:1", **more}


@pytest.fixture
async def program(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """URLs of the webhook and of its health."""
    self_signed(tmp_path, "one")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.webhook", env=env(tmp_path), stderr=asyncio.subprocess.PIPE
    )
    started = json.loads(await process.stderr.readline())
    try:
        yield {"url": started["url"].replace("127.0.0.1", "localhost"), "health": started["health"]}
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_it_answers_reviews_over_https_and_uses_a_renewed_certificate(
    program: dict[str, str], tmp_path: Path
) -> None:
    given = pod({"livenessProbe": http()})

    async def ask(body: Any) -> tuple[int, Any]:
        trust = ssl.create_default_context(cafile=tmp_path / "tls.crt")
        async with (
            aiohttp.ClientSession() as http_,
            http_.post(program["url"] + "/mutate", json=body, ssl=trust) as response,
        ):
            return response.status, await response.json()

    status, answer = await ask(review(given))
    assert status == 200
    patch = json.loads(base64.b64decode(answer["response"]["patch"]))
    assert patched(given, patch)["spec"]["initContainers"][0]["image"] == "i:1"
    status, answer = await ask(review(pod({"livenessProbe": {"exec": {"command": ["x"]}}})))
    assert (answer["response"]["allowed"], answer["response"]["status"]["code"]) == (False, 422)
    assert "runs a command" in answer["response"]["status"]["message"]
    assert (await ask({"kind": "nonsense"}))[0] == 400
    async with aiohttp.ClientSession() as http_, http_.get(program["health"] + "/metrics") as metrics:
        assert 'kybernate_webhook_reviews_total{outcome="refused"} 1.0' in await metrics.text()
    self_signed(tmp_path, "two")  # as kubelet replaces a Secret's files; only the new one is trusted

    async def trusted() -> bool:
        try:
            return (await ask(review(given)))[0] == 200
        except aiohttp.ClientConnectorCertificateError:
            return False

    await until(trusted, what="the webhook serves the new certificate", interval=0.2)


def test_without_a_certificate_the_error_tells_where_one_comes_from(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.webhook"], env=env(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "KYB_TLS_CERT_FILE" in done.stderr
    assert "the chart makes them (docs/dev/webhook.md)" in done.stderr
