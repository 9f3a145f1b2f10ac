"""The webhook's certificate: what the chart makes, what an upgrade keeps, and what the API server trusts."""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, KUBE_VERSION, NAMESPACE, Json, Rendered, helm, render

HOST = f"kybernate-webhook.{NAMESPACE}.svc"
OWN = "kybernate-webhook-cert"
DISCOVERY: Json = {
    "/version": {"major": "1", "minor": "36", "gitVersion": f"v{KUBE_VERSION}"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [{"name": "secrets", "kind": "Secret", "namespaced": True, "singularName": "", "verbs": ["get"]}],
    },
}


class Cluster:
    """An API server with Secrets and nothing else, which ``lookup`` asks."""

    def __init__(self, folder: Path) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        """Data (base64) by name."""
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, name = self.path.partition("?")[0].partition(f"/api/v1/namespaces/{NAMESPACE}/secrets/")
                body: Any = DISCOVERY.get(path)
                if name in cluster.secrets:
                    body = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": name}}
                    body["data"] = cluster.secrets[name]
                status = 200 if body else 404
                missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
                data = json.dumps(body or missing).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._config = folder / "kubeconfig"
        here = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": ""}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [here], "contexts": [context]}
        self._config.write_text(yaml.safe_dump({**config, "current-context": "here"}))

    def __enter__(self) -> "Cluster":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def upgrade(self) -> Rendered:
        """What ``helm upgrade`` would write now."""
        where = ("--kubeconfig", str(self._config), "--dry-run=server", "--kube-version", KUBE_VERSION)
        values = ("--namespace", NAMESPACE, "--set", "webhook.enabled=true")
        done = helm("template", "kyb", str(CHART), *where, *values)
        assert done.returncode == 0, done.stderr
        return Rendered([one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def trusted(found: Rendered) -> str | None:
    """The caBundle as PEM."""
    (hook,) = found.kind("MutatingWebhookConfiguration")[0]["webhooks"]
    bundle = hook["clientConfig"].get("caBundle")
    return None if bundle is None else base64.b64decode(bundle).decode()


def mounted(found: Rendered) -> str:
    """The Secret that the webhook serves with."""
    (tls,) = [one for one in found.container("webhook").pod["volumes"] if one["name"] == "tls"]
    return str(tls["secret"]["secretName"])


def handshake(folder: Path, data: dict[str, str], authority: str, host: str) -> None:
    """A TLS handshake of the webhook with a client that trusts this authority. Raises ssl.SSLError."""
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(base64.b64decode(data[name]))
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=authority).wrap_bio(to_client, to_server, server_hostname=host)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.cipher() is not None


def test_the_certificate_is_signed_for_the_service_by_the_authority_that_the_api_server_trusts(tmp_path: Path) -> None:
    found = render("fake-webhook")
    data, authority = found.one("Secret", OWN)["data"], trusted(found)
    assert authority == base64.b64decode(data["ca.crt"]).decode()
    assert set(data) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is kept nowhere"
    assert mounted(found) == OWN
    handshake(tmp_path, data, authority, HOST)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, data, authority, "elsewhere.svc")


def test_an_upgrade_keeps_the_certificate(cluster: Cluster) -> None:
    first = cluster.upgrade()
    cluster.secrets[OWN] = first.one("Secret", OWN)["data"]
    again = cluster.upgrade()
    assert again.one("Secret", OWN)["data"] == cluster.secrets[OWN]
    assert trusted(again) == trusted(first)
    assert again.container("webhook").pod == first.container("webhook").pod, "no pod is replaced"


def test_a_secret_that_lacks_a_key_is_replaced(cluster: Cluster) -> None:
    data = cluster.upgrade().one("Secret", OWN)["data"]
    cluster.secrets[OWN] = {**data, "tls.key": ""}
    again = cluster.upgrade()
    assert again.one("Secret", OWN)["data"]["tls.crt"] != data["tls.crt"]
    assert trusted(again) == base64.b64decode(again.one("Secret", OWN)["data"]["ca.crt"]).decode()


def test_the_authority_of_an_earlier_version_stays_trusted_while_its_pods_are_replaced(cluster: Cluster) -> None:
    before = "-----BEGIN CERTIFICATE-----\nof the Job\n-----END CERTIFICATE-----\n"
    cluster.secrets["kybernate-webhook-tls"] = {"ca.crt": base64.b64encode(before.encode()).decode()}
    found = cluster.upgrade()
    own = base64.b64decode(found.one("Secret", OWN)["data"]["ca.crt"]).decode()
    assert trusted(found) == own + before


def test_a_given_certificate_is_used_and_none_is_made() -> None:
    found = render("own-secrets")
    assert mounted(found) == "my-webhook-cert"
    assert trusted(found) == "PEM of my authority"
    assert not [one for one in found.kind("Secret") if one["metadata"]["name"] == OWN]
    by_cert_manager = render("cert-manager")
    assert mounted(by_cert_manager) == by_cert_manager.kind("Certificate")[-1]["spec"]["secretName"]
    assert trusted(by_cert_manager) is None, "cert-manager writes it"
