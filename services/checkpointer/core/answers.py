"""What an engine is asked to prove that its model is unharmed, and whether two answers are the same. Pure.

A 200, a healthy engine and a running process say nothing about weights. So the same greedy request is asked before the
first park and after every activation and rollback, for each served model.
"""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

PROMPT = "One, two, three, four, five,"
_GREEDY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "seed": 0}

REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "logprobs": ("/v1/completions", {**_GREEDY, "logprobs": 2}),
    "text": ("/v1/completions", _GREEDY),
    "embedding": ("/v1/embeddings", {"input": PROMPT}),
}
"""Path and body by kind, without the model; the first kind that an engine answers for a model is used for it."""
MISSHAPEN = (LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading a JSON value raises that has another shape than the engine's API says, or a number of 400 digits."""


class ModelAnswer(BaseModel):
    """The answer of one model to the request of ``kind``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    kind: str
    tokens: tuple[str, ...] = ()
    """Where the engine gives no log probabilities: the whole text as one."""
    logprobs: tuple[float, ...] = ()
    likely: tuple[dict[str, float], ...] = ()
    """Log probabilities of the likeliest tokens at each place."""
    vector: tuple[float, ...] = ()


def read_answer(model: str, kind: str, body: Any) -> ModelAnswer:
    """The answer in the body of a reply. Raises ValueError if it is none, or has a number that no journal can keep."""
    try:
        answer = _answer(model, kind, body)
    except MISSHAPEN as error:
        raise ValueError(f"the reply is no answer: {error!r}") from error
    likely = (number for place in answer.likely for number in place.values())
    if not all(map(math.isfinite, (*answer.logprobs, *answer.vector, *likely))):
        raise ValueError(f"the reply for {model} has numbers that are not finite")
    return answer


def _answer(model: str, kind: str, body: Any) -> ModelAnswer:
    if kind == "embedding":
        return ModelAnswer(model=model, kind=kind, vector=tuple(map(float, body["data"][0]["embedding"])))
    choice = body["choices"][0]
    found = choice.get("logprobs") or {}
    if not found.get("tokens"):
        return ModelAnswer(model=model, kind=kind, tokens=(str(choice["text"]),))
    return ModelAnswer(
        model=model,
        kind=kind,
        tokens=tuple(found["tokens"]),
        logprobs=tuple(map(float, found.get("token_logprobs") or ())),
        likely=tuple(found.get("top_logprobs") or ()),
    )


def worse_health(before: int | None, now: int) -> bool:
    """True if the status of its health is worse than ``before`` its first park; None: it was not answered.

    200 and 404 (Ollama has no such path) are well, 5xx is ill by its own word. Any other may be of something between,
    and says nothing.
    """
    if before is not None and well(before):
        return not well(now)
    return now >= 500 and (before is None or before < 500)


def well(status: int) -> bool:
    """True for the status of a healthy engine: no other is better."""
    return status in (200, 404)


def difference(before: ModelAnswer, now: ModelAnswer, tolerance: float) -> str:
    """How ``now`` differs from ``before`` by more than ``tolerance``; empty if it does not.

    (1) Vectors are compared by their distance as a share of their length: of a thousand components each is small.
    (2) Log probabilities are compared token by token. (3) Where the token itself differs, it may only be one that was
    as likely before: greedy decoding takes either, and what follows is another answer.
    """
    if len(before.vector) != len(now.vector):  # (1)
        return f"{before.model} answers {len(now.vector)} numbers and not {len(before.vector)}"
    if not math.dist(before.vector, now.vector) <= tolerance * math.hypot(*before.vector):
        return f"the embedding of {before.model} is another one"
    for place, (old, new) in enumerate(zip(before.tokens, now.tokens, strict=False)):
        if old != new:  # (3)
            tie = place < len(before.likely) and place < len(before.logprobs) and new in before.likely[place]
            if tie and before.logprobs[place] - before.likely[place][new] <= tolerance:
                return ""
            return f"{before.model} answers {new!r} as token {place + 1} and not {old!r}"
    if len(before.tokens) != len(now.tokens):
        return f"{before.model} answers {len(now.tokens)} tokens and not {len(before.tokens)}"
    close = (abs(old - new) <= tolerance for old, new in zip(before.logprobs, now.logprobs, strict=False))  # (2)
    return "" if all(close) else f"log probabilities of {before.model} changed by more than {tolerance:g}"
