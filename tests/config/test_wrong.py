"""Wrong configurations of each kind: each is read by what reads it for people, which names cause and remedy.

Files of nodes and their pods by ``kyb config check``, the chart's values by helm (``tests/helm/test_values.py``).
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.cli.config import report
from kybernate.cli.console import find_url
from kybernate.cli.output import CliError
from kybernate.config import ConfigError
from kybernate.settings import SettingsError
from kybernate.tls import ServerCertificate
from services.checkpointer.settings import CheckpointerSettings
from services.console.settings import ConsoleSettings
from services.gpu_manager.settings import ManagerSettings
from services.router.settings import RouterSettings
from tests.config.files import write
from tests.config.test_bad_config import BAD, ONE

POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: qwen
  annotations:
    {0}
spec:
  containers:
    - name: engine
      image: vllm/vllm-openai:v0.11.0
      resources: {{limits: {{kyb.ai/gpu-1x-seat: 1}}}}
"""
ADDED = {
    "hostMemory: 512": "hostMemory: 512: is not a size with a unit; write",
    "hostMemory: 512KiB": "is too little for the copy of any model; write at least",
    "    packing: memory\n    memoryReserve: 900GiB": (
        "profiles[0].memoryReserve: '900.0 GiB': no memory is left for seats: GPUs here have 80.0 GiB; lower it"
    ),
    "policy: {name: exhaustive, settings: {capSlos: 3}}": (
        "policy.settings.capSlos: unknown key; there is none; remove it"
    ),
    "drainSeconds: 600000": "drainSeconds: 600000: is out of range; it must be",
    "    memoryReserve: 4GiB": (
        ":6: profiles[0].memoryReserve: counts with packing: memory alone; write packing: memory, or remove it"
    ),
    "reserved: {tier/golden: [prod]}": ":6: reserved.tier/golden: is not a tier; did you mean gold?",
    "policy: {name: {a: 1}}": "policy.name: is a mapping; it must be text",
    "policy: {name: quantum, settings: 3}": "policy.settings: 3: is a number; it must be a mapping",
}
FILES = BAD | {text: (f"{ONE}{text}\n", expected) for text, expected in ADDED.items()}
ANNOTATIONS = {
    'kyb.ai/model: ""': "kyb.ai/model: '': is no name; write the name that clients request",
    "kyb.ai/prefer-group: G9": "kyb.ai/prefer-group: 'G9': is no group of kyb.ai/gpu-1x-seat; did you mean G",
    "kyb.ai/backend: cud": "kyb.ai/backend: 'cud': is not a way of parking; write one of",
    "kyb.ai/tier: golden": "kyb.ai/tier: 'golden': is not a tier; did you mean gold?, or add it below tiers:",
    "kyb.ai/slo: fast": "kyb.ai/slo: 'fast': is not a duration above 0 with a unit; write",
    'kyb.ai/slo: "20"': "kyb.ai/slo: '20': is not a duration above 0 with a unit; write",
    "kyb.ai/pin: maybe": "kyb.ai/pin: 'maybe': is neither true nor false; write",
    "kyb.ai/pin: true": "kyb.ai/pin: true: annotations are text; put the value in quotes",
    'kyb.ai/port: "70000"': "kyb.ai/port: '70000': is not a port; write a number from 1 to 65535",
    'kyb.ai/vram: "60"': "kyb.ai/vram: '60': is not a size with a unit; write bytes with a unit",
    "kyb.ai/vram: 40k": "kyb.ai/vram: '40k': is not a size with a unit; write bytes",
    "kyb.ai/rebalance: never": "kyb.ai/rebalance: 'never': is neither true nor false; write",
    "kyb.ai/max-requests: many": "kyb.ai/max-requests: 'many': is not a number of requests; write",
    'kyb.ai/max-requests: "0"': "kyb.ai/max-requests: '0': is not a number of requests; write",
    'kyb.ai/probe-port: "80"': "kyb.ai/probe-port: '80': is not a port; write a number from 1024",
    "kyb.ai/stall-budget: 30s": "kyb.ai/stall-budget: is not a known annotation; remove it: requests in flight end",
    "kyb.ai/vrm: 60GiB": "kyb.ai/vrm: is not a known annotation; did you mean kyb.ai/vram?",
    "kyb.ai/gang: two": "kyb.ai/gang: is not a known annotation; a model on several groups is one seat",
    'kyb.ai/model: "qwen "': "kyb.ai/model: 'qwen ': is no name; write the name that clients request",
    "kyb.ai/slo: 999h": "kyb.ai/slo: '999h': is not a duration above 0 with a unit; write",
    "KYB.AI/tier: gold": "KYB.AI/tier: is not a known annotation; did you mean kyb.ai/tier?",
    "kyb.ai/verify: sure": "kyb.ai/verify: 'sure': is neither on nor off; write",
}
APP = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: qwen
spec:
  replicas: 1
  template:
    metadata:
      annotations: {kyb.ai/model: qwen}
    spec:
      containers:
        - {name: engine, image: vllm, resources: {limits: {kyb.ai/gpu-1x-seat: 1}}}
"""
PINNED = APP.replace("model: qwen", "pin: 'true'")
LIMITS = "limits: {kyb.ai/gpu-1x-seat: 1}"
SEATS = "kyb.ai/gpu-1x-seat: 9 pods ask for it and this machine has 4 seats of it; remove pods"
WORKLOADS = {
    "a StatefulSet of more than there are": (
        APP.replace("replicas: 1", "replicas: 9").replace("Deployment", "StatefulSet"),
        SEATS,
    ),
    "a Deployment in a List": (
        "apiVersion: v1\nkind: List\nitems:\n  - " + APP.replace("replicas: 1", "replicas: 9").replace("\n", "\n    "),
        SEATS,
    ),
    "an annotation of the Deployment": (
        APP.replace("  name: qwen\n", "  name: qwen\n  annotations: {kyb.ai/tier: gold}\n"),
        ":5: metadata.annotations.kyb.ai/tier: has no effect there; move it to metadata.annotations of the Pod",
    ),
    "a seat of an init container": (
        APP + "      initContainers: [{name: load, image: x, resources: {" + LIMITS + "}}]\n",
        "spec.template.spec.initContainers[0].resources.limits.kyb.ai/gpu-1x-seat: is asked for by an init container;",
    ),
    "a GPU beside the seat": (
        APP.replace("seat: 1", "seat: 1, nvidia.com/gpu: 1"),
        "resources.limits.nvidia.com/gpu: is a GPU beside that of the seat; remove it",
    ),
    "more pins than places": (
        PINNED.replace("replicas: 1", "replicas: 2"),
        "2 of its pods are pinned and its groups run 1 at a time, so that others never serve; take kyb.ai/pin from",
    ),
}
CHANGED = {
    ("replicas: 1", "replicas: 9"): SEATS,
    ("replicas: 1", "replicas: two"): ":6: spec.replicas: 'two': is no number of pods;",
    ("Deployment", "Deploymnt"): ":2: kind: 'Deploymnt': is not a Pod; write",
    ("template", "tmplate"): "spec.template: is missing or not a mapping;",
    ("annotations:", "labels:"): ":9: spec.template.metadata.labels.kyb.ai/model: has no effect there; move it",
    ("limits", "requests"): "requests.kyb.ai/gpu-1x-seat: is asked for without a limit; write it below limits",
}
WORKLOADS |= {f"{new} for {old}": (APP.replace(old, new), wrong) for (old, new), wrong in CHANGED.items()}
ENVIRONMENT: dict[str, tuple[type, str]] = {
    "KYB_PORT=abc": (RouterSettings, "KYB_PORT='abc': is text; it must be a whole number"),
    "KYB_PORT=99999": (RouterSettings, "KYB_PORT='99999': is out of range; it must be at most 65535"),
    "KYB_HOLD_SECONDS=soon": (RouterSettings, "KYB_HOLD_SECONDS='soon': is text; it must be a number"),
    "KYB_HOLD_SECOND=1": (RouterSettings, "unknown setting KYB_HOLD_SECOND='1'; did you mean KYB_HOLD_SECONDS?"),
    "KYB_QUEUE_LIMIT=1.5": (RouterSettings, "KYB_QUEUE_LIMIT='1.5': is text; it must be a whole number"),
    "KYB_LOG_LEVEL=loud": (ManagerSettings, "KYB_LOG_LEVEL='loud': is not known; write 'debug', 'info'"),
    "KYB_NATS_URL=http://x": (ManagerSettings, "begins with none of nats://, tls://"),
    "KYB_HOLD_SECONDS=inf": (RouterSettings, "KYB_HOLD_SECONDS='inf': is not a finite number; write a number"),
    "KYB_SPEED=1e400": (ManagerSettings, "KYB_SPEED='1e400': is not a finite number; write a number"),
    "KYB_STATE_DIR=": (ManagerSettings, "KYB_STATE_DIR='': is no path; give one, or do not set it"),
    "KYB_NODE=": (ManagerSettings, "KYB_NODE='': is empty; give at least one"),
    "KYB_ADVERTISE_URL=router": (RouterSettings, "KYB_ADVERTISE_URL='router': is no address; write http://host:port"),
    "KYB_ROUTER_URL=box.lan:8780": (ConsoleSettings, "'box.lan:8780': is no address; write http://host:port"),
    "KYB_KUBELET_URL=http://[::1": (ManagerSettings, "'http://[::1': is no address; write http://host:port"),
    "KYB_PARK_ALLOW=all": (CheckpointerSettings, "unknown: all; known are several-gpus"),
}


def refused(read: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, SettingsError)) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused_with_cause_and_remedy(name: str, tmp_path: Path) -> None:
    text, expected = FILES[name]
    path = write(tmp_path, text)
    found = refused(lambda: report(path, 4, None))
    assert expected in found, found
    assert ";" in found, "a remedy follows"


@pytest.mark.parametrize("line", ANNOTATIONS)
def test_a_wrong_annotation_is_refused_with_cause_and_remedy(line: str, tmp_path: Path) -> None:
    config = write(tmp_path, ONE)
    pods = write(tmp_path, POD.format(line), "pods.yaml")
    found = refused(lambda: report(config, 4, pods))
    assert ANNOTATIONS[line] in found, found
    assert found.startswith((f"{pods}:6: metadata.annotations.", f"{pods}: pod qwen: ")), found
    assert ";" in found


@pytest.mark.parametrize("name", WORKLOADS)
def test_what_makes_pods_is_checked_as_they_are(name: str, tmp_path: Path) -> None:
    text, expected = WORKLOADS[name]
    config = write(tmp_path, ONE)
    pods = write(tmp_path, text, "pods.yaml")
    found = refused(lambda: report(config, 1, pods))
    assert expected in found, found
    pods.write_text(APP)
    assert report(config, 1, pods)["default"]["warnings"] == []


LISTED = ONE + "gpuTopology: {groups: [{name: G0, gpus: [0]}]}\n"


def test_pods_are_counted_against_the_seats_that_the_file_lists(tmp_path: Path) -> None:
    config = write(tmp_path, LISTED)
    pods = write(tmp_path, APP.replace("replicas: 1", "replicas: 9"), "pods.yaml")
    assert SEATS in refused(lambda: report(config, None, pods))


@pytest.mark.parametrize(
    ("text", "gpus", "pods", "said"),
    [
        (ONE, None, False, ["the groups of a machine"]),
        (ONE, None, True, ["the groups of a machine, seats for 9 pods of kyb.ai/gpu-1x-seat (4 in a group)"]),
        (LISTED.replace("seatsPerGroup: 4", "seatsPerGroup: 9"), None, True, ["the groups of a machine"]),
        (ONE, 3, True, []),
    ],
)
def test_what_was_not_checked_is_said(
    text: str, gpus: int | None, pods: bool, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, text)
    file = write(tmp_path, APP.replace("replicas: 1", "replicas: 9"), "pods.yaml")
    found = report(config, gpus, file if pods else None)["default"]
    assert found["warnings"] == [f"not checked without --gpus N: {one}" for one in said]


@pytest.mark.parametrize("there", [True, False])
def test_a_wrong_certificate_is_refused_with_cause_and_remedy(there: bool, tmp_path: Path) -> None:
    cert = tmp_path / "tls.crt"
    if there:
        cert.write_text("nothing")
        (tmp_path / "tls.key").write_text("nothing")
    why = "no PEM file, or a key of another certificate" if there else "No such file or directory"
    found = refused(lambda: ServerCertificate(cert))
    key = tmp_path / "tls.key" if there else cert
    assert f"{cert}: {why}; it must hold a PEM certificate that fits the key in {key}" in found


def test_an_empty_socket_of_the_fake_driver_is_none() -> None:
    """As a compose file sets it: that the GPUs are fake would follow from it."""
    assert not ManagerSettings.from_env({"KYB_FAKE_DRIVER": ""}).fakes


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8781", "http://lo cal:1", "http://box/ü", f"http://{'a' * 64}.lan", "http://a..b", "http://[::1"),
        *("http://box:99999", "http://box:0", "http://me:secret@box", "http://box?a=b", "http://box#a", "ftp://box"),
    ],
)
def test_an_address_that_no_request_reaches_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYB_URL", url)
    with pytest.raises(CliError, match=r"is no address; write http://host:port"):
        find_url()


@pytest.mark.parametrize(
    "url", ["http://box:8781", "https://box/kyb/", "http://[::1]:1", "http://bücher.lan", "http://_a"]
)
def test_an_address_may_have_a_path_and_any_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KYB_URL", url)
    assert find_url() == url.rstrip("/")


@pytest.mark.parametrize("line", ENVIRONMENT)
def test_a_wrong_variable_is_refused_with_cause_and_remedy(line: str) -> None:
    service, expected = ENVIRONMENT[line]
    name, _, value = line.partition("=")
    assert expected in refused(lambda: service.from_env({name: value}))  # type: ignore[attr-defined]
