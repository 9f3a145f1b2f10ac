"""What the router's callers meet: its name, its certificate, its answer; and who may read its key."""

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kybernate.dev.local import local_facts
from kybernate.doctor.outside import from_outside
from tests.test_tls import make

DAY = 86_400.0


class Router(BaseHTTPRequestHandler):
    body = b'{"error": {"message": "model: is missing", "type": "invalid_request_error", "code": "missing"}}'

    def do_POST(self) -> None:
        assert (self.path, self.rfile.read(2)) == ("/v1/chat/completions", b"{}")
        self.send_response(400)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], cert: Path | None = None) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    if cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, cert.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_router_that_answers_its_callers_is_sound() -> None:
    with listening(Router) as port:
        assert from_outside(f"http://127.0.0.1:{port}", None) == ("", None)
    wrong, _ = from_outside(f"http://127.0.0.1:{port}", None)
    assert wrong == f"http://127.0.0.1:{port} does not answer: Connection refused"
    engine, deep = b'{"error": {"message": "model is missing", "code": 400}}', b"[" * 60_000
    for body in (b"<html>not found</html>", b'["error"]', b'{"detail": "not found"}', b"", engine, deep):
        with listening(type("Other", (Router,), {"body": body})) as port:
            text = (
                f"http://127.0.0.1:{port} answers a completion without a model with 400 and no error: is that a router?"
            )
            assert from_outside(f"http://127.0.0.1:{port}", None) == (text, None)


def test_a_name_that_this_machine_cannot_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    wrong, _ = from_outside("https://box.lan:8780", None)
    assert wrong == "https://box.lan:8780: this machine cannot resolve the name box.lan"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_the_certificate_is_checked_as_callers_do_and_its_end_is_read(tmp_path: Path) -> None:
    make(tmp_path, ca="own")
    with listening(Router, tmp_path / "own-server.crt") as port:
        wrong, ends = from_outside(f"https://127.0.0.1:{port}", tmp_path / "own.crt")
        assert wrong == ""
        assert ends is not None
        assert 0 < ends - time.time() < 400 * DAY
        refused, _ = from_outside(f"https://127.0.0.1:{port}", None)
        assert "its certificate is refused: " in refused


def test_a_key_that_others_may_read_is_named_with_the_command(tmp_path: Path) -> None:
    cert, key, keys = (tmp_path / name for name in ("tls.crt", "tls.key", "keys.yaml"))
    for file, mode in ((cert, 0o644), (key, 0o644), (keys, 0o646)):
        file.touch()
        file.chmod(mode)
    stack = {"folder": str(tmp_path), "secrets": {"KYB_TLS_CERT_FILE": str(cert), "KYB_API_KEYS_FILE": str(keys)}}
    (tmp_path / "config.yaml").write_text("profiles: []\n")
    found = local_facts(stack, ())["open_files"]
    assert found == {
        f"the private key {key} can be read by other users of this machine": f"chmod 600 {key}",
        f"{keys} of KYB_API_KEYS_FILE can be written by other users of this machine": f"chmod go-w {keys}",
    }
    key.chmod(0o600)
    keys.chmod(0o640)
    assert local_facts(stack, ())["open_files"] == {}
