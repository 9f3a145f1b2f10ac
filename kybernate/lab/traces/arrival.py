"""One request of a trace, and a trace: arrivals in order of time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class TraceError(Exception):
    """A trace cannot be read; the text says file, line (0: none), what is wrong and what to do."""

    def __init__(self, path: str, line: int, what: str, remedy: str) -> None:
        super().__init__(f"{path}:{line}: {what}; {remedy}" if line else f"{path}: {what}; {remedy}")


class Arrival(NamedTuple):
    """One request."""

    at_seconds: float
    """Since the start of the trace (or of the part of it that was asked for)."""
    model: str
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""


@dataclass(frozen=True)
class Trace:
    """Arrivals in order of time. Each iteration reads the file anew; errors come up while iterating."""

    name: str
    format: str
    """Name of the recognised format, e.g. ``azure-llm``."""
    read: Callable[[], Iterator[Arrival]]

    def __iter__(self) -> Iterator[Arrival]:
        return self.read()

    def weights(self) -> dict[str, int]:
        """Output tokens by model, heaviest first: what each model asks of its GPU. Reads the whole trace."""
        totals: dict[str, int] = {}
        for arrival in self:
            totals[arrival.model] = totals.get(arrival.model, 0) + arrival.output_tokens
        return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
