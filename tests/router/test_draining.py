"""The hook that lets a router finish before it is stopped."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.router import draining
from services.router.draining import main, requests_left
from services.router.metrics import Metrics


class Fake(HTTPServer):
    """Says the metrics of a router with so many requests, and one less each time."""

    held, in_flight = 0, 0

    def text(self) -> bytes:
        """As the router says it."""
        registry = CollectorRegistry()
        Metrics(registry, held=lambda: [("m", self.held)], in_flight=lambda: self.in_flight)
        said = generate_latest(registry)
        self.in_flight = max(0, self.in_flight - 1)
        return said


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        """Any path."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def router() -> Iterator[Fake]:
    with Fake(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(router: Fake) -> str:
    return f"http://127.0.0.1:{router.server_port}"


def test_what_waits_and_what_is_answered_counts(router: Fake) -> None:
    router.held, router.in_flight = 3, 2
    assert requests_left(url(router)) == 5


def test_it_waits_until_nothing_is_left(router: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_SECONDS", 0.01)
    router.in_flight = 4
    main(["--url", url(router), "--first", "0", "--seconds", "30"])
    assert router.in_flight == 0


def test_it_says_what_is_cut(router: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    router.held = 2
    main(["--url", url(router), "--first", "0", "--seconds", "0"])
    assert "2 requests are cut after 0 s" in capsys.readouterr().err


def test_a_router_that_is_too_busy_to_answer_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TimeoutError(), urllib.error.URLError(TimeoutError()), http.client.IncompleteRead(b"")):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(urllib.request, "urlopen", fails)
        assert requests_left("https://127.0.0.1:1") is None


def test_a_router_that_is_gone_has_nothing_left() -> None:
    assert requests_left("http://127.0.0.1:9") == 0
