"""What a router reads in requests to it: paths of engines, names of models, priority and patience of callers."""

import contextlib
import math
import re
from collections.abc import Mapping

from kybernate.config_errors import ConfigError
from kybernate.envelope import LONGEST_NAME
from kybernate.http_api import ApiError, printable

RouterError = ApiError
"""Errors of the router's own; all services use one class."""


# --- engine paths ----------------------------------------------------------------------------------------------------

PATHS = (
    # OpenAI
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/moderations",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    # Anthropic
    "/v1/messages",
    "/v1/messages/count_tokens",
    # of engines
    *(f"{version}/{name}" for version in ("/v1", "") for name in ("rerank", "score", "classify", "pooling")),
    "/v2/rerank",
    "/v1/tokenize",
    "/v1/detokenize",
    "/tokenize",
    "/detokenize",
    "/infill",
    "/generate",
)
"""Paths of inference calls. Engines have further ones that load adapters, sleep or run code."""


def engine_paths(more: str) -> frozenset[bytes]:
    """Return the paths that are forwarded. Raises ConfigError."""
    found = {*PATHS}
    for path in filter(None, (path.strip() for path in more.split(","))):
        if re.fullmatch(r"(/[\w.~-]*[\w~-])+", path, re.ASCII) is None:
            raise ConfigError(f"KYB_ENGINE_PATHS={more!r}: {path!r} is not a plain path, such as /v1/reconstruct")
        found.add(path)
    return frozenset(path.encode() for path in found)


def aliases_of(text: str) -> dict[str, str]:
    """Return the models by their further names. Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        alias, _, model = (part.strip() for part in pair.partition("="))
        if not printable(alias) or not printable(model) or alias in found:
            raise ConfigError(
                f"KYB_ALIASES={text!r}: {pair!r}: write alias=model, each alias once, with commas between"
            )
        found[alias] = model
    for alias, model in found.items():
        if model in found:
            raise ConfigError(
                f"KYB_ALIASES={text!r}: {alias} stands for {model}, an alias; name its model {found[model]}"
            )
    return found


# --- requests ---------------------------------------------------------------------------------------------------------


def model_of(model: object, how: str = 'the body must name its model: {"model": "…"}') -> str:
    """Return the model of a request; ``how`` explains in the error where to name it. Raises RouterError 400."""
    if not isinstance(model, str) or not printable(model):
        raise RouterError(400, "model_missing", f"{how}, in at most {LONGEST_NAME} printable characters")
    return model


PRIORITIES = {"low": -1, "normal": 0, "high": 1}


def priority_of(headers: Mapping[str, str], most: int) -> int:
    """Return the priority that X-Kyb-Priority asks for, at most ``most``. Raises RouterError 400."""
    asked = headers.get("x-kyb-priority")
    if asked is None:
        return min(0, most)
    name = asked.strip().lower()
    if name not in PRIORITIES:
        raise RouterError(400, "invalid_priority", f"X-Kyb-Priority: {name[:40]!r}: send low, normal or high")
    return min(PRIORITIES[name], most)


_PATIENCE = (("x-kyb-timeout", 1.0), ("x-stainless-read-timeout", 1.0), ("x-envoy-expected-rq-timeout-ms", 0.001))
"""Headers with the time after which a caller gives up, and their unit in seconds: ours, OpenAI's clients', Envoy's."""


def patience_of(headers: Mapping[str, str]) -> tuple[float | None, str]:
    """Return after how many wall seconds without an answer the caller gives up (None: unknown), and its header."""
    least: float | None = None
    by = ""
    for name, unit in _PATIENCE:
        if name in headers:
            with contextlib.suppress(ValueError):
                seconds = float(headers[name]) * unit
                if 0 < seconds < (math.inf if least is None else least):
                    least, by = seconds, name.title()
    return least, by
