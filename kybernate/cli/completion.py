"""Names that the shell completes, as the console knows them; none where there is none."""

from collections.abc import Callable
from typing import Annotated

import typer

from kybernate.cli.console import Console
from kybernate.cli.output import CliError

ANSWER_SECONDS = 1.0
"""A shell that completes waits no longer for the console."""


def _names(*fields: str) -> Callable[[str], list[str]]:
    """The completion of a word by these fields of the seats."""

    def complete(incomplete: str) -> list[str]:
        try:
            seats = Console.found(ANSWER_SECONDS).seats()["seats"]
        except CliError:
            return []
        known = [sorted({seat[field] for seat in seats if seat.get(field)}) for field in fields]
        return [name for names in known for name in names if name.startswith(incomplete)]

    return complete


models = _names("model")
groups = _names("home_group")
groups_and_nodes = _names("home_group", "node")
groups_and_models = _names("home_group", "model")

SeatArgument = Annotated[
    str,
    typer.Argument(metavar="SEAT|MODEL", help="seat/x, model/x, or x if only one seat fits.", autocompletion=models),
]
