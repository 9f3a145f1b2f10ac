"""Engine × lie → what becomes of its seat: each cell is a test (``test_lies.py``), and together a table of
docs/dev/backends.md."""

from collections.abc import Mapping

from kybernate.dev.fakes.engine.lies import Lie

PATH = "docs/dev/backends.md"
BEGIN, END = (
    "<!-- Made from tests/checkpointer/lie_cases.py by scripts/generate.py. -->\n",
    "<!-- End of the table of lies. -->\n",
)
VENDORS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "ollama": "Ollama",
    "llamacpp": "llama.cpp",
}
SERVES = "serves on"
BACK = "parked, active"
COLD = "parked, cold start"
AGAIN = "parked, parked, cold start"
ENDS: Mapping[str, Mapping[str, str]] = {
    "": dict.fromkeys(VENDORS, BACK),
    Lie.SLEEP_FAILS: dict.fromkeys(VENDORS, SERVES),
    Lie.SLEEP_HANGS: dict.fromkeys(VENDORS, "cold start"),
    Lie.SLEEP_NOOP: dict.fromkeys(VENDORS, SERVES),
    Lie.SLEEP_IGNORED: dict.fromkeys(VENDORS, SERVES),
    Lie.SLEEP_HALF: dict.fromkeys(VENDORS, SERVES) | {"sglang": "cold start"},
    Lie.SLEEP_LATE: dict.fromkeys(VENDORS, BACK),
    Lie.SLEEP_DIES: dict.fromkeys(VENDORS, "cold start"),
    Lie.SLEEP_BREAKS: dict.fromkeys(VENDORS, COLD),
    Lie.WAKE_FAILS: dict.fromkeys(VENDORS, AGAIN) | {"sglang": COLD},
    Lie.WAKE_HANGS: dict.fromkeys(VENDORS, AGAIN) | {"sglang": COLD, "llamacpp": COLD},
    Lie.WAKE_NOOP: dict.fromkeys(VENDORS, AGAIN) | {"sglang": COLD},
    Lie.WAKE_IGNORED: dict.fromkeys(VENDORS, COLD),
    Lie.WAKE_CUT: dict.fromkeys(VENDORS, BACK),
    Lie.WAKE_DIES: dict.fromkeys(VENDORS, COLD),
    Lie.WAKE_BREAKS: dict.fromkeys(VENDORS, COLD),
    Lie.WAKE_WEDGES: dict.fromkeys(VENDORS, COLD),
    Lie.WAKE_GARBLES: dict.fromkeys(VENDORS, COLD),
}
"""Ends of a park and of the activations after it, by lie ("": none) and vendor."""


def embedded(text: str) -> str:
    """The page with the present table."""
    return between(text, BEGIN, END, _table())


def between(text: str, begin: str, end: str, table: str) -> str:
    """The page with this table between two of its lines."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{table}\n{end}{tail}"


def shared_end(ends: Mapping[str, str]) -> str:
    """Two cells of a table: the end that most have, and those that have another one. ``ends``: name → end."""
    most = max(ends.values(), key=list(ends.values()).count)
    others = dict.fromkeys(end for end in ends.values() if end != most)
    return f"{most} | " + "; ".join(
        f"{end}: {', '.join(name for name, one in ends.items() if one == end)}" for end in others
    )


def _table() -> str:
    lines = ["| lie | ends | but |", "|---|---|---|"]
    for lie, ends in ENDS.items():
        lines.append(f"| {lie or 'none'} | {shared_end({name: ends[one] for one, name in VENDORS.items()})} |")
    return "\n".join(lines) + "\n"
