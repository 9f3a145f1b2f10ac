"""Traces, off unless the standard ``OTEL_*`` variables turn them on: then the router has a span for each
request (``kybernate.otel``).

A trace never decides anything and never stops a service: what cannot be traced is logged once, and the service goes on.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kybernate.logs import get_logger

if TYPE_CHECKING:
    from kybernate.otel import Tracer

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
PROTOCOL = "http/protobuf"
"""The only one that is spoken, and OpenTelemetry's default."""


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id of a W3C ``traceparent``; None if there is no valid one."""
    found = _TRACEPARENT.match(traceparent) if traceparent else None
    return found[1] if found is not None else None


class TracingError(Exception):
    """Traces are wanted and cannot be made; the text says why, and the remedy."""


def wanted(env: Mapping[str, str]) -> bool:
    """Return whether the environment turns traces on. Raises TracingError where it wants what is not there."""
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if not exporter and not any(env.get(name) for name in _ENDPOINTS):
        return False
    if exporter not in ("", "otlp"):
        raise TracingError(f"OTEL_TRACES_EXPORTER={exporter}: only otlp and none are known here")
    for name in _PROTOCOLS:
        if (protocol := env.get(name, "").strip()) and protocol != PROTOCOL:
            text = f"{name}={protocol}: only {PROTOCOL} is spoken here, which collectors take on port 4318"
            raise TracingError(text)
        if protocol:
            break
    return True


@contextlib.contextmanager
def open_tracer(service: str, instance: str, node: str) -> Iterator["Tracer | None"]:
    """Open the tracer of this process, None where traces are off; at the end export what waits, for a short time."""
    try:
        tracer = _tracer(service, instance, node) if wanted(os.environ) else None
    except Exception as error:  # also whatever the SDK raises
        get_logger().warning("traces.unavailable", reason=str(error), meaning="this service goes on without traces")
        tracer = None
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.close()


def _tracer(service: str, instance: str, node: str) -> "Tracer":
    try:
        from kybernate import otel
    except ImportError as error:
        text = f"{error.name} is not installed; install kybernate[otel], or set OTEL_TRACES_EXPORTER=none"
        raise TracingError(text) from error
    return otel.Tracer(service, instance, node)
