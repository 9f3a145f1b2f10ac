"""Wrong configurations of each kind: each is read by what reads it for people, which names cause and remedy.

Files of nodes and their pods by ``kyb config check``, the chart's values by helm (``tests/helm/test_values.py``).
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from kybernate.api_keys import load as load_keys
from kybernate.cli.config import report
from kybernate.config import ConfigError
from kybernate.settings import SettingsError
from kybernate.tls import ServerCertificate
from services.checkpointer.settings import CheckpointerSettings
from services.gpu_manager.settings import ManagerSettings
from services.router.settings import RouterSettings
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
FILES = BAD | {
    "host memory without a unit": (ONE + "hostMemory: 512\n", "hostMemory: 512: is not a size with a unit; write"),
    "host memory of 512 bytes": (
        ONE + "hostMemory: 512KiB\n",
        "is too little for the copy of any model; write at least",
    ),
    "a reserve above all memory": (
        ONE + "    packing: memory\n    memoryReserve: 900GiB\n",
        "profiles[0].memoryReserve: '900.0 GiB': no memory is left for seats: GPUs here have 80.0 GiB; lower it",
    ),
    "settings of another policy": (
        ONE + "policy: {name: exhaustive, settings: {capSlos: 3}}\n",
        "policy.settings.capSlos: unknown key; there is none; remove it",
    ),
    "a policy without name:": (ONE + "policy: kyb-slo\n", "policy: 'kyb-slo': is not a mapping; write name: kyb-slo"),
}
ANNOTATIONS = {
    'kyb.ai/model: ""': "kyb.ai/model: '': is no name; write the name that clients request",
    "kyb.ai/prefer-group: G9": "kyb.ai/prefer-group: 'G9': is no group of kyb.ai/gpu-1x-seat; did you mean G",
    "kyb.ai/backend: cud": "kyb.ai/backend: 'cud': is not a way of parking; write one of",
    "kyb.ai/tier: golden": "kyb.ai/tier: 'golden': is not a tier; did you mean gold?",
    "kyb.ai/slo: fast": "kyb.ai/slo: 'fast': is not a duration above 0 with a unit; write",
    'kyb.ai/slo: "20"': "kyb.ai/slo: '20': is not a duration above 0 with a unit; write",
    "kyb.ai/pin: maybe": "kyb.ai/pin: 'maybe': is neither true nor false; write",
    "kyb.ai/pin: true": "kyb.ai/pin: true: annotations are text; put the value in quotes",
    'kyb.ai/port: "70000"': "kyb.ai/port: '70000': is not a port; write a number from 1 to 65535",
    'kyb.ai/vram: "60"': "kyb.ai/vram: '60': is ",
    "kyb.ai/vrm: 60GiB": "kyb.ai/vrm: is not a known annotation; did you mean kyb.ai/vram?",
    "kyb.ai/gang: two": "kyb.ai/gang: is not a known annotation; a model on several groups is one seat",
    "kyb.ai/verify: sure": "kyb.ai/verify: 'sure': is neither on nor off; write",
}
KEYS = {
    "keys: [\n": "not valid YAML: ",
    "kys: []\n": "kys: unknown key; did you mean keys?",
    "keys:\n  - {name: a, sha256: xyz, scopes: [infer]}\n": "'xyz': is no SHA-256; make the key and its row with: kyb",
    f"keys:\n  - {{name: a, sha256: {'a' * 64}, scopes: [rule]}}\n": "'rule': is not known; known are admin, gateway",
}
ENVIRONMENT: dict[str, tuple[type, str]] = {
    "KYB_PORT=abc": (RouterSettings, "KYB_PORT='abc': is text; it must be a whole number"),
    "KYB_PORT=99999": (RouterSettings, "KYB_PORT='99999': is out of range; it must be at most 65535"),
    "KYB_HOLD_SECONDS=soon": (RouterSettings, "KYB_HOLD_SECONDS='soon': is text; it must be a number"),
    "KYB_HOLD_SECOND=1": (RouterSettings, "unknown setting KYB_HOLD_SECOND='1'; did you mean KYB_HOLD_SECONDS?"),
    "KYB_QUEUE_LIMIT=1.5": (RouterSettings, "KYB_QUEUE_LIMIT='1.5': is text; it must be a whole number"),
    "KYB_LOG_LEVEL=loud": (ManagerSettings, "KYB_LOG_LEVEL='loud': is not known; write 'debug', 'info'"),
    "KYB_NATS_URL=http://x": (ManagerSettings, "begins with none of nats://, tls://"),
    "KYB_PARK_ALLOW=all": (CheckpointerSettings, "unknown: all; known are several-gpus"),
}


def refused(read: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, SettingsError)) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused_with_cause_and_remedy(name: str, tmp_path: Path) -> None:
    text, expected = FILES[name]
    (path := tmp_path / "config.yaml").write_text(text)
    found = refused(lambda: report(path, 4, None))
    assert expected in found, found
    assert ";" in found, "a remedy follows"


@pytest.mark.parametrize("line", ANNOTATIONS)
def test_a_wrong_annotation_is_refused_with_cause_and_remedy(line: str, tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text(ONE)
    (pods := tmp_path / "pods.yaml").write_text(POD.format(line))
    found = refused(lambda: report(config, 4, pods))
    assert ANNOTATIONS[line] in found, found
    assert ";" in found


@pytest.mark.parametrize("text", KEYS)
def test_a_wrong_file_of_keys_is_refused_with_cause_and_remedy(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "keys.yaml").write_text(text)
    assert KEYS[text] in refused(lambda: load_keys(path))


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


@pytest.mark.parametrize("line", ENVIRONMENT)
def test_a_wrong_variable_is_refused_with_cause_and_remedy(line: str) -> None:
    service, expected = ENVIRONMENT[line]
    name, _, value = line.partition("=")
    assert expected in refused(lambda: service.from_env({name: value}))  # type: ignore[attr-defined]
