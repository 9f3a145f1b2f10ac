"""The preStop hook that waits until a router has no calls left."""

import http.client
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kybernate.clock import Clock
from services.router import draining
from services.router.draining import main, requests_left
from services.router.metrics import Metrics


class Fake(HTTPServer):
    """Serves the metrics of a router; each answer has one request in flight less."""

    held, in_flight = 0, 0

    def text(self) -> bytes:
        """Return the metrics as the router writes them."""
        registry = CollectorRegistry()
        seat = SimpleNamespace(in_flight=range(self.in_flight), model="")
        model = SimpleNamespace(held=range(self.held))
        table: Any = SimpleNamespace(upstreams={"s": seat}, models={"m": model})
        rest: Any = SimpleNamespace(connected=True, total=0, open=0, dropped=0)
        Metrics(registry, Clock(1), rest, table, rest, rest, rest, None)
        text = generate_latest(registry)
        self.in_flight = max(0, self.in_flight - 1)
        return text


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


def test_held_and_in_flight_requests_count_as_left(router: Fake) -> None:
    router.held, router.in_flight = 3, 2
    assert requests_left(url(router)) == 5


def test_it_waits_for_all_workers(router: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "POLL_SECONDS", 0.01)
    router.in_flight = 4
    main(["--url", "http://127.0.0.1:9", "--url", url(router), "--first", "0", "--seconds", "30"])
    assert router.in_flight == 0


def test_it_reports_how_many_requests_are_cut(router: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    router.held = 2
    main(["--url", url(router), "--first", "0", "--seconds", "0"])
    assert "2 requests are cut after 0 s" in capsys.readouterr().err


def test_a_router_that_is_too_busy_to_answer_still_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TimeoutError(), urllib.error.URLError(TimeoutError()), http.client.IncompleteRead(b"")):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(urllib.request, "urlopen", fails)
        assert requests_left("https://127.0.0.1:1") is None


def test_a_router_that_has_ended_has_no_requests_left() -> None:
    assert requests_left("http://127.0.0.1:9") == 0
