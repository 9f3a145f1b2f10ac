"""Engine × what happens → outcome: each cell is a test (``test_engines.py``), and together the table of
docs/dev/backends.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PATH = "docs/dev/backends.md"
BEGIN, END = (
    "<!-- Made from tests/checkpointer/engine_cases.py by scripts/generate.py. -->\n",
    "<!-- End of the table. -->\n",
)
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "ollama": "Ollama",
    "llamacpp": "llama.cpp",
}

Ending = Literal["parked", "active", "cold start"]
"""Of the half. ``active`` after a park: it serves on; ``parked`` after an activation: it is tried again, and the second
time it starts cold."""


@dataclass(frozen=True)
class Case:
    """One row. ``lies``: of ``tests.checkpointer.engines.PlayedEngine``."""

    half: Literal["park", "activate"]
    what: str
    lies: frozenset[str]
    outcome: Ending
    but: tuple[tuple[str, Ending], ...] = ()
    """Engines for which it is another one."""

    def ending(self, engine: str) -> Ending:
        """The outcome for an engine."""
        return dict(self.but).get(engine, self.outcome)


def _case(half: Literal["park", "activate"], what: str, lies: str, outcome: Ending, **but: Ending) -> Case:
    return Case(half, what, frozenset(lies.split()), outcome, tuple(but.items()))


CASES = (
    _case("park", "it does what its API says", "", "parked"),
    _case("park", "it answers 200, and releases the memory later", "late", "parked"),
    _case("park", "it answers 200 and does nothing", "nothing", "active"),
    _case("park", "it answers 200 and says asleep, and keeps its memory", "nothing claims", "active"),
    _case("park", "it answers 500 and keeps its memory", "nothing fails", "active"),
    _case("park", "it dies during the call", "dies", "cold start"),
    _case("activate", "it does what its API says", "", "active"),
    _case("activate", "it answers 200 and stays asleep", "stays", "parked", sglang="cold start"),
    _case("activate", "it answers 200 and says awake, without its memory", "stays claims", "cold start"),
    _case("activate", "it answers 500: out of memory", "no-room", "parked", sglang="cold start"),
    _case("activate", "it dies during the call", "dies-awake", "cold start"),
    _case("activate", "it is awake and healthy, and answers other tokens", "gibberish", "cold start"),
    _case("activate", "it is awake and healthy, and fails each request", "broken", "cold start"),
)


def embedded(text: str) -> str:
    """The page with the table of the present cases."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{_table()}\n{END}{tail}"


def shared_end(ends: Mapping[str, str]) -> str:
    """Two cells of a table: the end that most have, and those that have another one. ``ends``: name → end."""
    most = max(ends.values(), key=list(ends.values()).count)
    others = dict.fromkeys(end for end in ends.values() if end != most)
    return f"{most} | " + "; ".join(
        f"{end}: {', '.join(name for name, one in ends.items() if one == end)}" for end in others
    )


def _table() -> str:
    lines = ["| | what the engine does | ends | but |", "|---|---|---|---|"]
    for case in CASES:
        cells = shared_end({name: case.ending(engine) for engine, name in ENGINES.items()})
        lines.append(f"| {case.half} | {case.what} | {cells} |")
    return "\n".join(lines) + "\n"
