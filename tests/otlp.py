"""A collector of traces: takes OTLP over HTTP on loopback and decodes it."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Received:
    """A span as it was exported. Ids in hexadecimal; times in unix seconds."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    begin: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()


class Collector:
    """``url`` for OTEL_EXPORTER_OTLP_ENDPOINT; ``trace(id)``: the spans of it so far, by begin."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._bodies: list[bytes] = []

    def take(self, body: bytes) -> None:
        self._bodies.append(body)

    def trace(self, trace: str) -> list[Received]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in list(self._bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = _plain(resource.resource.attributes)["service.name"]
                found += [
                    Received(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        _plain(span.attributes),
                        tuple(event.name for event in span.events),
                    )
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
        return sorted((span for span in found if span.trace == trace), key=lambda span: span.begin)


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if known:
                collector.take(body)
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
