"""What commands share: the options of all, the two output formats, and the error that ends a command."""

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

C = TypeVar("C", bound=Callable[..., Any])


class CliError(Exception):
    """A command failed. The text names the cause and the remedy; ``code`` is the exit code.

    ``reason``: the error code of its API, or ``unreachable``.
    """

    def __init__(self, text: str, code: int = 1, *, reason: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason


Output = Literal["text", "json"]
"""Format of a command's answer."""
_output: ContextVar[Output] = ContextVar("output", default="text")
given_url: ContextVar[str] = ContextVar("url", default="")
"""``--url``; empty without it."""


def _keep_output(context: typer.Context, value: Output | None) -> None:
    if value is not None or context.parent is None:
        _output.set(value or "text")


def _keep_url(context: typer.Context, value: str | None) -> None:
    if value is not None or context.parent is None:
        given_url.set(value or "")


OutputOption = Annotated[
    Output | None,
    typer.Option("--output", "-o", callback=_keep_output, expose_value=False, help="text, or JSON for programs."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        callback=_keep_url,
        expose_value=False,
        help="The console. Default: KYB_URL, else the stack that runs here.",
    ),
]


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_common(super().get_params(ctx), ctx)


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _with_common(super().get_params(ctx), ctx)


def _with_common(params: list[Any], context: Any) -> list[Any]:
    """Options of the root and of a group that it does not take itself, as --version, belong to each command below."""
    common: list[Any] = []
    while (context := context.parent) is not None:
        common += [one for one in context.command.params if one.name in ("output", "url", "file")]
    return [*params, *common]


class Commands(typer.Typer):
    """Commands that take the root's options, in front of the command's name or after it; the last one counts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[C], C]:
        """As Typer's."""
        settings.setdefault("cls", _Command)
        return super().command(name, **settings)


def as_json() -> bool:
    """Whether ``-o json`` is given."""
    return _output.get() == "json"


def shown(value: Any) -> Any:
    """What others wrote, for a terminal: what is not printable is escaped, also within lists and objects. JSON escapes
    it by itself."""
    if as_json():
        return value
    if isinstance(value, str):
        parts = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in value)
        return value if value.isprintable() else "".join(parts)
    if isinstance(value, dict):
        return {shown(name): shown(of) for name, of in value.items()}
    return [shown(one) for one in value] if isinstance(value, list) else value


def answer(data: dict[str, Any], text: str) -> None:
    """Print a command's whole answer."""
    print(json.dumps(data) if as_json() else text)
