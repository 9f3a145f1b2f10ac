"""``kyb migrate``, ``kyb drain`` and ``kyb resume``: what they order stays so after the command."""

import json
import time
from typing import Annotated, Any, Literal

import typer

from kybernate.cli.completion import SeatArgument, groups, groups_and_nodes
from kybernate.cli.console import Console
from kybernate.cli.output import CliError, answer, as_json
from kybernate.seat import COMING, SeatState

POLL_SECONDS = 0.5
WAIT_SECONDS = 900.0
"""Of --wait; what was ordered goes on. The command timeout of coreutils ends it earlier."""
_PASSING = ("manager_unanswered", "bus_down", "not-ready", "unreachable")
"""Codes of refusals that end by themselves: a manager or router that is being restarted."""

Wait = Annotated[bool, typer.Option("--wait", help="Until it is so; prints what it waits for.")]


ScopeArgument = Annotated[Literal["group", "node"], typer.Argument(metavar="group|node", show_default=False)]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A group (G0, or NODE/G0), or a node.", autocompletion=groups_and_nodes)
]


def migrate(
    seat: SeatArgument,
    to: Annotated[
        str,
        typer.Option("--to", metavar="GROUP", help="The group on which it is to be active.", autocompletion=groups),
    ],
    wait: Wait = False,
) -> None:
    """Park a seat and activate it on another group of its node."""
    _run(f"seats/{seat}/migrate", {"to": to}, wait)


def drain(
    scope: ScopeArgument,
    name: NameArgument,
    purpose: Annotated[
        Literal["maintenance", "upgrade"], typer.Option("--for", help="upgrade parks pinned seats, too.")
    ] = "maintenance",
    wait: Wait = False,
) -> None:
    """Park all seats of a group's GPUs, or of a node, and start and activate none there until kyb resume."""
    _run(f"{scope}s/{name}/drain", {"purpose": purpose}, wait)


def resume(
    scope: ScopeArgument,
    name: NameArgument,
    wait: Wait = False,
) -> None:
    """End a drain: seats are started and activated again as requests come."""
    _run(f"{scope}s/{name}/resume", {}, wait)


GOALS = {"activate": ("active",), "pin": ("active",), "park": ("parked", "waiting")}
"""States of a seat in which a command is carried out; waiting: its engine has ended by itself."""


def command_seat(verb: str, name: str, wait: bool) -> None:
    """``kyb activate``, ``park``, ``pin``, ``unpin``: of each seat that the name means. Raises CliError."""
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


def _settled(console: Console, seats: list[str], goals: tuple[str, ...]) -> list[dict[str, Any]]:
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
    return f" ({why})" if (why := seat.get("reason") or seat.get("blocked")) else ""


def _run(path: str, fields: dict[str, Any], wait: bool) -> None:
    console, until = Console.found(), time.monotonic() + WAIT_SECONDS
    reply, shown = console.order(path, fields), ""
    while True:
        order = reply["operation"] or {}
        if order.get("outcome") == "failed":
            raise CliError(f"failed: {order['text']}")
        if (text := str(order.get("text"))) != shown:
            what = order.get("model") or reply.get("group") or reply["node"]
            answer(reply, f"{order.get('verb')} {what}: {text}")
            shown = text
        if not wait or order.get("outcome"):
            return
        if time.monotonic() >= until:
            raise CliError(f"not so within {WAIT_SECONDS:g} s; it goes on: kyb why shows it")
        time.sleep(POLL_SECONDS)
        reply = _now(console, reply)


def _now(console: Console, reply: dict[str, Any]) -> dict[str, Any]:
    """The reply with what is true now. A move that is over is not listed any more: its seat is there. Raises CliError
    when it was taken away."""
    order = reply["operation"]
    try:
        nodes = console.why(reply["node"])["nodes"]
    except CliError as error:
        if error.reason not in _PASSING:
            raise
        return reply
    if not nodes or any("unanswered" in node for node in nodes):
        return reply  # a console that has just started knows no node yet
    same = ("verb", "target", "to")
    for one in (one for node in nodes for one in node["operations"]):
        if all(one[name] == order[name] for name in same):
            return {**reply, "operation": one}
    for group in (group for node in nodes for group in node["groups"] if group["group"] == order["to"]):
        for seat in (seat for seat in group["seats"] if seat["seat"] == order["target"]):
            done = seat["state"] not in (*COMING, SeatState.STARTING)
            text = f"{order['model']} is {seat['state']} on group {order['to']}"
            return {**reply, "operation": {**order, "outcome": "done" if done else "", "text": text}}
    raise CliError(f"{order['verb']} {order['model'] or order['target'] or reply['node']} was taken back; see kyb why")
