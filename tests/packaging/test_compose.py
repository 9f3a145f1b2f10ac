"""compose.yaml, read as a file: what every container must have, and that its pods are those of ``kyb up``."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kybernate import __version__
from kybernate.config import load
from kybernate.dev.fakes.kubelet import manifest
from kybernate.dev.stack.options import LAPTOP
from kybernate.dev.stack.pod_file import load_pods
from services.checkpointer.settings import CheckpointerSettings
from services.console.settings import ConsoleSettings
from services.gpu_manager.settings import ManagerSettings
from services.plugin.settings import PluginSettings
from services.router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "kyb-plugin": PluginSettings,
    "kyb-gpu-manager": ManagerSettings,
    "kyb-checkpointer": CheckpointerSettings,
    "kyb-router": RouterSettings,
    "kyb-console": ConsoleSettings,
}


def interpolated(text: str, **env: str) -> str:
    """As Compose reads it where only these variables are set; the inner ones first."""

    def value(found: re.Match[str]) -> str:
        name, how, other = found.groups()
        return env.get(name, other) if how == "-" else other if name in env else ""

    while text != (text := re.sub(r"\$\{([A-Z_]+):([-+])([^${}]*)\}", value, text)):
        pass
    return text


COMPOSE: dict[str, Any] = yaml.safe_load(interpolated((ROOT / "compose.yaml").read_text()))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOT = {"demo"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_shut_in(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    limits = service["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    assert service["logging"]["options"]["max-size"]
    assert name in ONE_SHOT or service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if service.get("profiles") != ["gpu"]])
def test_without_gpus_no_container_is_root_or_has_a_capability(name: str) -> None:
    assert not {"user", "cap_add"} & set(SERVICES[name])


def test_only_router_and_console_are_reached_from_outside_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"router": ["127.0.0.1:8780:8780"], "console": ["127.0.0.1:8781:8781"]}
    assert [name for name, network in COMPOSE["networks"].items() if not network.get("internal")] == ["front", "egress"]


def test_the_console_gets_the_routers_certificate_and_neither_its_key_nor_the_keys_of_callers() -> None:
    text = (ROOT / "compose.yaml").read_text()
    given = yaml.safe_load(interpolated(text, KYB_ACCESS_DIR="./access", KYB_TLS_NAME="box.lan"))["services"]
    assert given["router"]["volumes"] == ["./access:/etc/kybernate/access:ro"]
    certificate = given["console"]["environment"]["KYB_ROUTER_CA_FILE"]
    assert given["console"]["volumes"] == [f"./access/tls.crt:{certificate}:ro"]
    keys_alone = yaml.safe_load(interpolated(text, KYB_ACCESS_DIR="./access"))["services"]["console"]["volumes"]
    assert keys_alone == SERVICES["console"]["volumes"] == [f"tls.crt:{certificate}:ro"], "an empty volume"


def test_streams_are_made_again_when_nats_has_lost_its_store() -> None:
    init = SERVICES["bus-init"]
    assert init["restart"] == "unless-stopped"
    folder = next(option.partition("=")[2] for option in init["command"] if option.startswith("--keep="))
    assert init["healthcheck"]["test"] == ["CMD", "test", "-f", f"{folder}/ready"]
    waiting = [
        s["depends_on"]["bus-init"]["condition"] for s in SERVICES.values() if "bus-init" in s.get("depends_on", {})
    ]
    assert set(waiting) == {"service_healthy"}


def test_engines_driver_manager_and_checkpointer_see_the_same_process_ids() -> None:
    for namespace, names in {
        "service:node": {"driver", "kubelet", "plugin", "manager", "checkpointer", "demo"},
        "host": {"gpu-kubelet", "gpu-plugin", "gpu-manager", "gpu-checkpointer"},
    }.items():
        assert {name for name, service in SERVICES.items() if service.get("pid") == namespace} == names


@pytest.mark.parametrize(
    "name", [name for name, service in SERVICES.items() if service.get("command", [""])[0] in SETTINGS]
)
def test_services_understand_their_settings(name: str) -> None:
    service = SERVICES[name]
    environment = {key: str(value) for key, value in service["environment"].items()}
    environment["KYB_HEALTH_HOST"] = "127.0.0.1"  # there a name of the network, which nothing resolves here
    SETTINGS[service["command"][0]].from_env(environment)


@pytest.mark.parametrize("name", SERVICES)
def test_everything_that_is_mounted_is_declared(name: str) -> None:
    service = SERVICES[name]
    mounts = service.get("volumes", [])
    assert {mount.partition(":")[0] for mount in mounts if isinstance(mount, str)} <= set(COMPOSE["volumes"])
    assert set(service.get("networks", [])) <= set(COMPOSE["networks"])
    for folder in [ROOT / mount["source"] for mount in mounts if isinstance(mount, dict)]:
        assert (folder / "config.yaml").is_file()
        assert (folder / "pods.yaml").is_file()


def test_the_image_is_the_one_that_make_image_makes() -> None:
    images = {service["image"] for service in SERVICES.values()}
    ours = f"kybernate:{__version__}"
    assert images == {ours, f"{ours}-dev", f"kybernate-engine:{__version__}"}


def test_the_pods_are_those_of_kyb_up_each_on_its_own_port() -> None:
    config = load(LAPTOP / "config.yaml")
    files = (LAPTOP / "config.yaml", ROOT / "examples/compose/config.yaml")
    assert len({file.read_text().partition("\n")[2] for file in files}) == 1  # but for the comment
    ours = load_pods(ROOT / "examples/compose/pods.yaml", config)
    laptop = load_pods(LAPTOP / "pods.yaml", config)
    assert [(p.model, p.resource, p.vram_bytes) for p in ours] == [(p.model, p.resource, p.vram_bytes) for p in laptop]
    check_ports(ROOT / "examples/compose/pods.yaml", [p.port for p in ours])


def test_the_gpu_boxs_pods_fit_its_configuration() -> None:
    config = load(ROOT / "examples/gpu-box/config.yaml")
    pods = load_pods(ROOT / "examples/gpu-box/pods.yaml", config, "cuda")
    check_ports(ROOT / "examples/gpu-box/pods.yaml", [p.port for p in pods])


def check_ports(path: Path, ports: list[int]) -> None:
    """Pods on the host's network say which port they take, and each takes another."""
    assert len(set(ports)) == len(ports)
    for pod, port in zip(manifest.load(path), ports, strict=True):
        assert pod.host_network
        command = pod.containers[0].command
        assert command[command.index("--port") + 1] == str(port)


def test_fakes_are_what_compose_takes_by_default() -> None:
    assert "COMPOSE_PROFILES=fake\n" in (ROOT / ".env").read_text()
    assert {tuple(service.get("profiles", ())) for service in SERVICES.values()} == {
        (),
        ("fake",),
        ("gpu",),
        ("demo",),
        ("fake", "demo"),
    }
