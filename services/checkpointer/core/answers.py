"""What an engine is asked to prove that its model is unharmed. Pure.

A 200, a healthy engine and a running process say nothing about weights. So one greedy completion is asked for before
the first park, and again after every activation and rollback.
"""

from typing import Any, NamedTuple

PATH = "/v1/completions"
GREEDY = {"prompt": "One, two, three, four, five,", "max_tokens": 8, "temperature": 0, "seed": 0}
"""The request, without its model."""
MISSHAPEN = (LookupError, TypeError, AttributeError)
"""What reading a JSON value raises that has another shape than the engine's API says."""


class Answer(NamedTuple):
    """The text with which a model completed the prompt."""

    model: str
    text: str


def text_of(body: Any) -> str:
    """The text in the body of a completion, its first 200 characters. Raises ValueError if it is none."""
    try:
        return str(body["choices"][0]["text"])[:200]
    except MISSHAPEN as error:
        raise ValueError(f"the reply is no answer: {error!r}") from error


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
