"""Names that the shell completes, as the console knows them; none where there is none."""

from typing import Annotated

import typer

from kybernate.cli.output import CliError

ANSWER_SECONDS = 1.0
"""A shell that completes waits no longer for the console."""


def models(incomplete: str) -> list[str]:
    """Models with a seat."""
    return _names(incomplete, "model")


def groups(incomplete: str) -> list[str]:
    """Groups of GPUs."""
    return _names(incomplete, "home_group")


def groups_and_nodes(incomplete: str) -> list[str]:
    """What ``kyb drain`` and ``kyb resume`` take."""
    return [*groups(incomplete), *_names(incomplete, "node")]


def groups_and_models(incomplete: str) -> list[str]:
    """What ``kyb why`` can be asked about."""
    return [*groups(incomplete), *models(incomplete)]


def _names(incomplete: str, field: str) -> list[str]:
    from kybernate.cli.console import Console

    try:
        seats = Console.found(ANSWER_SECONDS).seats()["seats"]
    except CliError:
        return []
    return sorted({seat[field] for seat in seats if seat.get(field) and seat[field].startswith(incomplete)})


SeatArgument = Annotated[
    str,
    typer.Argument(metavar="SEAT|MODEL", help="seat/x, model/x, or x if only one seat fits.", autocompletion=models),
]
