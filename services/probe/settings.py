"""Settings of kyb-probe, read without the services' Settings class, whose imports need more memory than the probe."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("startup", "liveness", "readiness")
SCHEMES = ("HTTP", "HTTPS", "TCP", "GRPC")


class ProbeSettingsError(Exception):
    """A setting is wrong or missing; the text names it and the remedy."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """One probe of kubelet: the port that receives it, and the engine's port that it was meant for."""

    listen: int
    """Port that kubelet probes."""
    port: int
    """Port of the engine."""
    kind: str
    """startup, liveness or readiness."""
    scheme: str = "HTTP"
    timeout: float = 1.0
    """Kubelet's timeoutSeconds."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """All settings."""

    host_ip: str
    """KYB_HOST_IP: address of the node, where its manager listens."""
    manager_port: int
    """KYB_MANAGER_PORT; 0: there is no manager."""
    pod_uid: str
    """KYB_POD_UID"""
    pod_ip: str
    """KYB_POD_IP: where the engine listens, as kubelet would probe it. Default: loopback."""
    health_port: int
    """KYB_HEALTH_PORT: /healthz of kyb-probe itself."""
    targets: tuple[ProbeTarget, ...]
    """KYB_PROBE_TARGETS: JSON list of targets."""


def read(env: Mapping[str, str] = os.environ) -> ProbeSettings:
    """Read the settings; unknown KYB_* names are ignored, since the pod may use them. Raises ProbeSettingsError."""
    for name in ("KYB_HOST_IP", "KYB_POD_UID", "KYB_PROBE_TARGETS"):
        if not env.get(name):
            raise ProbeSettingsError(
                f"{name} is not set: kyb-webhook sets it; start kyb-probe through the webhook only"
            )
    return ProbeSettings(
        host_ip=env["KYB_HOST_IP"],
        manager_port=_port("KYB_MANAGER_PORT", env.get("KYB_MANAGER_PORT", "9471")),
        pod_uid=env["KYB_POD_UID"],
        pod_ip=env.get("KYB_POD_IP") or "127.0.0.1",
        health_port=_port("KYB_HEALTH_PORT", env.get("KYB_HEALTH_PORT", "9479")),
        targets=_targets(env["KYB_PROBE_TARGETS"]),
    )


def _targets(text: str) -> tuple[ProbeTarget, ...]:
    try:
        targets = tuple(ProbeTarget(**one) for one in json.loads(text))
    except (ValueError, TypeError) as error:
        remedy = 'a JSON list of {"listen": 9480, "port": 8000, "kind": "liveness", "scheme": "HTTP", "timeout": 1}'
        raise ProbeSettingsError(f"KYB_PROBE_TARGETS={text!r}: {error}; write {remedy}") from None
    for one in targets:
        if one.kind not in KINDS or one.scheme not in SCHEMES:
            raise ProbeSettingsError(f"KYB_PROBE_TARGETS: {one}: kind is one of {KINDS}, scheme one of {SCHEMES}")
    return targets


def _port(name: str, text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise ProbeSettingsError(f"{name}={text!r} is not a port; write a number from 0 to 65535")
    return int(text)
