"""The ways of parking a seat by name, and which one follows where one fails. Pure."""

RESTART = "restart"
"""Ends the container, which starts cold: the floor."""
DRIVER_BACKENDS = ("cuda", "fake")
"""Park through the driver's checkpoint: requests in flight stay frozen with the processes, and seats may move."""
ENGINE_BACKENDS = ("vllm", "vllm-2", "sglang", "unload")
"""Call the engine: it sleeps, or unloads its models."""
REHEARSED = ("vllm",)
"""Sleep and wake once before they serve: the pinned host memory of the first sleep is used again by later ones."""


def next_backend(backend: str, *, mig: bool = False) -> str:
    """The backend that a seat is demoted to; empty below the floor. ``mig``: the driver cannot checkpoint its GPUs."""
    if backend == RESTART:
        return ""
    return "cuda" if backend in ENGINE_BACKENDS and not mig else RESTART
