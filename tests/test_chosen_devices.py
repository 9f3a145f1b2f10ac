"""A pod that sets CUDA_VISIBLE_DEVICES itself would run on another group's GPU: kubelet puts its variables last.

Onboard removes it; the webhook and ``kyb config check --pods`` refuse it. What an image sets, or a pod that was made
before, the manager finds by the GPUs that its processes use: ``tests/manager/test_foreign.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from kybernate.config import ConfigError, load
from kybernate.dev.stack import LAPTOP
from kybernate.dev.stack.pod_file import load_pods
from kybernate.onboard import onboard
from services.webhook.core.mutation import mutate
from services.webhook.core.probes import PodRefusedError
from services.webhook.settings import WebhookSettings

CONFIG = load(LAPTOP / "config.yaml")
NAMES = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"]


def container(name: str, resource: str) -> dict[str, Any]:
    env = [{"name": "HF_TOKEN", "value": "x"}, {"name": name, "value": "0"}]
    limits = {resource: "1", "memory": "1Gi"}
    return {"name": "engine", "image": "vllm/vllm-openai", "args": ["--model", "m"], "env": env} | {
        "resources": {"limits": limits, "requests": {"memory": "1Gi"}}
    }


def pod(name: str) -> dict[str, Any]:
    metadata = {"name": "p", "annotations": {"kyb.ai/model": "m", "kyb.ai/backend": "fake"}}
    spec = {"containers": [container(name, "kyb.ai/gpu-1x-seat"), {"name": "other", "env": [{"name": name}]}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.mark.parametrize("name", NAMES)
def test_onboard_removes_it_and_says_so(name: str) -> None:
    spec = {
        "template": {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [container(name, "nvidia.com/gpu")]}}
    }
    given = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
    done = onboard(given)
    env = done.manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [one["name"] for one in env] == ["HF_TOKEN", "VLLM_SERVER_DEV_MODE"]
    assert f"{name} removed: the seat sets it, and the pod's own value would win" in done.notes


@pytest.mark.parametrize("name", NAMES)
def test_the_webhook_refuses_it(name: str) -> None:
    with pytest.raises(PodRefusedError, match=f"container engine sets {name}, which the seat sets: remove it"):
        mutate(pod(name), WebhookSettings())
    mutate(pod("HF_HOME"), WebhookSettings())


def test_the_webhook_refuses_a_gpu_beside_the_seat_and_an_annotation_among_the_labels() -> None:
    second = pod("HF_HOME")
    second["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "1"
    second["metadata"]["labels"] = {"kyb.ai/tier": "gold", "kyb.ai/model": "m", "kyb.ai/state": "active"}
    with pytest.raises(PodRefusedError) as refused:
        mutate(second, WebhookSettings())
    assert str(refused.value).splitlines() == [
        "container engine asks for nvidia.com/gpu beside its seat, which has the GPUs: remove it",
        "label kyb.ai/tier is an annotation: move it there",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_of_pods_refuses_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "pods.yaml"
    file.write_text(yaml.safe_dump(pod(name)))
    with pytest.raises(ConfigError, match=rf"containers\[0\].env\[1\]: '{name}': chooses another GPU than the seat's"):
        load_pods(file, CONFIG, "any")
    file.write_text(yaml.safe_dump(pod("HF_HOME")))
    assert load_pods(file, CONFIG, "any")[0].container == "engine"
