"""Options that ``kyb simulate``, ``kyb plan`` and ``kyb tune`` have in common: the same names, the same help."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from kybernate.cli.output import CliError
from kybernate.sizes import MOST_BYTES, MOST_SECONDS, parse_size


def parse_gigabytes(text: object) -> float:
    """GB of ``text``: ``1TiB``, or a number of GB. Raises ValueError as ``parse_bytes``."""
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(str(text))) <= MOST_BYTES / 10**9:
            return number
    return parse_size(str(text)) / 10**9


def _size(text: object) -> float:
    try:
        return parse_gigabytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_TRACE = typer.Argument(metavar="TRACE", help="docs/dev/demo.md lists the formats; several are merged.")
Traces = Annotated[list[Path], _TRACE]
MaybeTraces = Annotated[list[Path] | None, _TRACE]
Start = Annotated[float, typer.Option(min=0, help="Begin at this second of the trace.")]
Duration = Annotated[float | None, typer.Option(min=1, help="Play this many seconds of the trace.")]
SpeedUp = Annotated[float, typer.Option(min=0.001, max=1000, help="2: gaps half as long, twice the load.")]

Groups = Annotated[int, typer.Option(min=1, max=512, help="Groups of GPUs on the node.")]
Slots = Annotated[int, typer.Option(min=1, max=100, help="Seats that a group runs at the same time.")]
Memory = Annotated[
    float,
    typer.Option(
        parser=_size, metavar="SIZE", help="Of a group: its seats share it, as many run as fit. 0: slots count."
    ),
]
Sharing = Annotated[
    float,
    typer.Option(
        min=0, max=1000, help="Each other busy seat of a group slows a seat's requests by this share, e.g. 0.3."
    ),
]
Cap = Annotated[int, typer.Option(min=1, max=65536, help="Requests that a seat serves side by side.")]
Cost = Annotated[
    str, typer.Option(help="stock-slow, stock, fast, pinned; GB/s out/in like 4/7; seconds to park/activate, 2.5s/3s.")
]
Measured = Annotated[
    Path | None, typer.Option(metavar="LEDGER", help="A GPU manager's ledger: costs that were learned there.")
]
Vram = Annotated[
    list[str] | None, typer.Option(metavar="[MODEL=]SIZE", help="Of a model, or of all others; may be given again.")
]
Kv = Annotated[
    float,
    typer.Option(
        parser=_size,
        metavar="SIZE",
        help="KV cache of one request in flight: each seat holds room for --cap of them, too.",
    ),
]
HostMemory = Annotated[
    float, typer.Option(parser=_size, metavar="SIZE", help="For parked seats: 1TiB, or GB; 0: no limit.")
]
Lanes = Annotated[
    int,
    typer.Option(
        min=0, max=1024, help="Parks and activations that the node carries at full speed; more run in turn. 0: any."
    ),
]
MoveSeconds = Annotated[
    float | None, typer.Option(min=0, max=MOST_SECONDS, help="Seats may move between groups, at this extra cost.")
]

Tier = Annotated[
    list[str] | None, typer.Option(metavar="[MODEL=]TIER", help="gold, silver, standard, bronze; again for more.")
]
Pin = Annotated[list[str] | None, typer.Option(metavar="MODEL", help="Never parked; may be given again.")]
Slo = Annotated[
    float | None, typer.Option(min=0.001, max=MOST_SECONDS, help="Seconds a request may wait, for every tier.")
]
Jitter = Annotated[float, typer.Option(min=0, max=3, help="Coefficient of variation of switch times.")]

Jobs = Annotated[int, typer.Option(min=1, max=256, help="Processes.")]


def writable(*paths: Path | None) -> None:
    """Before minutes go by: whether these files can be written, as far as their folders tell. Raises CliError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise CliError(f"{path}: cannot be written, there is no folder {path.parent}; make it first")
