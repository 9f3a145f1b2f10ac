"""What commands share: the options that many have, the two output formats, and the error that ends a command."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer


class CliError(Exception):
    """A command failed. The text names the cause and the remedy; ``code`` is the exit code.

    ``reason``: the error code of its API, or ``unreachable``.
    """

    def __init__(self, text: str, code: int = 1, *, reason: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason


class Output(StrEnum):
    """Format of a command's answer."""

    TEXT = "text"
    JSON = "json"


def answer(output: Output, data: dict[str, Any], text: str) -> None:
    """Print a command's whole answer."""
    print(json.dumps(data) if output is Output.JSON else text)


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text, or JSON for programs.")]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The console. Default: KYB_URL, else the stack that runs here."),
]
