"""``kyb migrate``, ``kyb drain`` and ``kyb resume``: operations that have a name and go on after the command."""

import json
import time
import uuid
from enum import StrEnum
from typing import Annotated, Any

import typer

from kybernate.cli.completion import SeatArgument, groups, groups_and_nodes
from kybernate.cli.output import CliError, as_json

POLL_SECONDS = 0.5
_PASSING = ("manager_unanswered", "bus_down", "not-ready", "unreachable")
"""Codes of refusals that end by themselves: a manager or router that is being restarted."""

Op = Annotated[
    str | None,
    typer.Option("--op", metavar="ID", help="Name of the operation; the same again answers the same one."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Until it is over; prints each phase as it begins.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that --wait waits; the operation goes on.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen, or why not.")]


class Scope(StrEnum):
    """What is drained."""

    GROUP = "group"
    NODE = "node"


ScopeArgument = Annotated[Scope, typer.Argument(metavar="group|node", show_default=False)]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A group (G0, or NODE/G0), or a node.", autocompletion=groups_and_nodes)
]


class DrainPurpose(StrEnum):
    """Why it is drained."""

    MAINTENANCE = "maintenance"
    UPGRADE = "upgrade"


def migrate(
    seat: SeatArgument,
    to: Annotated[
        str,
        typer.Option("--to", metavar="GROUP", help="The group on which it is to be active.", autocompletion=groups),
    ],
    op: Op = None,
    wait: Wait = False,
    timeout: Timeout = 900.0,
    dry_run: DryRun = False,
) -> None:
    """Park a seat and activate it on another group of its node."""
    _run(f"seats/{seat}/migrate", {"to": to}, op, wait, timeout, dry_run)


def drain(
    scope: ScopeArgument,
    name: NameArgument,
    purpose: Annotated[
        DrainPurpose, typer.Option("--for", help="upgrade parks pinned seats, too.")
    ] = DrainPurpose.MAINTENANCE,
    op: Op = None,
    wait: Wait = False,
    timeout: Timeout = 900.0,
    dry_run: DryRun = False,
) -> None:
    """Park all seats of a group's GPUs, or of a node, and start and activate none there until kyb resume."""
    _run(f"{scope.value}s/{name}/drain", {"purpose": purpose.value}, op, wait, timeout, dry_run)


def resume(
    scope: ScopeArgument,
    name: NameArgument,
    op: Op = None,
    wait: Wait = False,
    timeout: Timeout = 900.0,
    dry_run: DryRun = False,
) -> None:
    """End a drain: seats are started and activated again as requests come."""
    _run(f"{scope.value}s/{name}/resume", {}, op, wait, timeout, dry_run)


def _run(
    path: str,
    fields: dict[str, Any],
    op: str | None,
    wait: bool,
    timeout: float,
    dry_run: bool,
) -> None:
    from kybernate.cli.console import Console

    console, name = Console.found(), op or uuid.uuid4().hex[:12]
    reply = console.order(path, {**fields, "op": name, "dry_run": dry_run})
    shown: tuple[str, str] | None = None
    until = time.monotonic() + timeout
    while True:
        shown = _show(reply, shown)
        operation = reply.get("operation") or {}
        if dry_run or not wait or operation.get("outcome"):
            break
        if time.monotonic() >= until:
            raise CliError(f"not over within {timeout:g} s; it goes on: --op {name} asks again")
        time.sleep(POLL_SECONDS)
        try:
            reply = console.order(path, {**fields, "op": name})
        except CliError as error:
            if error.reason not in _PASSING:
                raise
    if operation.get("outcome") in ("failed", "cancelled"):
        raise CliError(f"{operation['outcome']}: {operation.get('text')}")


def _show(reply: dict[str, Any], shown: tuple[str, str] | None) -> tuple[str, str]:
    """Print a reply that says something new; return what it says."""
    operation = reply.get("operation") or {}
    now = (str(operation.get("phase", "")), str(operation.get("text", "")))
    if now == shown or (shown is not None and as_json() and now[0] == shown[0]):
        return shown or now
    if as_json():
        print(json.dumps(reply), flush=True)
    elif reply.get("dry_run"):
        print("\n".join(reply.get("plan") or ()), flush=True)
    else:
        text = f"  {now[1]}" if now[1] else ""
        print(f"{operation.get('verb')} {reply.get('op')}  {now[0]}{text}", flush=True)
    return now
