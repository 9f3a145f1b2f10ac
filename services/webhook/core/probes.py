"""The probes of an engine's container, and how each one is pointed to kyb-probe. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"startupProbe": "startup", "livenessProbe": "liveness", "readinessProbe": "readiness"}
Json = dict[str, Any]


class PodRefusedError(Exception):
    """The pod cannot be parked; the text names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ProbeMove:
    """One probe that is pointed to kyb-probe."""

    path: str
    """JSON pointer of the probe."""
    kind: str
    """startup, liveness or readiness."""
    handler: str
    """httpGet, tcpSocket or grpc."""
    port: int
    """Port of the engine."""
    scheme: str
    """HTTP, HTTPS, TCP or GRPC."""
    timeout: float
    """Seconds."""
    warnings: tuple[str, ...] = ()

    def patch(self, listen: int) -> list[Json]:
        """Return the changes that point the probe to kyb-probe at port ``listen``."""
        if self.handler == "tcpSocket":
            # kyb-probe's port always accepts connections, so it must report over HTTP whether the engine's port does.
            return [
                {"op": "remove", "path": f"{self.path}/tcpSocket"},
                {"op": "add", "path": f"{self.path}/httpGet", "value": {"path": "/tcp", "port": listen}},
            ]
        changes: list[Json] = [{"op": "replace", "path": f"{self.path}/{self.handler}/port", "value": listen}]
        if self.scheme == "HTTPS":  # kyb-probe uses HTTPS to the engine, and HTTP to kubelet on the same node
            changes.append({"op": "replace", "path": f"{self.path}/httpGet/scheme", "value": "HTTP"})
        return changes


def found(path: str, container: Mapping[str, Any]) -> list[ProbeMove]:
    """Return the probes of the container at this JSON pointer. Raises PodRefusedError."""
    moves = []
    for name, kind in KINDS.items():
        probe = container.get(name)
        if not probe:
            continue
        where = f"container {container.get('name')}: its {name}"
        handler = next((one for one in ("httpGet", "tcpSocket", "grpc") if probe.get(one)), None)
        if handler is None:
            raise PodRefusedError(
                f"{where} runs a command, which cannot run while the engine is parked, so kubelet would restart it; "
                f"probe the engine over the network instead: httpGet, e.g. path /health, tcpSocket or grpc"
            )
        given = probe[handler]
        if given.get("host"):
            raise PodRefusedError(
                f"{where} names a host ({given['host']}); remove {handler}.host: probes go to the pod"
            )
        scheme = {"tcpSocket": "TCP", "grpc": "GRPC"}.get(handler) or str(given.get("scheme") or "HTTP").upper()
        port, timeout = _port(given.get("port"), container, where), float(probe.get("timeoutSeconds") or 1)
        warnings: tuple[str, ...] = ()
        if kind != "readiness" and scheme == "GRPC" and probe.get("failureThreshold") == 1:
            warnings = (
                f"{where} allows no failure, and parking during a probe can cause one; set failureThreshold to 3",
            )
        moves.append(ProbeMove(f"{path}/{name}", kind, handler, port, scheme, timeout, warnings))
    return moves


def targets(moves: Sequence[ProbeMove], ports: Sequence[int]) -> str:
    """Return the value of KYB_PROBE_TARGETS for kyb-probe."""
    found = [
        {"listen": listen, "port": move.port, "kind": move.kind, "scheme": move.scheme, "timeout": move.timeout}
        for move, listen in zip(moves, ports, strict=True)
    ]
    return json.dumps(found)


def _port(port: object, container: Mapping[str, Any], where: str) -> int:
    """Return the port number of a number or a name, as kubelet resolves it. Raises PodRefusedError."""
    if isinstance(port, int):
        return port
    named = {one.get("name"): one.get("containerPort") for one in container.get("ports") or ()}
    number = named.get(port)
    if isinstance(number, int):
        return number
    if str(port).isdigit():
        return int(str(port))
    known = ", ".join(sorted(str(name) for name in named if name)) or "none"
    raise PodRefusedError(f"{where} uses port {port!r}, which is not a port of the container (known: {known})")
