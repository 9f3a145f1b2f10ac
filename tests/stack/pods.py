"""Pods of tests, each an engine with one seat, and small nodes for them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kybernate.dev.stack import StackOptions

POD = """---
apiVersion: v1
kind: Pod
metadata:
  name: {model}
  annotations: {{kyb.ai/model: {model}, kyb.ai/backend: fake}}
spec:
  containers:
    - name: engine
      image: fake
      command: [python, -m, kybernate.dev.fakes.engine, --model, {model}, --vram, {vram}]
      resources: {{limits: {{kyb.ai/gpu-{size}x-seat: 1}}}}
"""


ONE_GROUP = """
profiles: [{name: one, resource: kyb.ai/gpu-1x-seat, groupSize: 1, seatsPerGroup: 2}]
gpuTopology: {groups: [{name: G0, gpus: [0]}]}
"""
"""Configuration of a node with one GPU and two seats."""
TWO_GROUPS = ONE_GROUP.replace("{name: G0, gpus: [0]}", "{name: G0, gpus: [0]}, {name: G1, gpus: [1]}")
"""With two GPUs, and two seats on each."""


def pod(model: str, *, vram: str = "60GiB", size: int = 1) -> str:
    """One document of a pod file; ``size``: GPUs of the seat."""
    return POD.format(model=model, vram=vram, size=size)


def small_node(folder: Path, config: str, pods: Iterable[str], **options: Any) -> StackOptions:
    """Write configuration and pods into the folder; the options of a stack with them: one GPU, four times as fast."""
    config_file, pod_file = folder / "config.yaml", folder / "pods.yaml"
    config_file.write_text(config)
    pod_file.write_text("".join(pods))
    fields: dict[str, Any] = {"gpus": 1, "announce": False, "speed": 4} | options
    return StackOptions(config=config_file, pods=pod_file, **fields)
