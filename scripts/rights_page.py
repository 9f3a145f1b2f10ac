"""What each key can do: a table for ``docs/dev/security.md``. Pure; ``scripts/generate.py`` writes or compares it."""

from collections.abc import Iterable, Mapping

from kybernate.bus.port import AUDIT, BUCKETS, EVENTS, REQUESTS
from kybernate.bus.rights import MEANING, READERS, STREAM_READERS, WRITERS, Role, rights

PATH = "docs/dev/security.md"
BEGIN = "<!-- Made from kybernate/bus/rights.py by scripts/generate.py. -->"
END = "<!-- End of the generated table. -->"


def embedded(page: str) -> str:
    """The page with the table between its two marks. Raises ValueError when a mark is missing."""
    head, _, rest = page.partition(f"{BEGIN}\n")
    _, end, tail = rest.partition(END)
    if not rest or not end:
        raise ValueError(f"{PATH}: the marks {BEGIN!r} and {END!r} are needed around the table")
    return f"{head}{BEGIN}\n\n{roles_table()}\n{END}{tail}"


def roles_table() -> str:
    """Every role. JetStream's subjects are shown as the streams and buckets they give access to."""
    lines = ["| role | users | publishes | subscribes to | streams and buckets |", "|---|---|---|---|---|"]
    for role, may in rights().items():
        publishes, subscribes = _subjects(may.publish), _subjects(may.subscribe)
        lines.append(f"| `{role}` | {MEANING[role]} | {publishes} | {subscribes} | {_stored(role)} |")
    return "\n".join(lines) + "\n"


def _subjects(subjects: Iterable[str]) -> str:
    """Without JetStream and inboxes; those that differ in their last token only, together."""
    together: dict[str, list[str]] = {}
    for subject in subjects:
        if subject.startswith("kyb.v1."):
            head, _, last = subject.removeprefix("kyb.v1.").rpartition(".")
            together.setdefault(head, []).append(last)
    return "<br>".join(f"`{head}.{_either(last)}`" for head, last in together.items()) or "nothing"


def _either(tokens: list[str]) -> str:
    return tokens[0] if len(tokens) == 1 else "{" + ", ".join(tokens) + "}"


def _stored(role: Role) -> str:
    if role is Role.INIT:
        return f"makes and updates all: {_names((EVENTS, AUDIT, REQUESTS, *BUCKETS))}"
    reads = _of(READERS, role) + _of(STREAM_READERS, role)
    live = [bucket for bucket in BUCKETS if f"$KV.{bucket}.>" in _subscribed(role)]
    parts = {"writes": _of(WRITERS, role), "reads": reads, "subscribes to changes of": live}
    return "; ".join(f"{verb} {_names(names)}" for verb, names in parts.items() if names) or "none"


def _subscribed(role: Role) -> tuple[str, ...]:
    return rights()[role].subscribe


def _of(table: Mapping[str, tuple[Role, ...]], role: Role) -> list[str]:
    return [name for name, roles in table.items() if role in roles]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
