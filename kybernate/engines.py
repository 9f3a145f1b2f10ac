"""What is known of engines: the ways of parking a seat by name, and how many requests an engine works on. Pure."""

import re

from kybernate.extras import names

RESTART = "restart"
"""Ends the container, which starts cold: the floor."""
DRIVER_BACKENDS = ("cuda", "fake")
"""Park through the driver's checkpoint: requests in flight stay frozen with the processes, and seats may move."""
OWN_ENGINE_BACKENDS = ("vllm", "vllm-2", "sglang", "trtllm", "unload")
ENGINE_BACKENDS = (*OWN_ENGINE_BACKENDS, *names("kybernate.backends", besides=OWN_ENGINE_BACKENDS))
"""Call the engine: it sleeps, or unloads its models. Those of other packages are entry points."""
BACKENDS = (*DRIVER_BACKENDS, *ENGINE_BACKENDS, RESTART)
"""All names that a pod may choose."""
REHEARSED = ("vllm",)
"""Sleep and wake once before they serve: the pinned host memory of the first sleep is used again by later ones."""
PINNING = ("vllm", "sglang")
"""Copy weights to pinned host memory, and keep it while they are active."""
SIGNED = "trtllm"
"""Its key signs calls, and is therefore never sent, also not by a backend that the seat was demoted to."""
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""Where engines count their requests; the second is TensorRT-LLM's, whose first has none."""
RUNNING = re.compile(
    rb"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs|trtllm_num_requests_(?:running|waiting)"
    rb"|llamacpp:requests_(?:processing|deferred))(?:\{[^}]*\})?\s+([0-9.eE+]+)",
    re.MULTILINE,
)
"""In the names of vLLM, SGLang, TensorRT-LLM and llama.cpp."""


def next_backend(backend: str, *, mig: bool = False) -> str:
    """The backend that a seat is demoted to; empty below the floor. ``mig``: the driver cannot checkpoint its GPUs."""
    if backend == RESTART:
        return ""
    return "cuda" if backend in ENGINE_BACKENDS and not mig else RESTART


def requests_in(metrics: bytes) -> int | None:
    """The number of requests; None when there is no such metric, or it is no number."""
    found = RUNNING.findall(metrics)
    try:
        return int(sum(float(value) for value in found)) if found else None
    except (ValueError, OverflowError):
        return None
