"""Requests that an engine works on or has queued, by its own metrics. Pure."""

import re

RUNNING = re.compile(
    rb"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs|trtllm_num_requests_(?:running|waiting)"
    rb"|llamacpp:requests_(?:processing|deferred))(?:\{[^}]*\})?\s+([0-9.eE+]+)",
    re.MULTILINE,
)
"""In the names of vLLM, SGLang, TensorRT-LLM and llama.cpp."""


def requests_in(metrics: bytes) -> int | None:
    """The number of requests; None when there is no such metric, or it is no number."""
    found = RUNNING.findall(metrics)
    try:
        return int(sum(float(value) for value in found)) if found else None
    except (ValueError, OverflowError):
        return None
