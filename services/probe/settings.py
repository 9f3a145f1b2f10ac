"""What a probe is told. Read without the settings class of the services, whose imports weigh more than the probe."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("startup", "liveness", "readiness")
SCHEMES = ("HTTP", "HTTPS", "TCP", "GRPC")


class SettingsError(Exception):
    """A setting is wrong or missing; the text says which and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """One probe of kubelet: where it arrives, and where it would have gone."""

    listen: int
    """Port that kubelet asks."""
    port: int
    """Port of the engine."""
    kind: str
    """startup, liveness or readiness."""
    scheme: str = "HTTP"
    timeout: float = 1.0
    """Seconds after which kubelet gives up."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """All that it knows."""

    host_ip: str
    """KYB_HOST_IP: address of the node, where its manager listens."""
    manager_port: int
    """KYB_MANAGER_PORT; 0: there is no manager to ask."""
    pod_uid: str
    """KYB_POD_UID"""
    pod_ip: str
    """KYB_POD_IP: where the engine listens, as kubelet would ask it. Default: loopback."""
    health_port: int
    """KYB_HEALTH_PORT: its own /healthz."""
    targets: tuple[Target, ...]
    """KYB_PROBE_TARGETS: JSON list of targets."""

    @property
    def listen_host(self) -> str:
        """All addresses of the pod's family."""
        return "::" if ":" in self.pod_ip else "0.0.0.0"


def read(env: Mapping[str, str] | None = None) -> ProbeSettings:
    """Raises SettingsError. Unknown names are let be: the pod is somebody else's, with Services of their own."""
    env = os.environ if env is None else env
    for name in ("KYB_HOST_IP", "KYB_POD_UID", "KYB_PROBE_TARGETS"):
        if not env.get(name):
            raise SettingsError(f"{name} is not set: kyb-webhook sets it; start kyb-probe through the webhook only")
    return ProbeSettings(
        host_ip=env["KYB_HOST_IP"],
        manager_port=_port("KYB_MANAGER_PORT", env.get("KYB_MANAGER_PORT", "9471"), least=0),
        pod_uid=env["KYB_POD_UID"],
        pod_ip=env.get("KYB_POD_IP") or "127.0.0.1",
        health_port=_port("KYB_HEALTH_PORT", env.get("KYB_HEALTH_PORT", "9479"), least=0),
        targets=_targets(env["KYB_PROBE_TARGETS"]),
    )


def _targets(text: str) -> tuple[Target, ...]:
    try:
        targets = tuple(Target(**one) for one in json.loads(text))
    except (ValueError, TypeError) as error:
        remedy = 'a JSON list of {"listen": 9480, "port": 8000, "kind": "liveness", "scheme": "HTTP", "timeout": 1}'
        raise SettingsError(f"KYB_PROBE_TARGETS={text!r}: {error}; write {remedy}") from None
    for one in targets:
        if one.kind not in KINDS or one.scheme not in SCHEMES:
            raise SettingsError(f"KYB_PROBE_TARGETS: {one}: kind is one of {KINDS}, scheme one of {SCHEMES}")
    return targets


def _port(name: str, text: str, *, least: int) -> int:
    if not text.isdigit() or not least <= int(text) <= 65535:
        raise SettingsError(f"{name}={text!r} is no port; write a number from {least} to 65535")
    return int(text)
