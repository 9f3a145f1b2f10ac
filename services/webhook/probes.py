"""The probes of an engine's container, and how each is pointed to kyb-probe. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"startupProbe": "startup", "livenessProbe": "liveness", "readinessProbe": "readiness"}
Json = dict[str, Any]


class RefusedError(Exception):
    """The pod cannot be parked as it is; the text says why and what to change."""


@dataclass(frozen=True, slots=True)
class Move:
    """One probe."""

    path: str
    """JSON pointer of it."""
    kind: str
    """startup, liveness or readiness."""
    handler: str
    """httpGet, tcpSocket or grpc."""
    port: int
    """Of the engine."""
    scheme: str
    """HTTP, HTTPS, TCP or GRPC."""
    timeout: float
    """Seconds."""
    warnings: tuple[str, ...] = ()

    def patch(self, listen: int) -> list[Json]:
        """Point it to kyb-probe."""
        if self.handler == "tcpSocket":
            # A listener accepts whatever happens behind it, so only an answer can say that the engine does not.
            return [
                {"op": "remove", "path": f"{self.path}/tcpSocket"},
                {"op": "add", "path": f"{self.path}/httpGet", "value": {"path": "/tcp", "port": listen}},
            ]
        changes: list[Json] = [{"op": "replace", "path": f"{self.path}/{self.handler}/port", "value": listen}]
        if self.scheme == "HTTPS":  # kyb-probe speaks HTTPS to the engine, and plain HTTP to kubelet beside it
            changes.append({"op": "replace", "path": f"{self.path}/httpGet/scheme", "value": "HTTP"})
        return changes


def found(path: str, container: Mapping[str, Any]) -> list[Move]:
    """The probes of a container at this JSON pointer. Raises RefusedError."""
    moves = []
    for name, kind in KINDS.items():
        probe = container.get(name)
        if not probe:
            continue
        where = f"container {container.get('name')}: its {name}"
        handler = next((one for one in ("httpGet", "tcpSocket", "grpc") if probe.get(one)), None)
        if handler is None:
            raise RefusedError(
                f"{where} runs a command, which cannot run while the engine is parked, so kubelet would restart it; "
                f"ask the engine over the network instead: httpGet, e.g. path /health, tcpSocket or grpc"
            )
        asked = probe[handler]
        if asked.get("host"):
            raise RefusedError(f"{where} names a host ({asked['host']}); take {handler}.host away: the pod is asked")
        scheme = {"tcpSocket": "TCP", "grpc": "GRPC"}.get(handler) or str(asked.get("scheme") or "HTTP").upper()
        port, timeout = _port(asked.get("port"), container, where), float(probe.get("timeoutSeconds") or 1)
        moves.append(Move(f"{path}/{name}", kind, handler, port, scheme, timeout, _doubts(where, scheme, kind, probe)))
    return moves


def targets(moves: Sequence[Move], ports: Sequence[int]) -> str:
    """KYB_PROBE_TARGETS of kyb-probe."""
    said = [
        {"listen": listen, "port": move.port, "kind": move.kind, "scheme": move.scheme, "timeout": move.timeout}
        for move, listen in zip(moves, ports, strict=True)
    ]
    return json.dumps(said)


def _port(port: object, container: Mapping[str, Any], where: str) -> int:
    """The number behind a number or a name, as kubelet finds it. Raises RefusedError."""
    if isinstance(port, int):
        return port
    named = {one.get("name"): one.get("containerPort") for one in container.get("ports") or ()}
    number = named.get(port)
    if isinstance(number, int):
        return number
    if str(port).isdigit():
        return int(str(port))
    known = ", ".join(sorted(str(name) for name in named if name)) or "none"
    raise RefusedError(f"{where} asks port {port!r}, and no port of the container is called so (known: {known})")


def _doubts(where: str, scheme: str, kind: str, probe: Mapping[str, Any]) -> tuple[str, ...]:
    """What could go wrong although it works."""
    if kind != "readiness" and scheme == "GRPC" and probe.get("failureThreshold") == 1:
        return (f"{where} restarts after one failure: parking in that moment would be one; set failureThreshold to 3",)
    return ()
