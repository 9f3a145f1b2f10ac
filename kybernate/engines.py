"""What is known of engines: the ways of parking a seat by name, how many requests an engine works on, and how many
tokens it has generated. Pure."""

import re
from math import isfinite

from kybernate.extras import names

RESTART = "restart"
"""Ends the container, which starts cold: the floor."""
DRIVER_BACKENDS = ("cuda", "fake")
"""Park through the driver's checkpoint: requests in flight stay frozen with the processes, and seats may move."""
VLLM_CUDA = "vllm+cuda"
"""vLLM's sleep, then the driver's checkpoint of what it keeps; on where a self-test has passed."""
OWN_ENGINE_BACKENDS = ("vllm", "vllm-2", VLLM_CUDA, "sglang", "trtllm", "unload")
_OWN = (*DRIVER_BACKENDS, *OWN_ENGINE_BACKENDS, RESTART)
ENGINE_BACKENDS = (*OWN_ENGINE_BACKENDS, *names("kybernate.backends", besides=_OWN))
"""Call the engine: it sleeps, or unloads its models. Those of other packages are entry points."""
BACKENDS = (*DRIVER_BACKENDS, *ENGINE_BACKENDS, RESTART)
"""All names that a pod may choose."""
REHEARSED = ("vllm", VLLM_CUDA)
"""Sleep and wake once before they serve: the pinned host memory of the first sleep is used again by later ones."""
WITHOUT_COPY = ("vllm-2", "unload", RESTART)
"""Keep no copy of the weights in host memory; those of other packages may keep one."""
PINNING = ("vllm", VLLM_CUDA, "sglang")
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
GENERATED = re.compile(
    rb"^(?:vllm:generation_tokens_total|sglang:generation_tokens_total|llamacpp:tokens_predicted_total)"
    rb"(?:\{[^}]*\})?\s+([0-9.eE+]+)",
    re.MULTILINE,
)
"""In the names of vLLM, SGLang and llama.cpp."""


def next_backend(backend: str, *, mig: bool = False) -> str:
    """The backend that a seat is demoted to; empty below the floor. ``mig``: the driver cannot checkpoint its GPUs."""
    if backend == RESTART:
        return ""
    if backend == VLLM_CUDA:
        return "vllm"
    return "cuda" if backend in ENGINE_BACKENDS and not mig else RESTART


def requests_in(metrics: bytes) -> int | None:
    """The number of requests; None when there is no such metric, or it is no number."""
    found = _sum(RUNNING, metrics)
    return None if found is None else int(found)


def tokens_in(metrics: bytes) -> float | None:
    """The tokens generated since the engine started; None when there is no such metric, or it is no number."""
    return _sum(GENERATED, metrics)


def _sum(name: re.Pattern[bytes], metrics: bytes) -> float | None:
    found = name.findall(metrics)
    try:
        total = sum(float(value) for value in found)
    except ValueError:
        return None
    return total if found and isfinite(total) else None
