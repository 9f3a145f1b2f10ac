"""Pods of tests: an engine with one seat."""

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


def pod(model: str, *, vram: str = "60GiB", size: int = 1) -> str:
    """One document of a pod file; ``size``: GPUs of the seat."""
    return POD.format(model=model, vram=vram, size=size)
