"""The two ways in which commands answer."""

from enum import StrEnum
from typing import Annotated

import typer


class Output(StrEnum):
    """How a command answers."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text, or JSON for programs.")]
