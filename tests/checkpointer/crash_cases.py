"""Who is killed, and when → what becomes of the seat: each cell is a case of ``test_crashes.py``, and together a table
of docs/dev/backends.md."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.checkpointer.lie_cases import between, shared_end

PATH = "docs/dev/backends.md"
BEGIN, END = (
    "<!-- Made from tests/checkpointer/crash_cases.py by scripts/generate.py. -->\n",
    "<!-- End of the table of crashes. -->\n",
)
BACKENDS = {
    "vllm": "vLLM",
    "vllm-2": "vLLM, level 2",
    "sglang": "SGLang",
    "ollama": "Ollama",
    "llamacpp": "llama.cpp",
    "restart": "restart",
}
Half = Literal["park", "activate"]
Victim = Literal["checkpointer", "engine", "both"]
MOMENTS = {
    "half": "before the half is journaled",
    "step": "before the call is journaled",
    "call": "before the call",
    "between": "between its calls",
    "called": "after the call",
    "end": "before the end is journaled",
}
DONE = {"park": "parked", "activate": "active"}
UNDONE = {"park": "active", "activate": "parked"}
COLD = "cold start"


class Crash(NamedTuple):
    """One row of one backend."""

    half: Half
    moment: str
    victim: Victim

    def end(self, backend: str) -> str:
        """What becomes of the seat; empty where there is no such moment."""
        if backend == "restart" and self.half == "activate":
            return ""  # its container starts at the gate
        if self.moment == "between" and (backend != "vllm-2" or self.half == "park"):
            return ""  # the others make one call
        if backend == "restart" or self.victim != "checkpointer" or self.moment == "between":
            return COLD
        return (UNDONE if self.moment in ("step", "call") else DONE)[self.half]


def crashes() -> Iterator[Crash]:
    """All rows."""
    victims: tuple[Victim, ...] = ("checkpointer", "engine", "both")
    halves: tuple[Half, ...] = ("park", "activate")
    for victim in victims:
        for half in halves:
            yield from (Crash(half, moment, victim) for moment in MOMENTS)


def embedded(text: str) -> str:
    """The page with the present table."""
    return between(text, BEGIN, END, _table())


def _table() -> str:
    lines = ["| killed | half | when | ends | but |", "|---|---|---|---|---|"]
    for crash in crashes():
        ends = {name: end for backend, name in BACKENDS.items() if (end := crash.end(backend))}
        if ends and crash.victim == "checkpointer":
            only = f" ({', '.join(ends)})" if len(ends) == 1 else ""
            lines.append(f"| {crash.victim} | {crash.half} | {MOMENTS[crash.moment]}{only} | {shared_end(ends)} |")
    for victim in ("engine", "both"):
        [end] = {crash.end(one) for crash in crashes() for one in BACKENDS if crash.victim == victim} - {""}
        lines.append(f"| {victim} | each | each moment | {end} | |")
    return "\n".join(lines) + "\n"
