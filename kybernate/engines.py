"""What is known of engines: the ways of parking a seat by name, how many requests an engine works on, and how many
tokens it has generated. Pure."""

import re
from math import isfinite

from kybernate.extras import names

RESTART = "restart"
"""Ends the container, which starts cold: the floor."""
DRIVER_BACKENDS = ("cuda", "fake")
"""Park through the driver's checkpoint; seats may move."""
OWN_ENGINE_BACKENDS = ("vllm", "vllm-2", "sglang", "unload")
_OWN = (*DRIVER_BACKENDS, *OWN_ENGINE_BACKENDS, RESTART)
ENGINE_BACKENDS = (*OWN_ENGINE_BACKENDS, *names("kybernate.backends", besides=_OWN))
"""Call the engine: it sleeps, or unloads its models. Those of other packages are entry points."""
BACKENDS = (*DRIVER_BACKENDS, *ENGINE_BACKENDS, RESTART)
"""All names that a pod may choose."""
REHEARSED = ("vllm",)
"""Sleep and wake once before they serve: the pinned host memory of the first sleep is used again by later ones."""
WITHOUT_COPY = ("vllm-2", "unload", RESTART)
"""Keep no copy of the weights in host memory; those of other packages may keep one."""
PINNING = ("vllm", "sglang")
"""Copy weights to pinned host memory, and keep it while they are active."""
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Where engines count their requests; the second is TensorRT-LLM's, whose first has none."""
_RUNNING = (
    rb"vllm:num_requests_running|sglang:num_running_reqs|trtllm_num_requests_running|llamacpp:requests_processing"
)
_WAITING = rb"vllm:num_requests_waiting|sglang:num_queue_reqs|trtllm_num_requests_waiting|llamacpp:requests_deferred"
"""In the names of vLLM, SGLang, TensorRT-LLM and llama.cpp."""
BUSY = re.compile(rb"^(?:%b)(?:\{[^}\n]*\})?[ \t]+([0-9.eE+]+)" % (_RUNNING + b"|" + _WAITING), re.MULTILINE)
"""Samples of these metrics, each within its line: one pass over any text. The group is the value."""


def next_backend(backend: str, *, mig: bool = False) -> str:
    """The backend that a seat is demoted to; empty below the floor. ``mig``: the driver cannot checkpoint its GPUs."""
    if backend == RESTART:
        return ""
    return "cuda" if backend in ENGINE_BACKENDS and not mig else RESTART


def requests_in(metrics: bytes) -> int | None:
    """The number of requests; None when there is no such metric, or it is no number."""
    found = BUSY.findall(metrics)
    try:
        total = sum(float(value) for value in found)
    except ValueError:
        return None
    return int(total) if found and isfinite(total) else None
