"""Which seat a person means: ``seat/x``, ``model/x``, or a bare name that fits one seat only. Pure."""

from collections.abc import Sequence
from typing import Any

from kybernate.cli.errors import CliError
from kybernate.config_errors import suggest


def resolve(name: str, seats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one row of ``GET /v1/seats`` that is meant. Raises CliError when there is none, or more than one."""
    kind, slash, rest = name.partition("/")
    if slash and kind in ("seat", "model"):
        found = [seat for seat in seats if seat.get(kind) == rest]
    else:
        found = [seat for seat in seats if name in (seat.get("seat"), seat.get("model"))]
    if len({(seat.get("node"), seat.get("seat")) for seat in found}) == 1:
        return found[0]
    if not found:
        known = [str(seat[key]) for seat in seats for key in ("model", "seat") if seat.get(key)]
        hint = suggest(rest if slash else name, dict.fromkeys(known)) if known else "this stack has no seats yet"
        raise CliError(f"no seat or model is called {name!r}; {hint}")
    which = ", ".join(f"seat/{seat.get('seat')} (model {seat.get('model') or '?'})" for seat in found)
    raise CliError(f"{name!r} fits {len(found)} seats: {which}; name one", 2)
