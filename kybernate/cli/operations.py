"""``kyb migrate``, ``kyb drain`` and ``kyb resume``: operations that have a name and go on after the command."""

import json
import time
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kybernate.cli.completion import SeatArgument, groups, groups_and_nodes
from kybernate.cli.output import CliError, answer, as_json

if TYPE_CHECKING:
    from kybernate.cli.console import Console

POLL_SECONDS = 0.5
WAIT_SECONDS = 900.0
"""Of --wait; the operation goes on. The command timeout of coreutils ends it earlier."""
_PASSING = ("manager_unanswered", "bus_down", "not-ready", "unreachable")
"""Codes of refusals that end by themselves: a manager or router that is being restarted."""

Op = Annotated[
    str | None,
    typer.Option("--op", metavar="ID", help="Name of the operation; the same again answers the same one."),
]
Wait = Annotated[bool, typer.Option("--wait", help="Until it is over; prints each phase as it begins.")]
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
    dry_run: DryRun = False,
) -> None:
    """Park a seat and activate it on another group of its node."""
    _run(f"seats/{seat}/migrate", {"to": to}, op, wait, dry_run)


def drain(
    scope: ScopeArgument,
    name: NameArgument,
    purpose: Annotated[
        DrainPurpose, typer.Option("--for", help="upgrade parks pinned seats, too.")
    ] = DrainPurpose.MAINTENANCE,
    op: Op = None,
    wait: Wait = False,
    dry_run: DryRun = False,
) -> None:
    """Park all seats of a group's GPUs, or of a node, and start and activate none there until kyb resume."""
    _run(f"{scope.value}s/{name}/drain", {"purpose": purpose.value}, op, wait, dry_run)


def resume(
    scope: ScopeArgument,
    name: NameArgument,
    op: Op = None,
    wait: Wait = False,
    dry_run: DryRun = False,
) -> None:
    """End a drain: seats are started and activated again as requests come."""
    _run(f"{scope.value}s/{name}/resume", {}, op, wait, dry_run)


GOALS = {"activate": ("active",), "pin": ("active",), "park": ("parked", "waiting")}
"""States of a seat in which a command is carried out; waiting: it is parked without a process."""


def command_seat(verb: str, name: str, wait: bool) -> None:
    """``kyb activate``, ``park``, ``pin``, ``unpin``: of each seat that the name means. Raises CliError."""
    from kybernate.cli.console import Console

    console = Console.found()
    replies = console.commands(name, verb)
    for reply in replies:
        if as_json():
            print(json.dumps({"verb": verb, **reply}), flush=True)
        else:
            what = "accepted" if wait else "accepted; see kyb status"
            print(f"{verb} {reply.get('model') or name}: {what}", flush=True)
    if wait:
        for seat in _settled(console, [str(reply["seat"]) for reply in replies], GOALS[verb]):
            answer(seat, f"{seat.get('model') or seat['seat']} is {seat['state']}")


def _settled(console: "Console", seats: list[str], goals: tuple[str, ...]) -> list[dict[str, Any]]:
    """Their rows once each was seen in one of these states. Raises CliError when that cannot be or takes too long."""
    until, found = time.monotonic() + WAIT_SECONDS, dict[str, dict[str, Any]]()
    while True:
        rows: list[dict[str, Any]] = []
        try:
            rows = [row for row in console.seats()["seats"] if row["seat"] in seats and row["seat"] not in found]
        except CliError as error:
            if error.reason not in _PASSING:
                raise
        for row in rows:
            what = f"{row.get('model') or row['seat']} is {row['state']}{in_brackets(row)}"
            if row["state"] in goals:
                found[row["seat"]] = row
            elif row["state"] in ("lost", "quarantined", "free"):
                raise CliError(f"{what}; see kyb why")
            elif time.monotonic() >= until:
                raise CliError(f"{what} after {WAIT_SECONDS:g} s; see kyb why")
        if len(found) == len(seats):
            return list(found.values())
        time.sleep(POLL_SECONDS)


def in_brackets(seat: dict[str, Any]) -> str:
    """What the manager says about a seat, in brackets."""
    return f" ({seat['reason']})" if seat.get("reason") else ""


def _run(
    path: str,
    fields: dict[str, Any],
    op: str | None,
    wait: bool,
    dry_run: bool,
) -> None:
    from kybernate.cli.console import Console

    console, name = Console.found(), op or uuid.uuid4().hex[:12]
    reply = console.order(path, {**fields, "op": name, "dry_run": dry_run})
    shown: tuple[str, str] | None = None
    until = time.monotonic() + WAIT_SECONDS
    while True:
        shown = _show(reply, shown)
        operation = reply.get("operation") or {}
        if dry_run or not wait or operation.get("outcome"):
            break
        if time.monotonic() >= until:
            raise CliError(f"not over within {WAIT_SECONDS:g} s; it goes on: --op {name} asks again")
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
